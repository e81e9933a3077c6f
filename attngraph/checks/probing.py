"""Inputs of the checker's own: what a sample happens not to show.

What an input may be is read off the graph as it was captured: which tables an integer indexes,
which numbers it is compared with, whether it masks. From the sample come shapes, dtypes and which
value of a mask leaves a key visible. Values are drawn from a fixed seed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from attngraph.analysis.walks import made_of
from attngraph.checks.sizes import is_mask
from attngraph.ir import Graph, Node, TensorType, Value
from attngraph.ir.dims import Dim, DimInfo
from attngraph.ir.ops import op_def, split_inputs
from attngraph.ir.traits import (
    ADDITIVE,
    CAST,
    CHOICE,
    CLAMP,
    COMMUTATIVE,
    COMPARISON,
    EMBEDDING,
    EXPONENTIAL,
    FLOAT_TEST,
    INDEX,
    LAYOUT,
    LOG_SOFTMAX,
    LOG_SUM,
    MAGNITUDE,
    MAXIMUM,
    MINIMUM,
    POWER,
    REDUCTION,
    SCALE,
    SHIFT,
    SOFTMAX,
    Trait,
)

_CARRIED = LAYOUT | CAST
"""Ops whose result holds the input's own values."""
_SUMMED = _CARRIED | MAGNITUDE | POWER | SCALE | SHIFT | COMMUTATIVE | REDUCTION
"""What a test for empty rows computes from floats before it compares."""
_ADDED = _CARRIED | ADDITIVE | SHIFT | CLAMP | CHOICE | MAXIMUM | MINIMUM
_NORMALISED = SOFTMAX | LOG_SOFTMAX | LOG_SUM | EXPONENTIAL
_SDPA = "aten.scaled_dot_product_attention"
_DEPTH = 12
_BOX = 4
"""Integers in a row that are the corners of a box: their order is part of what they say."""
_SINGLED_OUT = 8
"""Draws in which the positions of one mask are hidden one by one."""
_BATCH = 4
"""Rows of a batch: one for each shape of a mask."""


@dataclass
class Role:
    """What the graph does with an input.

    `rows` is the size of the smallest table that it indexes; `marks` are the numbers that it is
    compared with; if `low`, what lies below is told from zero. `visible` and `hidden` are the two
    values of a mask. A `length` is compared with positions, a `segment` with other elements of
    itself. The rows of a `tested` float are compared, so that zeros may hide them.
    """

    rows: int | None = None
    marks: list[float] = field(default_factory=list)
    low: bool = False
    visible: float | None = None
    hidden: float | None = None
    length: bool = False
    segment: bool = False
    tested: bool = False

    @property
    def masks(self) -> bool:
        return self.visible is not None


@dataclass(frozen=True)
class Draw:
    """One set of drawn inputs: whether whole rows are hidden, the factor of floats, and what is
    drawn: masks alone, or ids and floats too. With a `constant` masks are that
    everywhere. `label` says it in words.
    """

    hides_rows: bool
    scale: float
    label: str
    masks_only: bool = False
    constant: bool | None = None


def roles_of(graph: Graph, args: Sequence[torch.Tensor]) -> list[Role]:
    """The role of each input of a captured graph, with the sample that was traced."""
    return [_role(value, tensor) for value, tensor in zip(graph.inputs, args, strict=True)]


def _role(value: Value, tensor: torch.Tensor) -> Role:
    role = Role()
    if not isinstance(value.type, TensorType) or not tensor.dim() or not tensor.numel():
        return role
    tables: list[int] = []
    if tensor.dtype.is_complex:
        return role
    is_float = tensor.is_floating_point()
    for node, held in _readers(value, _CARRIED):
        if (size := _table(node, held)) is not None:
            tables.append(size)
        elif node.op in COMPARISON:
            _compared(node, held, role)
        elif node.op in FLOAT_TEST and is_mask(tensor):
            role.marks.append(-math.inf)
            role.low = True
        elif node.op in CAST and node.outputs[0].dtype is torch.bool:
            role.marks.append(0)
    if is_float:
        role.tested = any(node.op in COMPARISON for node, _ in _readers(value, _SUMMED))
        _additive(value, tensor, role)
    elif tables:
        role.rows = min(tables)
    if not role.masks and not tables and not role.length and is_mask(tensor):
        _polarity(tensor, role)
    return role


def bounds_of(graph: Graph) -> dict[int, Dim]:
    """The size of the dynamic axis that an input's integers index, by the input's position."""
    found: dict[int, Dim] = {}
    for place, value in enumerate(graph.inputs):
        if not isinstance(value.type, TensorType) or value.dtype not in (torch.int64, torch.int32):
            continue
        sizes = [_indexed(node, held) for node, held in _readers(value, _CARRIED)]
        dynamic = {size for size in sizes if size is not None and not isinstance(size, int)}
        if len(dynamic) == 1:
            found[place] = dynamic.pop()
    return found


def _indexed(node: Node, held: Value) -> Dim | None:
    """The size of the axis that an integer chooses from."""
    source = node.inputs[0]
    if source is None or source is held or not isinstance(source.type, TensorType):
        return None
    named = split_inputs(op_def(node.op), node.inputs, node.attrs)
    if "dim" in node.attrs and named.get("index") is held:
        return source.shape[int(node.attrs["dim"])]
    is_row = node.op in INDEX | EMBEDDING and node.inputs[1:2] == (held,)
    return source.shape[0] if is_row else None


def without_masks(roles: Sequence[Role]) -> list[Role]:
    """The roles with the sample's own masks kept, so that every query has a key."""
    return [Role(rows=None if role.marks else role.rows) for role in roles]


def _readers(value: Value, through: Trait) -> Iterator[tuple[Node, Value]]:
    """The nodes that read a value, also through such ops; and the value that each of them reads."""
    seen: set[Value] = set()
    stack = [(value, 0)]
    while stack:
        held, depth = stack.pop()
        if held in seen or depth > _DEPTH:
            continue
        seen.add(held)
        for node in held.users:
            yield node, held
            if node.op in through:
                outputs = [each for each in node.outputs if isinstance(each.type, TensorType)]
                stack.extend((each, depth + 1) for each in outputs)


def _table(node: Node, held: Value) -> int | None:
    """The number of rows that a value chooses from, if it indexes a table of a static size."""
    source = node.inputs[0]
    if source is None or source.producer is not None or node.op not in INDEX | EMBEDDING:
        return None
    size = _indexed(node, held)
    return size if isinstance(size, int) else None


def _compared(node: Node, held: Value, role: Role) -> None:
    others = [value for value in node.inputs if value is not held and value is not None]
    is_below = node.op.split(".")[1] in (("lt", "ge") if node.inputs[0] is held else ("gt", "le"))
    if not others:
        number = node.attrs.get("other")
        if isinstance(number, (int, float)):
            role.marks.append(float(number))
            role.low |= _tells_below(number, is_below)
        elif len(node.inputs) == 1:
            role.length = True  # a size
        return
    (other, *_) = others
    if other.data is not None and other.data.numel() == 1:
        role.marks.append(float(other.data))
        role.low |= _tells_below(role.marks[-1], is_below)
    elif not _depends_on_inputs(other):
        role.length = True
    elif held.producer is not None:
        role.segment = True


def _tells_below(number: float, is_below: bool) -> bool:
    """Whether the comparison tells negatives from zero; `mask >= 0.5` tells ones from zeros."""
    return number < 0 or (is_below and number == 0)


def _depends_on_inputs(value: Value) -> bool:
    return any(one.producer is None and not one.is_constant for one in made_of(value))


def _additive(value: Value, tensor: torch.Tensor, role: Role) -> None:
    """A float of zeros and large negatives, or zeros that are added or told from what is below."""
    if not is_mask(tensor) or bool((tensor > 0).any()):
        return
    low = float(tensor.min())
    added = not role.marks and any(
        node.op in _NORMALISED or (node.op == _SDPA and held in node.inputs[3:])
        for node, held in _readers(value, _ADDED)
    )
    if low < 0 or added or role.low:
        lowest = min(torch.finfo(tensor.dtype).min, *role.marks, 0.0)
        role.visible, role.hidden = 0.0, low if low < 0 else lowest


def _polarity(tensor: torch.Tensor, role: Role) -> None:
    """Each row of a sample sees a key: where each holds a 1, that leaves a key visible."""
    is_on = bool(tensor.bool().any(-1).all())
    role.visible, role.hidden = (1.0, 0.0) if is_on else (0.0, 1.0)


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
        shape = "a row hidden" if hides_rows else "masks of every shape"
        said = [shape] * masks + ["drawn ids"] * ids + [f"floats × {scale:g}"] * floats
        found.append(Draw(hides_rows, scale, ", ".join(said)))
        if masks and (floats or ids):
            found.append(Draw(hides_rows, scale, shape, masks_only=True))
    if constant and masks:
        for value in (True, False):
            found.append(Draw(not value, 1.0, f"masks all {value}", True, constant=value))
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
        if role.masks:
            assert role.visible is not None
            assert role.hidden is not None
            made = torch.full_like(tensor, role.visible)
            if draw.constant is not None:
                made = made.fill_(role.visible if draw.constant else role.hidden)
            else:
                hidden = shapes_of_mask(tensor.shape, draw.hides_rows, place)
                made = made.masked_fill(hidden, role.hidden)
        elif role.length and not tensor.is_floating_point():
            made = _lengths(tensor, sample, draw)
        elif draw.masks_only:
            made = tensor
        elif not tensor.is_floating_point():
            made = _integers(tensor, role, draw, place, random)
        elif _is_scaled(role, sample):
            made = tensor * draw.scale
            if role.tested and tensor.dim() > 1:
                hidden = shapes_of_mask(tensor.shape[:-1], draw.hides_rows, place)
                made = made.masked_fill(hidden.unsqueeze(-1), 0.0)
        if role.marks and not role.masks and draw.constant is not None:
            made = _all_or_none(tensor, role, hidden=not draw.constant)
        elif role.marks and not role.masks and not draw.masks_only:
            made = _marked(made, role, draw, place)
        found.append(made)
    return tuple(found)


def singled_out(
    roles: Sequence[Role], args: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, ...]]:
    """The sample with one position of a row hidden at a time, then with all but one hidden.

    Each row of a batch hides another, so that a mask is looked through in some draws.
    """
    masks = [
        place
        for place, (role, tensor) in enumerate(zip(roles, args, strict=True))
        if (role.masks or role.marks) and tensor.dim()
    ]
    for place, alone in itertools.product(masks, (True, False)):
        role, tensor = roles[place], args[place]
        rows, keys = math.prod(tensor.shape[:-1]), tensor.shape[-1]
        for first in range(0, min(keys, _SINGLED_OUT * rows), max(rows, 1)):
            chosen = (torch.arange(rows) + first) % keys
            hidden = (torch.arange(keys) == chosen[:, None]).view(tensor.shape)
            hidden = hidden if alone else ~hidden
            value = role.marks[0] if role.hidden is None else role.hidden
            open_ = tensor if role.visible is None else torch.full_like(tensor, role.visible)
            yield (*args[:place], open_.masked_fill(hidden, value), *args[place + 1 :])


def _is_scaled(role: Role, sample: torch.Tensor) -> bool:
    """Whether another magnitude makes sense: not of masks, nor of whole numbers such as times."""
    if not sample.is_floating_point() or role.masks or role.marks or is_mask(sample):
        return False
    return not bool((sample == sample.round()).all())


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
    hidden = shapes_of_mask(tensor.shape, draw.hides_rows, place)
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


def shapes_of_mask(shape: Sequence[int], hides_rows: bool, turn: int) -> torch.Tensor:
    """What is hidden along the last axis, row by row: padding on the left, on the right, holes,
    nothing; or, with `hides_rows`, whole rows between open ones.

    A single row has padding on both sides and a hole. `turn` says with which shape to begin, so
    that two masks of one call differ.
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
    if shape[0] == 1:
        both = (place < keys // 4) | (place >= keys - max(keys // 4, 1)) | (place == keys // 2)
        kinds = [both if keys > 2 else nothing]
    else:
        kinds = [left, right, holes, nothing]
    rows = torch.stack([kinds[(row + turn) % len(kinds)] for row in range(shape[0])])
    return rows.view(shape[0], *[1] * (len(shape) - 2), keys).expand(shape)


def _hidden_rows(
    shape: tuple[int, ...], kinds: tuple[torch.Tensor, torch.Tensor], turn: int
) -> torch.Tensor:
    """In a mask over queries and keys one query of some elements, else all of an element."""
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
