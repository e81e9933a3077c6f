"""Inputs and outputs that are no tensors and no numbers: a dtype, a device, a slice, an Enum, a
function.

torch.export takes none of them. What a call is given in their place is a constant of the trace, as
a number is; so each is put in a box, of which torch sees no content, and the module's forward opens
it. An Enum stays the member that it is: code asks for it by `is`. What a model returns is put in a
box by its forward.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from attngraph.errors import UsageError
from attngraph.frontend.interface.own_classes import LEAVES
from attngraph.inference import INERT, each_leaf, is_named, is_size


class Fixed:
    """A box around such an input. Two are equal if what they hold is."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fixed) and (self.value is other.value or self.value == other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))


pytree.register_constant(Fixed)


def boxed(inputs: Any) -> Any:
    """Inputs, nested as they are, of which each that a trace doesn't take is in a box.

    Raises UsageError for a module, whose weights would be no part of the model.
    """

    def box(leaf: Any) -> Any:
        if isinstance(leaf, torch.nn.Module):
            raise UsageError(
                f"An input is a {type(leaf).__name__}, which is a module: make it an attribute of "
                "the model, so that its weights are the model's."
            )
        is_fixed = is_size(leaf) or (isinstance(leaf, INERT) and not isinstance(leaf, LEAVES))
        return Fixed(leaf) if is_fixed and not _holds_a_tensor(leaf) else leaf

    return each_leaf(box, inputs)


def opened(inputs: Any) -> Any:
    """The inputs, or outputs, that were `boxed`."""
    return pytree.tree_map(_content, inputs, is_leaf=_is_box)


@contextmanager
def boxes_opened(module: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """While it lasts, forward takes the boxes that are in these inputs for what is in them."""
    if not any(map(_is_box, pytree.tree_leaves((args, kwargs), is_leaf=_is_box))):
        yield
        return
    forward = module.forward

    def opening(*args: Any, **kwargs: Any) -> Any:
        return forward(*opened(args), **opened(kwargs))

    with _in_place_of(module, forward, opening):
        yield


@contextmanager
def outputs_boxed(module: torch.nn.Module) -> Iterator[None]:
    """While it lasts, forward returns what a trace doesn't take in boxes."""
    forward = module.forward

    def boxing(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        return pytree.tree_map(lambda leaf: Fixed(leaf) if is_named(leaf) else leaf, output)

    with _in_place_of(module, forward, boxing):
        yield


@contextmanager
def _in_place_of(
    module: torch.nn.Module, forward: Callable[..., Any], other: Callable[..., Any]
) -> Iterator[None]:
    before = module.__dict__.get("forward")
    stated = functools.wraps(forward)(other)
    setattr(stated, "__signature__", inspect.signature(forward))  # noqa: B010
    module.__dict__["forward"] = stated
    try:
        yield
    finally:
        module.__dict__.pop("forward")
        if before is not None:
            module.__dict__["forward"] = before


def _is_box(value: Any) -> bool:
    return isinstance(value, Fixed)


def _content(value: Any) -> Any:
    return value.value if isinstance(value, Fixed) else value


def _holds_a_tensor(value: Any) -> bool:
    ends = (value.start, value.stop, value.step) if isinstance(value, slice) else ()
    return any(isinstance(end, torch.Tensor) for end in ends)
