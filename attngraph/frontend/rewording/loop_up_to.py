"""Loops up to a number of the loop around them, `for j in range(i + 1)`: blocks up to the diagonal.

Neither torch nor ONNX has a scan of as many steps as a tensor says. Where the bounds are affine in
the number of the step around them, the inner loop has as many steps as the longest one needs, and
those that the code doesn't have carry on what they are given. If the first step has none, as
of `range(i)`, it has one more: there is no scan without a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from attngraph.frontend.rewording.loop_choices import Known, Undefined, as_tensor
from attngraph.frontend.rewording.loop_lists import Unread
from attngraph.frontend.rewording.loop_ranges import Range

Bounds = Sequence[Any]


class Until(NamedTuple):
    """Where the range of a step stops, and whether that of each step has a number."""

    stop: torch.Tensor
    is_some: bool


def up_to(known: Known, bounds: Bounds, of: Callable[[Any], Bounds]) -> tuple[Bounds, Until | None]:
    """Of a range in a step of which something is `known`, and of whose number these are the bounds:
    those of the longest one, and until where that of this step goes; None if it is no tensor.
    """
    stop = Range.of(bounds).stop
    if known.steps is None or not isinstance(stop, torch.Tensor) or stop.dtype != torch.int64:
        return bounds, None
    longest = _longest(known.steps, of)
    return (bounds, None) if longest is None else (longest[0], Until(stop, longest[1]))


def _longest(steps: Range, of: Callable[[Any], Bounds]) -> tuple[Bounds, bool] | None:
    """Of ranges whose bounds are affine in the numbers of the steps, that which has the numbers of
    all of them, if the next has no fewer, and whether each has one; None if that isn't known.
    """
    if type(steps.start) is not int or steps.step < 0:
        return None
    numbers = (steps.start, steps.start + steps.step, steps.last)
    first, second, last = (Range.of(of(number)) for number in numbers)
    ends = (first.start, first.stop, second.stop, first.step)
    others = [(each.start, each.step) for each in (second, last)]
    if not all(type(each) is int for each in ends) or first.step < 1:
        return None
    if any(each != (first.start, first.step) for each in others):
        return None
    if first.stop > second.stop:
        return None
    is_some = first.start < first.stop
    more = 0 if is_some else first.start - first.stop + first.step
    return (first.start, last.stop + more, first.step), is_some


def counting_up_to(
    body: Callable[..., Any], count: int, wanted: Sequence[bool], *, is_some: bool
) -> Callable[..., Any]:
    """Steps that take where they stop as one more, and from there on carry on what they are given:
    the first `count` of the rest, of which some are `wanted`. The first one counts if it `is_some`.
    """

    def step(known: Known, number: Any, *args: Any) -> Any:
        *own, until = args
        after, made = body(known, number, *own)
        if made:
            raise Unread("lists and rows of as many steps as a number in a tensor says")
        if known.is_it and is_some:
            return after, made
        given = own[:count]
        if any(
            each and isinstance(value, Undefined) for each, value in zip(wanted, given, strict=True)
        ):
            raise Unread("what is defined by as many steps as a number in a tensor says")
        return [_where(number < until, *each) for each in zip(after, given, strict=True)], made

    return step


def _where(is_counted: torch.Tensor, value: Any, before: Any) -> Any:
    """What a step carries on; what isn't there before it stays its own."""
    if isinstance(before, Undefined):
        return value
    leaves, spec = pytree.tree_flatten(value)
    others, how = pytree.tree_flatten(before)
    if how != spec:
        raise Unread("another kind of thing is carried")
    chosen = [
        one if one is other else torch.where(is_counted, as_tensor(one), as_tensor(other))
        for one, other in zip(leaves, others, strict=True)
    ]
    return pytree.tree_unflatten(chosen, spec)
