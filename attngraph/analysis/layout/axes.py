"""Named axes: reads a tensor's elements through layout ops, so that layouts need no patterns.

An `Atom` is one index variable. Each dim of a tensor is indexed by a tuple of atoms, major to minor
(einops' decomposition); an empty tuple is the index 0. Going up through a reshape regroups atoms,
splitting one where a boundary falls inside it; a permute reorders dims; an expand forgets atoms; a
select fixes one to a constant. Nothing is matched: whatever the chain, the result is where each
element comes from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import sympy

from attngraph.analysis.layout.moves import (
    Broadcast,
    Copied,
    Cut,
    Interleaved,
    Permuted,
    Regrouped,
    Repeated,
    move_of,
)
from attngraph.ir import Dim, Node, Value
from attngraph.ir.dims import divide, product, same, same_shape


class Atom:
    """An index variable of some size; `const` fixes it. `split` replaces it by two, everywhere."""

    __slots__ = ("const", "parts", "size")

    def __init__(self, size: Dim, const: int | None = None) -> None:
        self.size = size
        self.const = const
        self.parts: tuple[Atom, Atom] | None = None

    def split(self, minor: Dim) -> bool:
        """Into (size / minor, minor), major first. False where that is not a whole number."""
        major = divide(self.size, minor)
        if major is None or (self.const is not None and not isinstance(minor, int)):
            return False
        if self.const is None:
            self.parts = (Atom(major), Atom(minor))
        else:
            high, low = divmod(self.const, int(minor))
            self.parts = (Atom(major, high), Atom(minor, low))
        return True

    def leaves(self) -> Iterator[Atom]:
        """What the atom stands for after all splits."""
        if self.parts is None:
            yield self
        else:
            for part in self.parts:
                yield from part.leaves()


Axes = tuple[tuple[Atom, ...], ...]


def resolve(atoms: Iterable[Atom]) -> tuple[Atom, ...]:
    """Atoms after all splits."""
    return tuple(leaf for atom in atoms for leaf in atom.leaves())


def fresh_axes(shape: Sequence[Dim]) -> Axes:
    """One new atom per dim; none where the size is 1."""
    return tuple(() if dim == 1 else (Atom(dim),) for dim in shape)


def size_of(atoms: Iterable[Atom]) -> Dim:
    """The number of index combinations."""
    return product(atom.size for atom in atoms)


@dataclass(frozen=True, slots=True)
class Operand:
    """A value and how its dims are indexed."""

    value: Value
    axes: Axes

    @property
    def dims(self) -> Axes:
        """The axes after all splits."""
        return tuple(resolve(dim) for dim in self.axes)

    @property
    def places(self) -> tuple[tuple[Atom | tuple[Dim, int], ...], ...]:
        """The dims, to be compared: a fixed index is equal to the same one of another atom."""
        return tuple(
            tuple(a if a.const is None else (a.size, a.const) for a in dim) for dim in self.dims
        )

    @property
    def atoms(self) -> tuple[Atom, ...]:
        """All variable atoms, in storage order."""
        return tuple(a for dim in self.dims for a in dim if a.const is None)


def regroup(atoms: Sequence[Atom], shape: Sequence[Dim]) -> Axes | None:
    """Distributes row-major atoms over dims of the given sizes; None where one doesn't divide."""
    queue = list(resolve(atoms))
    dims: list[tuple[Atom, ...]] = []
    for size in shape:
        taken: list[Atom] = []
        need = size
        while not same(need, 1):
            if not queue:
                return None
            atom = queue.pop(0)
            rest = divide(need, atom.size)
            if rest is not None:
                taken.append(atom)
                need = rest
                continue
            minor = divide(atom.size, need)
            if minor is None or not atom.split(minor) or atom.parts is None:
                return None
            taken.append(atom.parts[0])
            queue.insert(0, atom.parts[1])
            need = 1
        dims.append(tuple(taken))
    return None if queue else tuple(dims)


def broadcast_axes(axes: Axes, shape: Sequence[Dim], out_shape: Sequence[Dim]) -> Axes:
    """The axes of an operand of `shape` that was broadcast (aligned right) to `out_shape`."""
    aligned = axes[len(axes) - len(shape) :]
    outer = out_shape[len(out_shape) - len(shape) :]
    return tuple(
        () if dim == 1 and out != 1 else index
        for index, dim, out in zip(aligned, shape, outer, strict=True)
    )


def spread(value: Value, axes: Axes, shape: Sequence[Dim]) -> Operand:
    """An operand that was broadcast to `shape`, which `axes` index."""
    return Operand(value, broadcast_axes(axes, value.shape, shape))


def sides_of(node: Node, axes: Axes) -> list[Operand]:
    """The inputs of an elementwise node whose output `axes` index."""
    return [spread(value, axes, node.output.shape) for value in node.operands]


def _cut(cut: Cut, value: Value, axes: Axes) -> Axes | None:
    """A single place, or one of n equal parts."""
    dim, first = cut.dim, cut.first
    size, part = cut.source.shape[dim], 1 if cut.single else value.shape[dim]
    if first is None:
        return None
    if cut.single:
        return (*axes[:dim], (Atom(size, first),) if size != 1 else (), *axes[dim:])
    if cut.step != 1 or not (isinstance(size, int) and isinstance(part, int)) or part < 1:
        return None
    if size % part or first % part:
        return None
    picked = Atom(size // part, first // part)
    return tuple((picked, *index) if i == dim else index for i, index in enumerate(axes))


def _repeated(move: Repeated, axes: Axes) -> Axes | None:
    """The repetition is the major part of an index."""
    shape, inner = move.source.shape, []
    lead = len(axes) - len(shape)
    for index, size, times in zip(axes[lead:], shape, move.counts[lead:], strict=True):
        grouped = regroup(index, [times, size])
        if grouped is None:
            return None
        inner.append(grouped[1])
    return tuple(inner)


def _interleaved(move: Interleaved, axes: Axes) -> Axes | None:
    """The repetition is the minor part of an index."""
    dim = move.dim
    grouped = regroup(axes[dim], [move.source.shape[dim], move.times])
    return None if grouped is None else (*axes[:dim], grouped[0], *axes[dim + 1 :])


def _regrouped(move: Regrouped, value: Value, axes: Axes) -> Axes | None:
    shape = move.source.shape
    if same_shape(shape, value.shape):
        return axes
    if any(not dim and size != 1 for dim, size in zip(axes, value.shape, strict=True)):
        return None  # index 0 of a longer dim: not a plain regrouping
    return regroup([atom for dim in axes for atom in dim], shape)


def climb(operand: Operand) -> Operand | None:
    """Past one layout op: the same elements, named in the op's input. None at anything else."""
    value, axes = operand.value, operand.axes
    move = move_of(value)
    inner: Axes | None = None
    match move:
        case Copied():
            inner = axes
        case Regrouped():
            inner = _regrouped(move, value, axes)
        case Permuted():
            inner = tuple(axes[place] for place in move.inverse)
        case Broadcast(source):
            inner = broadcast_axes(axes, source.shape, value.shape)
        case Cut():
            inner = _cut(move, value, axes)
        case Repeated():
            inner = _repeated(move, axes)
        case Interleaved():
            inner = _interleaved(move, axes)
    return None if move is None or inner is None else Operand(move.source, inner)


def top(operand: Operand) -> Operand:
    """Past every layout op."""
    while (above := climb(operand)) is not None:
        operand = above
    return operand


def is_symbolic(dim: Dim) -> bool:
    """Whether a size is only known at run time."""
    return isinstance(dim, sympy.Basic)
