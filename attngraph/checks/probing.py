"""Inputs that the check draws itself, for what a sample happens not to show.

What an input may be is its role (roles.py). Values are drawn from a fixed seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from attngraph.checks.roles import Role
from attngraph.checks.sizes import is_mask
from attngraph.ir.dims import DimInfo

_BOX = 4
"""Integers in a row that are the corners of a box: their order is part of what they say."""
_SINGLED_OUT = 8
"""Draws in which the positions of one mask are hidden one by one."""
_BATCH = 4
"""Rows of a batch: one for each shape of a mask."""
HIDDEN = "a row hidden"
"""How the label of a draw says that masks hide whole rows in it."""
_SHAPES = ("padded on the left", "padded on the right", "with holes")
_MAGNITUDES = (1e-6, 50.0, 1e6)
"""Factors of floats: what cuts at a number, small or large, shows at one of them."""
_MANY = 10
"""The factor of whole numbers, which may be sizes: of grids, whose squares a model runs on."""


@dataclass(frozen=True)
class Draw:
    """One set of drawn inputs: whether whole rows are hidden, the factor of floats, and what is
    drawn: masks alone, or ids and floats too. With a `constant` masks are that everywhere, with
    `only` they have that one of the shapes; `padded` floats are 0 in the rows that a mask hides.
    `unmarked` floats don't hold the numbers that they are compared with, and have one sign if
    `signed` is 1 or −1; whole numbers are `counted` times as large; flags are `turned`. `label`
    says it in words.
    """

    hides_rows: bool
    scale: float
    label: str
    masks_only: bool = False
    constant: bool | None = None
    padded: bool = False
    only: int | None = None
    unmarked: bool = False
    signed: int = 0
    counted: int = 0
    turned: bool = False


def draws_of(
    roles: Sequence[Role], args: Sequence[torch.Tensor], *, constant: bool = False
) -> list[Draw]:
    """The sets of inputs that are worth trying for such roles, the preferred first; a model may
    take masks of its own sample's ids and floats only. With `constant`, masks that hide nothing and
    masks that hide everything are among them.
    """
    masks = any(role.masks or role.marks or role.length or role.tested for role in roles)
    floats = any(_is_scaled(role, tensor) for role, tensor in zip(roles, args, strict=True))
    ids = any(role.rows is not None or role.segment for role in roles)
    found = []
    for hides_rows, scale in ((False, 2.0), (True, 0.5)):
        if not (masks or floats or (ids and not hides_rows)):
            continue
        shape = HIDDEN if hides_rows else "masks of every shape"
        said = [shape] * masks + ["drawn ids"] * ids + [f"floats × {scale:g}"] * floats
        found.append(Draw(hides_rows, scale, ", ".join(said)))
        if masks and (floats or ids):
            found.append(Draw(hides_rows, scale, shape, masks_only=True))
    pairs = zip(roles, args, strict=True)
    if any(_rows_hidden(tensor, role, roles, args) for role, tensor in pairs):
        label = "masks of every shape, zeros where they hide"
        found.append(Draw(False, 1.0, label, padded=True))
    if any(role.flag for role in roles):
        found.append(Draw(False, 1.0, "flags turned", masks_only=True, turned=True))
    if constant and masks:
        for value in (True, False):
            found.append(Draw(not value, 1.0, f"masks all {value}", True, constant=value))
    return found


def contrasting_draws(roles: Sequence[Role], args: Sequence[torch.Tensor]) -> list[Draw]:
    """The sets on which two sides of a choice of Python's are told apart, if any input does that.

    Those of `draws_of` mix shapes of masks in one batch and keep near the sample's numbers. But `if
    (mask[:, -1] == 1).all()` looks at all rows at once, `if batch == 1: mask = None` is right while
    nothing is hidden, and `if length > 512: x = x.clamp(-50, 50)` while numbers are small. So here
    masks have one shape, ids are from all over their tables, and floats are tiny or huge.
    """
    if any(role.masks or role.marks or role.length or role.tested for role in roles):
        found = [Draw(False, 1.0, f"masks {each}", only=at) for at, each in enumerate(_SHAPES)]
    elif any(role.rows is not None for role in roles):
        found = [Draw(False, 1.0, "drawn ids")]
    else:
        found = []
    pairs = list(zip(roles, args, strict=True))
    if any(_is_measured(*pair) for pair in pairs):
        for times in _MAGNITUDES:
            found.append(Draw(False, times, f"floats × {times:g}", unmarked=True))
        for sign, said in ((1, "positive"), (-1, "negative")):
            label = f"{said} floats × {_MAGNITUDES[-1]:g}"
            found.append(Draw(False, _MAGNITUDES[-1], label, unmarked=True, signed=sign))
    if any(_is_counted(*pair) for pair in pairs):
        for times in (_MANY, -1):
            label = f"whole numbers × {times}"
            found.append(Draw(False, 1.0, label, unmarked=True, counted=times))
    return found


def drawn(
    draw: Draw,
    roles: Sequence[Role],
    args: Sequence[torch.Tensor],
    base: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Inputs of the sizes of `base`, which are the sample's `args` at those."""
    random = torch.Generator().manual_seed(17 + draw.hides_rows)
    found = []
    for place, (role, sample, tensor) in enumerate(zip(roles, args, base, strict=True)):
        made = tensor
        if draw.turned:
            made = ~tensor if role.flag else tensor
        elif role.masks:
            assert role.visible is not None
            assert role.hidden is not None
            made = torch.full_like(tensor, role.visible)
            if draw.constant is not None:
                made = made.fill_(role.visible if draw.constant else role.hidden)
            else:
                hidden = _hidden(tensor.shape, draw, place)
                made = made.masked_fill(hidden, role.hidden)
        elif role.length and not tensor.is_floating_point():
            made = _lengths(tensor, sample, draw)
        elif draw.masks_only:
            made = tensor
        elif draw.counted and _is_counted(role, sample):
            made = (tensor.abs() + 1) * draw.counted
        elif not tensor.is_floating_point():
            made = _integers(tensor, role, draw, place, random)
        elif _is_scaled(role, sample) or (draw.unmarked and _is_measured(role, sample)):
            made = (tensor.abs() * draw.signed if draw.signed else tensor) * draw.scale
            if role.tested and tensor.dim() > 1:
                hidden = _hidden(tensor.shape[:-1], draw, place)
                made = made.masked_fill(hidden.unsqueeze(-1), 0.0)
        if role.marks and not role.masks and draw.constant is not None:
            made = _all_or_none(tensor, role, hidden=not draw.constant)
        elif role.marks and not role.masks and not (draw.masks_only or draw.unmarked):
            made = _marked(made, role, draw, place)
        found.append(made)
    return tuple(_padded(found, roles) if draw.padded else found)


def _padded(found: Sequence[torch.Tensor], roles: Sequence[Role]) -> Iterator[torch.Tensor]:
    """The tensors, with 0 in the rows of floats that a mask hides, as padding is."""
    for role, tensor in zip(roles, found, strict=True):
        made = tensor
        for hidden in _rows_hidden(tensor, role, roles, found):
            made = made.masked_fill(hidden.view(*hidden.shape, *[1] * (made.dim() - 2)), 0.0)
        yield made


def _rows_hidden(
    tensor: torch.Tensor, role: Role, roles: Sequence[Role], given: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Which rows (B, S) of floats (B, S, …) the masks of that shape hide, for each mask."""
    if tensor.dim() < 3 or not _is_scaled(role, tensor):
        return []
    return [
        mask.eq(each.hidden)
        for each, mask in zip(roles, given, strict=True)
        if each.hidden is not None and not each.segment and mask.shape == tensor.shape[:2]
    ]


def singled_out(
    roles: Sequence[Role], args: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, ...]]:
    """The sample with one position of a row hidden at a time, then with all but one hidden.

    Each row of a batch hides another, so that a mask is looked through in some draws.
    """
    for place, (role, tensor) in enumerate(zip(roles, args, strict=True)):
        for open_, axes, value in _opened(role, tensor):
            shape = tensor.shape[:axes]
            rows, keys = math.prod(shape[:-1]), shape[-1]
            for alone in (True, False):
                for first in range(0, min(keys, _SINGLED_OUT * rows), max(rows, 1)):
                    chosen = (torch.arange(rows) + first) % keys
                    hidden = (torch.arange(keys) == chosen[:, None]) == alone
                    hidden = hidden.view(*shape, *[1] * (tensor.dim() - axes))
                    yield (*args[:place], open_.masked_fill(hidden, value), *args[place + 1 :])


def opened(roles: Sequence[Role], args: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The sample with nothing hidden."""
    pairs = zip(roles, args, strict=True)
    return tuple(next((each for each, *_ in _opened(*pair)), pair[1]) for pair in pairs)


def _opened(role: Role, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, int, float]]:
    """An input that hides nothing, by how many of its axes it hides, and the number that does: a
    mask's elements, and rows of floats that are told by what they hold.
    """
    if tensor.dim() and (role.masks or role.marks):
        open_ = tensor if role.visible is None else torch.full_like(tensor, role.visible)
        yield open_, tensor.dim(), role.marks[0] if role.hidden is None else role.hidden
    is_told = tensor.is_floating_point() and not role.masks and (role.tested or role.marks)
    if tensor.dim() > 1 and is_told:
        size = float(tensor.abs().nan_to_num(posinf=0.0).max()) or 1.0
        drawn = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(0))
        value = role.marks[0] if role.marks else 0.0
        yield ((drawn + 0.5) * size / 1.5).to(tensor), tensor.dim() - 1, value


def spoilt(
    roles: Sequence[Role], args: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, ...]]:
    """The sample with a number that isn't finite in the middle of one of its floats at a time."""
    for place, (role, tensor) in enumerate(zip(roles, args, strict=True)):
        if _is_measured(role, tensor):
            for value in (math.nan, math.inf, -math.inf):
                middle = torch.arange(tensor.numel()).view(tensor.shape) == tensor.numel() // 2
                yield (*args[:place], tensor.masked_fill(middle, value), *args[place + 1 :])


def _is_scaled(role: Role, sample: torch.Tensor) -> bool:
    """Whether another magnitude makes sense: not of masks, nor of whole numbers such as times."""
    return not role.marks and _is_measured(role, sample)


def _is_measured(role: Role, sample: torch.Tensor) -> bool:
    """Whether an input is of real numbers."""
    if not sample.is_floating_point() or role.masks or is_mask(sample):
        return False
    return not bool((sample == sample.round()).all())


def _is_counted(role: Role, sample: torch.Tensor) -> bool:
    """Whether an input is of whole numbers that say how much: neither ids nor lengths nor parts."""
    if sample.dtype not in (torch.int64, torch.int32) or is_mask(sample):
        return False
    return not (role.masks or role.length or role.segment) and role.rows is None


def _integers(
    tensor: torch.Tensor, role: Role, draw: Draw, place: int, random: torch.Generator
) -> torch.Tensor:
    is_box = tensor.dim() > 1 and tensor.shape[-1] == _BOX
    if role.rows is not None and not is_box:
        ids = torch.randint(role.rows, tensor.shape, generator=random).to(tensor)
        flat = ids.view(-1)
        if flat.numel() > 1:
            flat[0], flat[-1] = role.rows - 1, 0
        return ids
    if role.segment and tensor.dim() > 1 and not role.marks:
        length = tensor.shape[-1]
        parts = torch.arange(length) * 3 // max(length, 1)
        rows = torch.stack([parts.roll(row + place) for row in range(tensor.shape[0])])
        shape = [tensor.shape[0], *[1] * (tensor.dim() - 2), length]
        return (rows * (not draw.hides_rows)).view(shape).expand(tensor.shape).to(tensor).clone()
    return tensor


def _lengths(tensor: torch.Tensor, sample: torch.Tensor, draw: Draw) -> torch.Tensor:
    """Between one and what the sample holds at most; with rows hidden also none."""
    most = max(int(sample.max()), 1)
    least = 0 if draw.hides_rows else 1
    choices = torch.tensor([least, most, (most + 1) // 2, 1]).clamp_min(least)
    flat = choices.repeat(-(-tensor.numel() // len(choices)))[: tensor.numel()]
    return flat.view(tensor.shape).to(tensor)


def _marked(tensor: torch.Tensor, role: Role, draw: Draw, place: int) -> torch.Tensor:
    """The numbers that an input is compared with, where a mask would hide."""
    marks = list(dict.fromkeys(role.marks))
    hidden = _hidden(tensor.shape, draw, place)
    inside = [mark for mark in marks if role.rows is None or 0 <= mark < role.rows]
    if role.rows is None and not tensor.is_floating_point():
        inside += [mark + 1 for mark in marks]
    for at, mark in enumerate(inside):
        where = hidden if len(inside) == 1 else hidden & _turn(hidden.shape, at, len(inside))
        tensor = tensor.masked_fill(where, mark)
    return tensor


def _all_or_none(tensor: torch.Tensor, role: Role, *, hidden: bool) -> torch.Tensor:
    """A number that an input is compared with everywhere, or one that it isn't."""
    marks = [mark for mark in role.marks if role.rows is None or 0 <= mark < role.rows]
    if hidden:
        return torch.full_like(tensor, marks[0]) if marks else tensor
    other = next(number for number in range(1, len(marks) + 2) if number not in marks)
    for mark in marks:
        tensor = tensor.masked_fill(tensor == mark, other)
    return tensor


def _turn(shape: Sequence[int], at: int, count: int) -> torch.Tensor:
    size = shape[-1]
    return (torch.arange(size) % count == at).expand(tuple(shape))


def _hidden(shape: Sequence[int], draw: Draw, turn: int) -> torch.Tensor:
    return shapes_of_mask(shape, draw.hides_rows, turn, draw.only)


def shapes_of_mask(
    shape: Sequence[int], hides_rows: bool, turn: int, only: int | None = None
) -> torch.Tensor:
    """What is hidden along the last axis, row by row: padding on the left, on the right, holes,
    nothing; or, with `hides_rows`, whole rows between open ones.

    A single row has padding on both sides and a hole. `turn` says with which shape to begin, so
    that two masks of one call differ. With `only` all rows have that one of the shapes.
    """
    shape = tuple(shape)
    keys = shape[-1]
    place = torch.arange(keys)
    part = max(keys // 3, 1)
    left, right, holes = place < part, place >= keys - part, place % 3 == 1
    nothing, all_of_it = torch.zeros(keys, dtype=torch.bool), torch.ones(keys, dtype=torch.bool)
    if keys == 1:
        left = right = holes = nothing
    if len(shape) == 1:
        return all_of_it if hides_rows else holes
    if hides_rows:
        return _hidden_rows(shape, (nothing, all_of_it), turn)
    if only is not None:
        kinds = [(left, right, holes)[only]]
    elif shape[0] == 1:
        both = (place < keys // 4) | (place >= keys - max(keys // 4, 1)) | (place == keys // 2)
        kinds = [both if keys > 2 else nothing]
    else:
        kinds = [left, right, holes, nothing]
    rows = torch.stack([kinds[(row + turn) % len(kinds)] for row in range(shape[0])])
    return rows.view(shape[0], *[1] * (len(shape) - 2), keys).expand(shape)


def _hidden_rows(
    shape: tuple[int, ...], kinds: tuple[torch.Tensor, torch.Tensor], turn: int
) -> torch.Tensor:
    """Hides one query of some elements in a mask over queries and keys, else all of an element."""
    nothing, all_of_it = kinds
    chosen = torch.tensor([(row + turn) % 2 == 0 for row in range(shape[0])])
    if shape[0] == 1:
        chosen[:] = True
    if len(shape) > 2 and shape[-2] > 1:
        queries = torch.arange(shape[-2]) == shape[-2] // 2
        within = queries[:, None] & all_of_it
        return (chosen.view(-1, *[1] * (len(shape) - 1)) & within).expand(shape)
    rows = torch.where(chosen[:, None], all_of_it, nothing)
    return rows.view(shape[0], *[1] * (len(shape) - 2), shape[-1]).expand(shape)


def sizes_for(
    draw: Draw,
    sample: Mapping[str, int],
    dims: Mapping[str, DimInfo],
    batch: str | None,
) -> dict[str, int]:
    """The sample's sizes with a row of the batch for each shape of a mask; with whole rows hidden
    one size for all dims, where their ranges allow.
    """
    sizes = dict(sample)
    if draw.hides_rows and len(sample) > 1:
        low = max(max(dims[name].low, _BATCH) for name in sample)
        if all(_fits(dims[name], low) for name in sample):
            return dict.fromkeys(sample, low)
    if batch is not None and sizes[batch] < _BATCH and _fits(dims[batch], _BATCH):
        sizes[batch] = _BATCH
    return sizes


def _fits(info: DimInfo, size: int) -> bool:
    return info.low <= size and (info.high is None or size <= info.high)
