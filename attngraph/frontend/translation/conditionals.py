"""`torch.cond` as a choice between the results of both sides.

A side is a function of its operands (torch.export refuses one that writes into them), so what the
side that is not taken computes shows nowhere, be it NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from attngraph.errors import CaptureError
from attngraph.frontend.watching.locations import Locator

_aten = torch.ops.aten


def is_conditional(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is torch.ops.higher_order.cond


def chosen(
    node: fx.Node, flat: fx.Graph, asked: Any, sides: Sequence[Sequence[Any]]
) -> tuple[Any, ...]:
    """Adds to `flat` what chooses between the results of the true and the false side.

    Raises CaptureError where the sides give something other than tensors of one shape and dtype.
    """
    if isinstance(asked, bool):
        return tuple(sides[0] if asked else sides[1])
    condition = _scalar(node, flat, asked)
    return tuple(_choice(node, flat, condition, *pair) for pair in zip(*sides, strict=True))


def _choice(node: fx.Node, flat: fx.Graph, condition: fx.Node, ours: Any, theirs: Any) -> Any:
    if ours is theirs:
        return ours
    first, second = (_value(each) for each in (ours, theirs))
    alike = isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)
    if not alike or (str(first.shape), first.dtype) != (str(second.shape), second.dtype):
        raise CaptureError(
            f"The sides of torch.cond at {Locator().of(node)} give results of different shapes or "
            "types, of which a file can't choose one; make them alike."
        )
    return _made(node, flat, _aten.where.self, (condition, ours, theirs), first)


def _scalar(node: fx.Node, flat: fx.Graph, asked: fx.Node) -> fx.Node:
    """The condition as a bool tensor of no axes; it may be one of one element, or of sizes."""
    value, result = _value(asked), torch.empty((), dtype=torch.bool)
    if not isinstance(value, torch.Tensor):
        return _made(node, flat, _aten.full.default, ([], asked), result, {"dtype": torch.bool})
    if value.dtype is not torch.bool:
        asked = _made(node, flat, _aten.ne.Scalar, (asked, 0), value != 0)
    return _made(node, flat, _aten.reshape.default, (asked, []), result) if value.dim() else asked


def _made(
    node: fx.Node,
    flat: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    value: Any,
    kwargs: dict[str, Any] | None = None,
) -> fx.Node:
    made = flat.create_node("call_function", target, args, kwargs)
    made.meta = {**node.meta, "val": value}
    return made


def _value(item: Any) -> Any:
    return item.meta.get("val") if isinstance(item, fx.Node) else item


def conditional_notes(module: fx.GraphModule) -> Iterator[str]:
    """A sentence for each line of a program with a `torch.cond`."""
    said = set()
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            place = Locator().of(node) if is_conditional(node) else None
            if place is not None and place not in said:
                said.add(place)
                yield (
                    f"Both sides of torch.cond at {place} are computed, and one is chosen: indices "
                    "have to be within range on both."
                )
