"""Which conditions on the values of tensors Python asked while a model was traced, in their order.

What is asked becomes a value of the trace: an assertion that always holds reads it, whose message
has the line and the answer. Assertions are kept in a program, in their order, and mean nothing to a
graph.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from attngraph.ir.graph import Value

Place: TypeAlias = tuple[str, int]
"""A file and a line of the model's code, at which a tensor is asked to be true or false."""

_MARK = "asked at "


@dataclass(frozen=True)
class Asked:
    """A condition, a bool without dims, and the answer that a trace was given.

    `value` is None where a loop's step asks. Where it is `compared`, the model that was made to go
    this way agrees with the trace.
    """

    place: Place
    said: bool
    value: Value | None
    compared: bool = False


def mark(condition: torch.Tensor | torch.SymBool, place: Place, said: bool) -> None:
    """Keeps in a trace what is asked there of a tensor of one element, or of numbers."""
    if isinstance(condition, torch.SymBool):
        made: Any = condition
        asked = torch.full((), made, dtype=torch.bool)
    else:
        asked = (condition != 0).reshape(())
    torch._assert_async(asked == asked, _MARK + json.dumps([*place, said]))


def marked(node: fx.Node) -> tuple[Place, bool, fx.Node] | None:
    """What is marked at a node of a program: the line, the answer, and what makes the condition."""
    if node.target is not torch.ops.aten._assert_async.msg:
        return None
    (same, message, *_) = node.args
    if not str(message).startswith(_MARK) or not isinstance(same, fx.Node):
        return None
    file, line, said = json.loads(str(message).removeprefix(_MARK))
    condition = same.args[0]
    assert isinstance(condition, fx.Node)
    return (file, line), said, condition
