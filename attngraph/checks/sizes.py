"""Inputs of other sizes, from the sample's own values: parity is checked there too."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from attngraph.errors import UsageError

_BATCH = ("b", "bs", "n")


Allowed = Callable[[Mapping[str, int]], bool]
"""Whether the sizes of all dims may occur together."""
_TRIED = 6
_APART = 1 << 12


def choose_sizes(
    sample: Mapping[str, int],
    ranges: Mapping[str, tuple[int, int | None]],
    allowed: Allowed = lambda sizes: True,
) -> tuple[dict[str, int], ...]:
    """A smaller and a larger assignment of every dim in `sample`, each within its (min, max).

    Sizes are odd where the range allows, and differ from each other, are coprime and no dim's
    sample size, so that two dims taken for one another, or one the multiple of the other, show.
    The smaller one has batch 1 (a dim named b, bs, n or batch…) where the range allows; other dims
    are 1 only where nothing else is left. An assignment equal to the sample is left out, so fixed
    ranges give fewer than two.
    """
    found: list[dict[str, int]] = []
    for larger in (False, True):
        chosen: dict[str, int] = {}
        for name, size in sample.items():
            low, high = ranges.get(name, (1, None))
            low = max(low, 1)
            if not larger and low == 1 and size > 1 and _is_batch(name):
                chosen[name] = 1
                continue
            chosen[name] = _pick(name, size, low, high, larger, sample, chosen)
        if not allowed(chosen):
            chosen = _allowed(sample, ranges, larger, allowed)
        if chosen != dict(sample) and chosen not in found:
            found.append(chosen)
    return tuple(found)


def _allowed(
    sample: Mapping[str, int],
    ranges: Mapping[str, tuple[int, int | None]],
    larger: bool,
    allowed: Allowed,
) -> dict[str, int]:
    """Sizes that are allowed together, as few as possible of them the sample's."""
    lists = []
    for name, size in sample.items():
        low, high = ranges.get(name, (1, None))
        others = list(_candidates(size, max(low, 1), high, larger))
        alone = [other for other in others if allowed({**sample, name: other})]
        preferred = list(dict.fromkeys([*alone[:_TRIED], *others]))
        lists.append([*preferred[:_TRIED], size])
    combined = itertools.islice(itertools.product(*lists), _TRIED**5)
    found = (dict(zip(sample, sizes, strict=True)) for sizes in combined)
    return min(
        (sizes for sizes in found if allowed(sizes)),
        key=lambda sizes: sum(size == sample[name] for name, size in sizes.items()),
        default=dict(sample),
    )


def equal_sizes(
    sample: Mapping[str, int],
    ranges: Mapping[str, tuple[int, int | None]],
    pairs: Iterable[tuple[str, str]],
) -> dict[str, int]:
    """The sample's sizes with both dims of each pair given one that is in the range of both.

    A pair that has none is left as it is.
    """
    sizes = dict(sample)
    groups: dict[str, set[str]] = {name: {name} for name in sample}
    for pair in pairs:
        group = groups[pair[0]] | groups[pair[1]]
        low = max(ranges[name][0] for name in group)
        high = min((high for name in group if (high := ranges[name][1]) is not None), default=None)
        wanted = max(low, *(sizes[name] for name in pair))
        common = wanted if high is None else min(wanted, high)
        if common < low:
            continue
        for name in group:
            groups[name] = group
            sizes[name] = common
    return sizes


def _is_batch(name: str) -> bool:
    return name.lower() in _BATCH or name.lower().startswith("batch")


def _pick(
    name: str,
    size: int,
    low: int,
    high: int | None,
    larger: bool,
    sample: Mapping[str, int],
    chosen: Mapping[str, int],
) -> int:
    candidates = list(_candidates(size, low, high, larger))
    taken = {other for key, other in chosen.items() if key != name}

    def badness(value: int) -> tuple[bool, bool, bool, bool, bool]:
        return (
            value in taken,
            value == 1,
            value in sample.values(),
            any(math.gcd(value, other) > 1 for other in taken),
            value % 2 == 0,
        )

    return min(candidates, key=badness, default=size)


def _candidates(size: int, low: int, high: int | None, larger: bool) -> Iterator[int]:
    """Sizes on one side of the sample, the preferred first: about 0.6 and 1.7 times the sample."""
    if larger:
        top = 3 * size + 16 if high is None else min(high, 3 * size + 16)
        middle = min(size + max(1, (7 * size) // 10), top)
        yield from range(middle, top + 1)
        yield from range(middle - 1, size, -1)
    else:
        middle = max(low, (6 * size) // 10)
        yield from range(middle, low - 1, -1)
        yield from range(middle + 1, size)


def resized_inputs(
    args: Sequence[torch.Tensor],
    dynamic: Mapping[tuple[int, int], str],
    sizes: Mapping[str, int],
    *,
    turned: bool = True,
    ended: bool = False,
    untied: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The inputs with other sizes along their dynamic axes; values are the sample's own.

    `dynamic` names the dim of (input index, axis). Data is cut, or repeated; a repeat is rotated
    along another axis so that no two batch rows are the same. Masks (bool, 0 and 1, or additive:
    0 and at most −1e4) are stretched instead, which keeps left padding on the left and leaves the
    first and last key as they were; a row of the sample that sees a key still sees one. Integers
    that stand for a length of another input are not recognised. Those of a table, each column with
    categories of its own, stay in their columns unless they are `turned`. Where they are `ended`,
    each row of integers keeps its end, as text does that a model reads up to a token there. Where
    they are `untied`, each repeat of floats is a little less than the one before it, for a model
    that sorts them: the order of equal ones isn't defined.

    Raises UsageError for an axis that isn't there, a dim without a size, and a dim of two sizes in
    the sample.
    """
    found: dict[str, int] = {}
    for (index, axis), name in dynamic.items():
        if not (0 <= index < len(args) and 0 <= axis < args[index].dim()):
            raise UsageError(f"Dim {name!r} names axis {axis} of input {index}, which isn't there.")
        if name not in sizes:
            raise UsageError(f"Dim {name!r} was given no size.")
        size = args[index].shape[axis]
        if found.setdefault(name, size) != size:
            raise UsageError(f"Dim {name!r} is {found[name]} in one input and {size} in another.")
    resized = list(args)
    for (index, axis), name in sorted(dynamic.items()):
        others = {n for (i, a), n in dynamic.items() if i == index and a != axis}
        rows = axis == 0 and args[index].dim() > 1 and name not in others
        if is_mask(args[index]) and not rows:
            alone = all(i != index or a in (0, axis) for i, a in dynamic) and axis > 0
            resized[index] = _stretch(resized[index], axis, sizes[name], keep_holes=alone)
        else:
            rotate = not is_mask(args[index])
            counted = not args[index].is_floating_point()
            rotate = rotate and (turned or not counted)
            keeps_end = ended and counted and axis > 0
            resized[index] = _repeat(
                resized[index],
                axis,
                sizes[name],
                rotate=rotate,
                ended=keeps_end,
                untied=untied,
            )
    return tuple(resized)


def lowered_integers(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """Integers of which the largest are less by so much; others, floats and masks as they are."""
    if by <= 0 or not is_counting(tensor):
        return tensor
    low, high = (int(end) for end in tensor.aminmax())
    return tensor.clamp(max=max(high - by, min(low, 0)))


def filled_integers(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Integers of which the largest are so many, and none is more."""
    return torch.where(tensor == tensor.max(), size, tensor.clamp(max=size))


def summed_integers(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Integers (N,) of at least 0 in about the same proportions, whose sum is so much."""
    ends = tensor.clamp(min=0).cumsum(0).double()
    ends = (ends * size / ends[-1].clamp(min=1)).round()
    return ends.diff(prepend=ends.new_zeros(1)).to(tensor)


def is_counting(tensor: torch.Tensor) -> bool:
    """Whether it has integers, and they are no mask."""
    plain = not tensor.is_floating_point() and not tensor.is_complex()
    return plain and tensor.numel() > 0 and not is_mask(tensor)


def is_mask(tensor: torch.Tensor) -> bool:
    """Whether the values say mask: bool, or 0 and 1, or 0 and large negative."""
    if tensor.dtype is torch.bool:
        return True
    if tensor.numel() == 0 or tensor.is_complex():
        return False
    if bool(((tensor == 0) | (tensor == 1)).all()):
        return True
    return tensor.is_floating_point() and bool(((tensor == 0) | (tensor <= -1e4)).all())


def _repeat(
    tensor: torch.Tensor, axis: int, size: int, *, rotate: bool, ended: bool, untied: bool
) -> torch.Tensor:
    old = tensor.shape[axis]
    if old == size:
        return tensor
    _require_values(tensor)
    if _has_ends(tensor):
        place = torch.arange(size, dtype=torch.float64) * (old - 1) / max(size - 1, 1)
        lower = place.long().clamp(max=old - 2)
        steps = tensor.diff()[lower] * (place - lower).to(tensor.device)
        return tensor[lower] + steps.floor().to(tensor)
    if _is_ordered(tensor):
        return tensor[torch.arange(size, device=tensor.device) * old // size]
    around = tensor.dim() - 1 if axis != tensor.dim() - 1 else 0
    # Four integers in a row are a box, whose corners must keep their order.
    box = tensor.shape[around] == 4 and not tensor.is_floating_point()
    rotate = rotate and around != axis and not box
    turns = range(-(-size // old))
    copies = [tensor.roll(turn, around) if rotate else tensor for turn in turns]
    if untied and tensor.is_floating_point() and not bool((tensor == tensor.round()).all()):
        copies = [copy * (1 - turn / _APART) for turn, copy in enumerate(copies)]
    begin = len(copies) * old - size if ended else 0
    return torch.cat(copies, axis).narrow(axis, begin, size).contiguous()


def _has_ends(tensor: torch.Tensor) -> bool:
    """Whether it says where each of several packed sequences ends, from 0 on, as `cu_seqlens` and
    the offsets of bags do: no end is before the one that it follows.
    """
    if tensor.dim() != 1 or not is_counting(tensor):
        return False
    steps = tensor.diff()
    return bool(tensor[0] == 0 and (steps >= 0).all() and (steps > 1).any())


def _is_ordered(tensor: torch.Tensor) -> bool:
    """Whether its order is part of what it says: to which of several groups each row belongs, those
    of one side by side, as of a graph's nodes, or how long each of several sequences is, the
    longest first.
    """
    if tensor.dim() != 1 or tensor.is_floating_point() or tensor.is_complex():
        return False
    steps = tensor.diff()
    groups = (steps >= 0).all() and (steps == 0).any() and (steps > 0).any()
    return bool(groups or ((steps <= 0).all() and (steps < 0).any()))


def _stretch(mask: torch.Tensor, axis: int, size: int, *, keep_holes: bool) -> torch.Tensor:
    """Nearest neighbours with both ends kept; for one element, the last, which padding spares.

    `keep_holes` lets an inner key be hidden if any of those it stands for is. A mask over queries
    and keys can't have that: it would hide the diagonal.
    """
    old = mask.shape[axis]
    if old == size:
        return mask
    _require_values(mask)
    if size == 1:
        index = torch.tensor([old - 1])
    else:
        index = (torch.arange(size) * (old - 1) / (size - 1)).round().long()
    stretched = mask.index_select(axis, index.to(mask.device))
    if keep_holes and 2 < size < old:
        cell = (torch.arange(old, device=mask.device) * (size - 1) / (old - 1)).round()
        inner = [
            mask.index_select(axis, (cell == at).nonzero().flatten()).amin(axis, keepdim=True)
            for at in range(1, size - 1)
        ]
        ends = stretched.narrow(axis, 0, 1), stretched.narrow(axis, size - 1, 1)
        stretched = torch.cat([ends[0], *inner, ends[1]], axis)
    seen, kept = _visible(mask).any(axis), _visible(stretched).any(axis)
    lost = (seen & ~kept).unsqueeze(axis)
    if not bool(lost.any()):
        return stretched
    last = stretched.narrow(axis, size - 1, 1)
    value = torch.zeros_like(last) if _is_additive(mask) else torch.ones_like(last)
    head = stretched.narrow(axis, 0, size - 1)
    return torch.cat([head, torch.where(lost, value, last)], axis).contiguous()


def _require_values(tensor: torch.Tensor) -> None:
    if tensor.numel() == 0:
        raise UsageError(f"An input of shape {tuple(tensor.shape)} has no values to repeat.")


def _visible(mask: torch.Tensor) -> torch.Tensor:
    return mask == 0 if _is_additive(mask) else mask.bool()


def _is_additive(mask: torch.Tensor) -> bool:
    return mask.is_floating_point() and bool((mask < 0).any())
