"""What each layout op does, whatever its spelling: a few moves, which every reading follows.

Elements of a layout op's result are elements of its first input. `move_of` is the one table that
says which: readings of whole axes (axes.py), of affine indices (index_maps.py), of columns that are
known one by one (columns.py) and of single steps along an axis have a case for each move, and none
for an op.
"""

from __future__ import annotations

from dataclasses import dataclass

from attngraph.ir import Dim, Node, TensorType, Value
from attngraph.ir.dims import as_dim
from attngraph.ir.ops import attribute
from attngraph.ir.traits import (
    COPY,
    EXPAND,
    FLIP,
    PERMUTE,
    REPEAT,
    RESHAPE,
    ROLL,
    SELECT,
    SLICE,
    SPLIT,
)


@dataclass(frozen=True, slots=True)
class Move:
    """A way from a result to its source."""

    source: Value


class Copied(Move):
    """Each element stays in its place."""


class Regrouped(Move):
    """The elements keep their (row-major) order, in another shape."""


class Broadcast(Move):
    """Aligned at the right; along axes of size 1 all places have the one element."""


@dataclass(frozen=True, slots=True)
class Permuted(Move):
    """Axis i of the result is axis `order[i]` of the source."""

    order: tuple[int, ...]

    @property
    def inverse(self) -> tuple[int, ...]:
        """The axis of the result that each axis of the source is."""
        return tuple(self.order.index(axis) for axis in range(len(self.order)))


@dataclass(frozen=True, slots=True)
class Cut(Move):
    """Place i along `dim` is place `start` + i · `step`, where a start below 0 counts from the end.

    A `single` place has no axis in the result. `counted`: whether the start is surely no less
    than 0.
    """

    dim: int
    start: Dim
    step: Dim = 1
    single: bool = False
    counted: bool = False

    @property
    def first(self) -> int | None:
        """The start, counted from the front; None where only a run can tell."""
        size = self.source.shape[self.dim]
        if not isinstance(self.start, int) or self.start >= 0:
            return self.start if isinstance(self.start, int) else None
        return max(self.start + size, 0) if isinstance(size, int) else None


def counted_start(cut: Cut) -> Dim:
    """The start, where it is a number counted from the front."""
    is_from_end = isinstance(cut.start, int) and cut.start < 0
    return as_dim(cut.start + cut.source.shape[cut.dim]) if is_from_end else cut.start


@dataclass(frozen=True, slots=True)
class Reversed(Move):
    """Place i along each of `dims` is place size − 1 − i."""

    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rolled(Move):
    """Place i along `dim` is place (i − `by`) mod size."""

    dim: int
    by: Dim


@dataclass(frozen=True, slots=True)
class Repeated(Move):
    """Each axis is repeated as a whole, `counts` times for each axis of the result."""

    counts: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Interleaved(Move):
    """Each place along `dim` is there `times` times."""

    dim: int
    times: Dim


def move_of(value: Value) -> Move | None:
    """How a layout op made a value; None where something else did, or a run decides how."""
    node = value.producer
    source = node.inputs[0] if node is not None and node.inputs else None
    if node is None or source is None or not isinstance(source.type, TensorType):
        return None
    op, rank = node.op, len(source.shape)
    if op in COPY:
        return Copied(source)
    if op in RESHAPE:
        return Regrouped(source)
    if op in EXPAND:
        return Broadcast(source)
    if op in PERMUTE:
        return Permuted(source, tuple(permutation(node, rank)))
    if op in SELECT | SLICE | SPLIT:
        return _cut(node, value, source, attribute(node, "dim") % rank)
    if op in REPEAT:
        return _repeated(node, value, source)
    if op in FLIP:
        return Reversed(source, tuple(dim % rank for dim in attribute(node, "dims")))
    if op in ROLL:
        dims, shifts = attribute(node, "dims"), attribute(node, "shifts")
        return Rolled(source, dims[0] % rank, shifts[0]) if len(dims) == 1 else None
    return None


def permutation(node: Node, rank: int) -> list[int]:
    """The axis of the input that each axis of a PERMUTE op's result is; `rank` is how many."""
    op = node.op.removeprefix("aten.").partition(".")[0]
    order = list(range(rank))
    if op == "permute":
        return [dim % rank for dim in attribute(node, "dims")]
    if op in ("t", "numpy_T"):
        return order[::-1]
    if op == "mT":
        return [*order[:-2], *order[-2:][::-1]]
    if op in ("movedim", "moveaxis"):
        ends = [attribute(node, "source"), attribute(node, "destination")]
        sources, targets = ([end] if isinstance(end, int) else end for end in ends)
        moved = {to % rank: at % rank for at, to in zip(sources, targets, strict=True)}
        rest = iter([dim for dim in order if dim not in moved.values()])
        return [moved[dim] if dim in moved else next(rest) for dim in order]
    names = ("axis0", "axis1") if op == "swapaxes" else ("dim0", "dim1")
    first, second = (attribute(node, name) for name in names)
    if rank:
        order[first], order[second] = order[second], order[first]
    return order


def _cut(node: Node, value: Value, source: Value, dim: int) -> Cut:
    if node.op in SPLIT:
        before = (part.shape[dim] for part in node.outputs[: value.index])
        return Cut(source, dim, sum(before), counted=True)
    if node.op in SLICE:
        step = attribute(node, "step") if node.op == "aten.slice.Tensor" else 1
        return Cut(source, dim, attribute(node, "start") or 0, step)
    is_select = node.op == "aten.select.int"
    return Cut(source, dim, attribute(node, "index") if is_select else value.index, single=True)


def _repeated(node: Node, value: Value, source: Value) -> Move | None:
    if node.op == "aten.repeat_interleave.self_int":
        dim = attribute(node, "dim")
        if dim is None:
            return None  # of all elements in one row
        return Interleaved(source, dim % len(source.shape), attribute(node, "repeats"))
    counts = attribute(node, "dims" if node.op == "aten.tile" else "repeats")
    missing = len(value.shape) - len(counts)  # tile may leave out leading ones
    return Repeated(source, (*[1] * missing, *counts))
