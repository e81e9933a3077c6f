"""The scan that a loop becomes: what its steps carry, and one step that is tried before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._higher_order_ops.scan import scan
from torch.utils import _pytree as pytree

from attngraph.frontend.rewording.batched_joins import AtOnce, BatchedJoins, is_at_once
from attngraph.frontend.rewording.loop_choices import UNDEFINED, as_tensor
from attngraph.frontend.rewording.loop_lists import Unread
from attngraph.frontend.rewording.loop_ranges import Range, expr_of
from attngraph.frontend.rewording.number_classes import pythons_own

_WIDER = 3
"""Steps after which a state has the shape that it keeps."""


def scanned(
    all_steps: Range,
    steps: Range,
    call: Callable[..., Any],
    given: Sequence[Any],
    slices: Sequence[Any],
    wanted: Sequence[bool],
    kept: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    """What the last of `steps` carries out, and their results.

    `all_steps` have the slices. If the first of these is none of the steps, it counts for nothing:
    neither torch nor ONNX has a loop that may have no steps.
    """
    is_led, first = all_steps is not steps, all_steps.start
    lost = [at for at, value in enumerate(given) if value is UNDEFINED]
    new = [at for at in lost if wanted[at]]
    leaves, spec = pytree.tree_flatten([*given])
    leaves = [as_tensor(leaf) for leaf in leaves]
    places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    others = [at for at in range(len(leaves)) if at not in places]
    sized = {at: torch.zeros(size, 0) for at, size in enumerate(kept) if _is_dim(size)}
    ratios = _ratios(kept) if places else {}

    def step(carry: list[torch.Tensor], now: list[torch.Tensor], kept: Sequence[Any]) -> Any:
        own = list(leaves)
        for at, leaf in zip(places, carry, strict=True):
            own[at] = leaf
        own_kept = [sized[at].shape[0] if at in sized else value for at, value in enumerate(kept)]
        for at, number in ratios.items():
            own_kept[at] = number.item()
        after, made = call(now[0], pytree.tree_unflatten(own, spec), now[1:], own_kept)
        last = [after[at] for at in new]
        for at in lost:
            after[at] = UNDEFINED
        flat, how = pytree.tree_flatten(after)
        if how != spec or any(flat[at] is not leaves[at] for at in others):
            raise Unread("another kind of thing is carried")
        flat = [as_tensor(leaf) for leaf in flat]
        if is_led:
            for at in places:
                flat[at] = as_tensor(torch.where(now[0] != first, flat[at], own[at]))
        made = pytree.tree_map(as_tensor, [*made, *last])
        return [flat[at] for at in places], made

    items = [all_steps.numbers(), *slices]
    if places and _widen(leaves, places, step, items, kept) and is_led:
        # Of no steps the state would be as wide: the range is to have one.
        is_led, items = False, pytree.tree_map(lambda each: each[1:], items)
    carry, made = _run(step, [leaves[at] for at in places], items, kept)
    for at, leaf in zip(places, carry, strict=True):
        leaves[at] = leaf
    after = pytree.tree_unflatten(leaves, spec)
    for at, values in zip(new, made[len(made) - len(new) :], strict=True):
        after[at] = values[-1]
    made = list(made[: len(made) - len(new)])
    if is_led:
        made = pytree.tree_map(lambda each: each[1:], made)
    return after, made


def _run(
    step: Callable[..., Any],
    carried: Sequence[torch.Tensor],
    items: Sequence[Any],
    kept: Sequence[Any],
) -> tuple[list[torch.Tensor], list[Any]]:
    """All steps: one after the other in torch's scan, or at once where nothing is carried."""
    if not carried:
        with BatchedJoins():
            return [], torch.vmap(lambda *now: step([], list(now), kept)[1])(*items)
    if is_at_once():
        return _within(step, carried, items, kept)
    with pythons_own():
        return scan(lambda carry, now: step(carry, now, kept), [*carried], items)


def _within(
    step: Callable[..., Any],
    carried: Sequence[torch.Tensor],
    items: Sequence[Any],
    kept: Sequence[Any],
) -> tuple[list[torch.Tensor], list[Any]]:
    """A scan in steps that are computed at once: one for all of them, each of whose own steps is
    computed for all at once. torch has no rule for it.
    """
    level = AtOnce()
    carried = [level.everywhere(each) for each in carried]
    flat, spec = pytree.tree_flatten((carried, [*items], [*kept]))
    own = [at for at, each in enumerate(flat) if level.has(each)]
    steps_at = range(len(carried), len(carried) + len(pytree.tree_leaves([*items])))
    whole = [level.without(each) if at in own else each for at, each in enumerate(flat)]
    for at in steps_at:
        whole[at] = whole[at].movedim(1, 0) if at in own else whole[at]
    carried, items, kept = pytree.tree_unflatten(whole, spec)

    def at_once(carry: list[torch.Tensor], now: list[torch.Tensor]) -> Any:
        given, _ = pytree.tree_flatten((carry, now, kept))

        def one(*parts: torch.Tensor) -> Any:
            mine = list(given)
            for at, part in zip(own, parts, strict=True):
                mine[at] = part
            return step(*pytree.tree_unflatten(mine, spec))

        return torch.vmap(one)(*(given[at] for at in own))

    with level.outside(), pythons_own():
        carry, made = scan(at_once, [as_tensor(each) for each in carried], items)
        made = pytree.tree_map(lambda each: each.movedim(1, 0), made)
    return pytree.tree_map(level.within, (carry, made))  # type: ignore[no-any-return]


def joined(first: Any, others: Any) -> Any:
    """What the first step gives and what all others do, stacked; () of none."""
    if first == ():
        return others
    alone = pytree.tree_map(lambda each: as_tensor(each).unsqueeze(0), first)
    if others == ():
        return alone

    def join(one: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        if one.dtype != more.dtype or tuple(one.shape[1:]) != tuple(more.shape[1:]):
            raise Unread("steps that give tensors of different types")
        return torch.cat([one, more])

    return pytree.tree_map(join, alone, others)


def _widen(
    leaves: list[Any],
    places: Sequence[int],
    step: Callable[[list[torch.Tensor], list[Any], Sequence[Any]], tuple[list[Any], Any]],
    items: Sequence[Any],
    kept: Sequence[Any],
) -> bool:
    """Gives what is carried into the first step the shape and dtype in which it leaves it, as far
    as that is a broadcast: a state that begins as `zeros(d)`, `zeros(())`, 0 or whole numbers.
    Whether anything was given another.

    A step that would see the difference, as by a sum, is another function: the check of the trace
    tells. It is given copies: of what is read as a number here torch keeps that number, and would
    take it for that of every step.
    """
    before = list(leaves)
    now = pytree.tree_map(lambda each: each.new_zeros(each.shape[1:]), [*items])
    for _ in range(_WIDER):
        after, _ = step([leaves[at].clone() for at in places], now, kept)
        is_same = True
        for at, last in zip(places, after, strict=True):
            first, sizes = _sizes(leaves[at]), _sizes(last)
            if (first, leaves[at].dtype) == (sizes, last.dtype):
                continue
            own = sizes[len(sizes) - len(first) :]
            if len(first) <= len(sizes) and all(
                size in (1, wide) for size, wide in zip(first, own, strict=True)
            ):
                leaves[at] = as_tensor(leaves[at].to(last.dtype).expand(last.shape))
                is_same = False
        if is_same:
            break
    return any(leaves[at] is not before[at] for at in places)


def _sizes(value: torch.Tensor) -> list[Any]:
    """As expressions, whose comparison asks a trace nothing."""
    return [expr_of(size) for size in value.shape]


def _ratios(kept: Sequence[Any]) -> dict[int, torch.Tensor]:
    """By its place each number that is computed of sizes and isn't whole: a step gets it back from
    a tensor of all its digits as a number, which leaves a product the type of its tensor.
    """
    found = {}
    for at, each in enumerate(kept):
        if isinstance(each, torch.SymFloat):
            ratio: Any = each
            found[at] = torch.full((), ratio, dtype=torch.float64)
    return found


def _is_dim(value: Any) -> bool:
    """Whether it is the size of an axis, of which a step knows when it is given such an axis."""
    return isinstance(value, torch.SymInt) and value.node.expr.is_Symbol
