"""What a captured graph does with its inputs, and so what a check may draw for them.

It is read off the graph: which tables an integer indexes, which numbers it is compared with,
whether it masks. From the sample come shapes, dtypes and which value of a mask leaves a key
visible.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from attngraph.analysis.walks import made_of
from attngraph.checks.sizes import is_mask
from attngraph.ir import Graph, Node, TensorType, Value
from attngraph.ir.dims import Dim
from attngraph.ir.ops import named_inputs
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
_CUT = _CARRIED | CLAMP | CHOICE | MAXIMUM | MINIMUM
"""Ops that leave an index what it is, or make it one that is there, if they are given numbers."""
_SUMMED = _CARRIED | MAGNITUDE | POWER | SCALE | SHIFT | COMMUTATIVE | REDUCTION
"""What a test for empty rows computes from floats before it compares."""
_ADDED = _CARRIED | ADDITIVE | SHIFT | CLAMP | CHOICE | MAXIMUM | MINIMUM
_NORMALISED = SOFTMAX | LOG_SOFTMAX | LOG_SUM | EXPONENTIAL
_SDPA = "aten.scaled_dot_product_attention"
_DEPTH = 12


@dataclass
class Role:
    """What the graph does with an input.

    `rows` is the size of the smallest table that it indexes; `marks` are the numbers that it is
    compared with; if `low`, what lies below is told from zero. `visible` and `hidden` are the two
    values of a mask. A `length` is compared with positions, a `segment` with other elements of
    itself. The rows of a `tested` float are compared, so that zeros may hide them. A `flag` is a
    bool of no axes.
    """

    rows: int | None = None
    marks: list[float] = field(default_factory=list)
    low: bool = False
    visible: float | None = None
    hidden: float | None = None
    length: bool = False
    segment: bool = False
    tested: bool = False
    flag: bool = False

    @property
    def masks(self) -> bool:
        return self.visible is not None


def roles_of(graph: Graph, args: Sequence[torch.Tensor]) -> list[Role]:
    """The role of each input of a captured graph, with the sample that was traced."""
    return [_role(value, tensor) for value, tensor in zip(graph.inputs, args, strict=True)]


def _role(value: Value, tensor: torch.Tensor) -> Role:
    role = Role(flag=tensor.dtype is torch.bool and not tensor.dim())
    if not isinstance(value.type, TensorType) or not tensor.dim() or not tensor.numel():
        return role
    if tensor.dtype.is_complex:
        return role
    is_float = tensor.is_floating_point()
    for node, held in _readers(value, _CARRIED):
        if node.op in COMPARISON:
            _compared(node, held, role)
        elif node.op in FLOAT_TEST and is_mask(tensor):
            role.marks.append(-math.inf)
            role.low = True
        elif node.op in CAST and node.outputs[0].dtype is torch.bool:
            role.marks.append(0)
    tables = [
        size
        for node, held in _readers(value, _CUT, numbers=True)
        if (size := _table(node, held)) is not None
    ]
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
    if not source.shape:  # torch takes the only place of a number for one of an axis
        return None
    named = named_inputs(node)
    if "dim" in node.attrs and named.get("index") is held:
        return source.shape[int(node.attrs["dim"])]
    is_row = node.op in INDEX | EMBEDDING and node.inputs[1:2] == (held,)
    return source.shape[0] if is_row else None


def without_masks(roles: Sequence[Role]) -> list[Role]:
    """The roles with the sample's own masks kept, so that every query has a key."""
    return [Role(rows=None if role.marks else role.rows, flag=role.flag) for role in roles]


def _readers(
    value: Value, through: Trait, *, numbers: bool = False
) -> Iterator[tuple[Node, Value]]:
    """The nodes that read a value, also through such ops; and the value that each of them reads.

    With `numbers` a bool is read no further than where it chooses one.
    """
    seen: set[Value] = set()
    stack = [(value, 0)]
    while stack:
        held, depth = stack.pop()
        if held in seen or depth > _DEPTH:
            continue
        seen.add(held)
        for node in held.users:
            yield node, held
            chooses = numbers and node.op in CHOICE and held.dtype is torch.bool
            if node.op in through and not chooses:
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
