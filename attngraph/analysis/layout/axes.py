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

from attngraph.ir import Dim, Node, Value
from attngraph.ir.dims import divide, product, same, same_shape
from attngraph.ir.ops import attribute, input_of
from attngraph.ir.traits import COPY, EXPAND, PART, PERMUTE, REPEAT, RESHAPE, SELECT, SLICE


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


def _selected(node: Node, value: Value, axes: Axes) -> Axes | None:
    """select, unbind, and slices or splits that are one of n equal parts."""
    source = input_of(node, "self")
    shape = source.shape
    dim = attribute(node, "dim") % len(shape)
    size = shape[dim]
    if node.op in SELECT:
        index = attribute(node, "index") if node.op == "aten.select.int" else value.index
        if not isinstance(index, int) or (index < 0 and not isinstance(size, int)):
            return None
        picked = Atom(size, index % size if isinstance(size, int) else index)
        return (*axes[:dim], (picked,) if size != 1 else (), *axes[dim:])
    part = value.shape[dim]
    if node.op in SLICE:
        start = attribute(node, "start") or 0
        if isinstance(start, int) and start < 0 and isinstance(size, int):
            start = max(start + size, 0)
        if node.attrs.get("step", 1) != 1 or not isinstance(start, int) or start < 0:
            return None
    else:
        sizes = [output.shape[dim] for output in node.outputs]
        if not all(isinstance(s, int) for s in sizes):
            return None
        start = sum(int(s) for s in sizes[: value.index])
    if not (isinstance(size, int) and isinstance(part, int)) or part < 1:
        return None
    if size % part or start % part:
        return None
    picked = Atom(size // part, start // part)
    return tuple((picked, *index) if i == dim else index for i, index in enumerate(axes))


def _repeated(node: Node, source: Value, axes: Axes) -> Axes | None:
    if node.op == "aten.repeat_interleave.self_int":
        dim, times = attribute(node, "dim"), attribute(node, "repeats")
        if dim is None:
            return None
        dim %= len(axes)
        grouped = regroup(axes[dim], [source.shape[dim], times])
        if grouped is None:
            return None
        return tuple(grouped[0] if i == dim else index for i, index in enumerate(axes))
    lead = len(axes) - len(source.shape)
    repeats = node.attrs.get("dims" if node.op == "aten.tile" else "repeats", ())
    counts = [1] * (len(axes) - len(repeats)) + list(repeats)  # tile may leave out leading ones
    inner = []
    for index, size, times in zip(axes[lead:], source.shape, counts[lead:], strict=True):
        grouped = regroup(index, [times, size])  # the repetition is the major part
        if grouped is None:
            return None
        inner.append(grouped[1])
    return tuple(inner)


def climb(operand: Operand) -> Operand | None:
    """Past one layout op: the same elements, named in the op's input. None at anything else."""
    value, axes = operand.value, operand.axes
    node = value.producer
    if node is None:
        return None
    if node.op in COPY:
        source = node.inputs[0]
        return Operand(source, axes) if source is not None else None
    if not node.op.startswith("aten."):
        return None
    inner: Axes | None = None
    source = node.inputs[0] if node.inputs else None
    if source is None:
        return None
    if node.op in RESHAPE:
        if same_shape(source.shape, value.shape):
            return Operand(source, axes)
        if any(not dim and size != 1 for dim, size in zip(axes, value.shape, strict=True)):
            return None  # index 0 of a longer dim: not a plain regrouping
        inner = regroup([atom for dim in axes for atom in dim], source.shape)
    elif node.op in PART:
        inner = _selected(node, value, axes)
    elif node.op in EXPAND:
        inner = broadcast_axes(axes, source.shape, value.shape)
    elif node.op in REPEAT:
        inner = _repeated(node, source, axes)
    elif node.op in PERMUTE:
        order = permutation(node, len(axes))
        inner = tuple(axes[order.index(dim)] for dim in range(len(axes)))
    return None if inner is None else Operand(source, inner)


def top(operand: Operand) -> Operand:
    """Past every layout op."""
    while (above := climb(operand)) is not None:
        operand = above
    return operand


def is_symbolic(dim: Dim) -> bool:
    """Whether a size is only known at run time."""
    return isinstance(dim, sympy.Basic)
