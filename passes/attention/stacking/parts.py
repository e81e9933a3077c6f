"""Values that are the 1st, 2nd, … part of one value, read through whatever cut them out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from attngraph.analysis.layout.axes import Atom, Operand, fresh_axes, resolve, size_of, top
from attngraph.analysis.layout.cost import cost
from attngraph.ir import Builder, Value
from attngraph.passes.rewriting.materialize import materialize

_Place = tuple[int, int]  # of an atom: (dim, index within the dim)


def consecutive_parts(column: Sequence[Value], trailing: int) -> Callable[[Builder], Value] | None:
    """What builds all parts as one value, with their number as an axis before the last dims.

    The parts lie at equal distances in a value that they have in common, in the column's order.
    None where they don't.
    """
    rank, count = len(column[0].shape), len(column)
    if rank < trailing or count < 2:
        return None
    axes = [fresh_axes(value.shape) for value in column]
    read = [top(Operand(value, named)) for value, named in zip(column, axes, strict=True)]
    found = _varying(read, [[a for dim in named for a in resolve(dim)] for named in axes])
    if found is None:
        return None
    place, indices = found
    source, dims = read[0].value, [list(dim) for dim in read[0].dims]
    size, step = dims[place[0]][place[1]].size, indices[1] - indices[0]
    if any(b - a != step for a, b in pairwise(indices)) or not isinstance(size, int):
        return None
    part, first = Atom(count), indices[0]
    window: tuple[int, int] | None = None
    if step == 1 and size % count == 0 and first % count == 0:
        outer = [Atom(size // count, first // count)] if size > count else []
        dims[place[0]][place[1] : place[1] + 1] = [*outer, part]
    elif step == 1 and place[1] == 0:
        window = (first, first + count)
        dims[place[0]][0] = part
    elif step > 1 and size == step * count and first < step:
        dims[place[0]][place[1] : place[1] + 1] = [part, Atom(step, first)]
    else:
        return None
    whole = Operand(source, tuple(map(tuple, dims)))
    target = (*axes[0][: rank - trailing], (part,), *axes[0][rank - trailing :])
    if window is None and cost(whole, target) is None:
        return None

    def make(build: Builder) -> Value:
        if window is None:
            return materialize(build, whole, target)
        inner = size_of(dims[place[0]][1:])
        start, end = (index * inner for index in window)
        cut = build("aten.slice.Tensor", source, dim=place[0], start=start, end=end)
        return materialize(build, Operand(cut, whole.axes), target)

    return make


def _varying(
    read: Sequence[Operand], names: Sequence[Sequence[Atom]]
) -> tuple[_Place, list[int]] | None:
    """The one place at which the operands are indexed differently, by constants, and these."""
    first = read[0]
    number = [{atom: index for index, atom in enumerate(atoms)} for atoms in names]
    if any(operand.value is not first.value for operand in read):
        return None
    found: tuple[_Place, list[int]] | None = None
    for at, dim in enumerate(first.dims):
        for within, atom in enumerate(dim):
            others = []
            for operand in read:
                mine = operand.dims[at]
                if len(mine) != len(dim) or mine[within].size != atom.size:
                    return None
                others.append(mine[within])
            if all(a.const is None for a in others):
                if len({number[i].get(a) for i, a in enumerate(others)}) > 1:
                    return None
                continue
            constants = [a.const for a in others if a.const is not None]
            if len(constants) < len(others) or (found and len(set(constants)) > 1):
                return None
            if len(set(constants)) > 1:
                found = (at, within), constants
    return found
