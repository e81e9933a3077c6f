"""What each kind of op does with axes: the rules of which batching.py says what they are for."""

from __future__ import annotations

import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from attngraph.analysis.layout.contraction import einsum_terms
from attngraph.analysis.layout.moves import permutation
from attngraph.ir import Dim, Node, Value
from attngraph.ir.dims import same
from attngraph.ir.ops import attribute

T = TypeVar("T")
Track: TypeAlias = tuple[int | None, ...]
"""For each axis of an operand, the axis of the results that it becomes; None: computed over."""
Behind: TypeAlias = Sequence[int | None]
"""For each input, how many dims follow its new axis; None where it has none."""


@dataclass(frozen=True, slots=True)
class Batched:
    """A node over operands with a new axis, which has `behind` dims behind it in the results."""

    op: str
    attrs: Mapping[str, Any]
    behind: int


class Rule(ABC):
    """What a kind of op does with axes."""

    def broadcasts(self) -> bool:
        """Whether operands with a track may also have size 1 along an axis, or lack it."""
        return False

    def carriers(self, node: Node) -> range:
        """The positions of the inputs that may have a new axis; all others are read as they are."""
        return range(len(node.inputs))

    @abstractmethod
    def tracks(self, node: Node) -> Sequence[Track] | None: ...

    def batched(self, node: Node, behind: Behind, size: Dim) -> Batched | None:
        return None

    def resized(self, node: Node, lead: Sequence[Dim]) -> tuple[str, Mapping[str, Any]]:
        return node.op, node.attrs


def _rank(value: Value | None) -> int:
    return 0 if value is None else len(value.shape)


def none(node: Node) -> int:
    return 0


def one(node: Node) -> int:
    return 1


@dataclass(frozen=True)
class Aligned(Rule):
    """Operands are aligned at the right, and the op computes over the last `over` axes.

    The first `operands` have rows (all of them, if None); others are weights. `any_rank` is false
    where the op or its kernel wants a fixed number of axes.
    """

    over: Callable[[Node], int] = none
    operands: int | None = None
    any_rank: bool = True

    def broadcasts(self) -> bool:
        return self.operands is None

    def carriers(self, node: Node) -> range:
        return range(len(node.inputs) if self.operands is None else self.operands)

    def tracks(self, node: Node) -> Sequence[Track]:
        rank, found = len(node.outputs[0].shape), []
        end, carriers = rank - self.over(node), self.carriers(node)
        for position, value in enumerate(node.inputs):
            axes = range(rank - _rank(value), rank)
            carried = position in carriers
            found.append(tuple(axis if carried and axis < end else None for axis in axes))
        return found

    def batched(self, node: Node, behind: Behind, size: Dim) -> Batched | None:
        places = {place for place in behind if place is not None}
        place = min(places)
        fixed = [node.inputs[at] for at in self.carriers(node) if behind[at] is None]
        if not self.any_rank or len(places) > 1 or place < self.over(node):
            return None
        if any(_rank(value) > place for value in fixed):
            return None  # its first dims would be aligned with the new axis
        return Batched(node.op, node.attrs, place)


def keeps(node: Node) -> bool:
    return False


def removes(node: Node) -> bool:
    return True


def reduces(node: Node) -> bool:
    return not attribute(node, "keepdim")


@dataclass(frozen=True)
class Along(Rule):
    """Works along the axes that the attribute `name` has, the same in all operands; others pass.

    `removes` says whether the results lack these axes.
    """

    removes: Callable[[Node], bool] = keeps
    name: str = "dim"

    def _dims(self, node: Node) -> list[int]:
        dims = attribute(node, self.name)
        return [dims] if isinstance(dims, int) else list(dims or [])

    def tracks(self, node: Node) -> Sequence[Track] | None:
        ranks = set(map(_rank, node.inputs))
        if len(ranks) > 1:
            return None
        rank = ranks.pop()
        dims = {dim % rank for dim in self._dims(node)} or set(range(rank))
        kept = [axis for axis in range(rank) if axis not in dims or not self.removes(node)]
        track = (None if axis in dims else kept.index(axis) for axis in range(rank))
        return [tuple(track)] * len(node.inputs)

    def batched(self, node: Node, behind: Behind, size: Dim) -> Batched | None:
        rank, place, dims = _rank(node.inputs[0]), behind[0], self._dims(node)
        if place is None or len(set(behind)) > 1 or not dims:
            return None
        if any(_rank(value) != rank for value in node.inputs):
            return None
        from_end = [rank - dim % rank for dim in dims]
        whole = max(rank, place) + 1  # a value of a lower rank has dims of size 1 in front
        moved = [whole - count - (count > place) for count in from_end]
        dim = moved[0] if isinstance(attribute(node, self.name), int) else moved
        gone = sum(count <= place for count in from_end) if self.removes(node) else 0
        return Batched(node.op, {**node.attrs, self.name: dim}, place - gone)


class Product(Rule):
    """A matrix product, with broadcast axes in front; on more axes it is `aten.matmul`."""

    def tracks(self, node: Node) -> Sequence[Track] | None:
        left, right = map(_rank, node.inputs)
        rank = len(node.outputs[0].shape)
        if left < 2 or right < 2:
            return None
        return [
            (*range(rank - left, rank - 1), None),
            (*range(rank - right, rank - 2), None, rank - 1),
        ]

    def batched(self, node: Node, behind: Behind, size: Dim) -> Batched | None:
        places = {place for place in behind if place is not None}
        place, (left, right) = min(places), map(_rank, node.inputs)
        if behind[1] is None and right <= 2 and place >= 1:
            return Batched("aten.matmul", {}, place - (right == 1))  # one more axis of rows
        if len(places) > 1 or place < 2 or left < 2 or right < 2:
            return None
        if any(b is None and _rank(v) > place for b, v in zip(behind, node.inputs, strict=True)):
            return None
        return Batched("aten.matmul", {}, place)


class Einsum(Rule):
    """Along a letter of the result each index is computed by itself; others are summed over."""

    def tracks(self, node: Node) -> Sequence[Track]:
        terms, output = einsum_terms(node)
        found: list[Track] = []
        for value, term in zip(node.operands, terms, strict=True):
            track: list[int | None] = []
            for letter, size in zip(term, value.shape, strict=True):
                at = output.find(letter)
                # Of a diagonal, or where size 1 is broadcast, several indices make one.
                alone = at >= 0 and term.count(letter) == 1
                track.append(at if alone and same(size, node.output.shape[at]) else None)
            found.append(tuple(track))
        return found

    def batched(self, node: Node, behind: Behind, size: Dim) -> Batched | None:
        terms, output = einsum_terms(node)
        new = next((c for c in string.ascii_letters if c not in "".join(terms)), None)
        if new is None:
            return None
        for at, place in enumerate(behind):
            if place is not None and place > len(terms[at]):
                return None  # dims of size 1 in front, for which there is no letter
            if place is not None:
                terms[at] = "".join(_inserted(terms[at], new, place))
        place = min(len(output), max(place for place in behind if place is not None))
        equation = f"{','.join(terms)}->{''.join(_inserted(output, new, place))}"
        return Batched(node.op, {**node.attrs, "equation": equation}, place)


def _inserted(items: Sequence[T], item: T, behind: int) -> list[T]:
    """The items of as many axes, with that of a new axis in its place."""
    at = len(items) - behind
    return [*items[:at], item, *items[at:]]


class Embedding(Rule):
    """Rows of a table (N, …), one for each index."""

    def carriers(self, node: Node) -> range:
        return range(1, 2)

    def tracks(self, node: Node) -> Sequence[Track]:
        rank, places = len(node.output.shape), _rank(node.inputs[1])
        return [(None, *range(places, rank)), tuple(range(places))]

    def batched(self, node: Node, behind: Behind, size: Dim) -> Batched | None:
        place, features = behind[1], _rank(node.inputs[0]) - 1
        return None if place is None else Batched(node.op, node.attrs, place + features)


class Stack(Rule):
    """Operands of one shape along an axis of their own."""

    def tracks(self, node: Node) -> Sequence[Track]:
        rank = len(node.output.shape)
        dim = attribute(node, "dim") % rank
        return [tuple(axis for axis in range(rank) if axis != dim)] * len(node.inputs)

    def batched(self, node: Node, behind: Behind, size: Dim) -> Batched | None:
        place, rank = behind[0], len(node.output.shape)
        if place is None or len(set(behind)) > 1 or place > rank - 1:
            return None
        dim, at = attribute(node, "dim") % rank, rank - 1 - place
        if dim < at:
            return Batched(node.op, {**node.attrs, "dim": dim}, place)
        return Batched(node.op, {**node.attrs, "dim": dim + 1}, place + 1)


class Pad(Rule):
    """Axes that aren't padded pass."""

    def tracks(self, node: Node) -> Sequence[Track]:
        sizes = attribute(node, "pad")
        rank = _rank(node.inputs[0])
        ends = [(sizes[2 * at], sizes[2 * at + 1]) for at in range(len(sizes) // 2)]
        padded = {rank - 1 - at for at, both in enumerate(ends) if both != (0, 0)}
        return [tuple(None if axis in padded else axis for axis in range(rank))]

    def batched(self, node: Node, behind: Behind, size: Dim) -> Batched | None:
        place, sizes = behind[0], attribute(node, "pad")
        if place is None or (node.op == "aten.pad" and attribute(node, "mode") != "constant"):
            return None  # other modes want a fixed number of axes
        if 2 * place < len(sizes):
            sizes = [*sizes[: 2 * place], 0, 0, *sizes[2 * place :]]
        return Batched(node.op, {**node.attrs, "pad": sizes}, place)


class SelectScatter(Rule):
    """One place along `dim` is taken from an operand that lacks this axis."""

    def tracks(self, node: Node) -> Sequence[Track]:
        rank = len(node.output.shape)
        dim = attribute(node, "dim") % rank
        track = tuple(None if axis == dim else axis for axis in range(rank))
        return [track, tuple(axis for axis in range(rank) if axis != dim)]

    def batched(self, node: Node, behind: Behind, size: Dim) -> Batched | None:
        rank, (place, own) = len(node.output.shape), behind
        from_end = rank - attribute(node, "dim") % rank
        if place is None or own is None or place > rank or own != place - (from_end <= place):
            return None
        dim = rank + 1 - from_end - (from_end > place)
        return Batched(node.op, {**node.attrs, "dim": dim}, place)


class Permute(Rule):
    def tracks(self, node: Node) -> Sequence[Track]:
        order = _order(node)
        return [tuple(order.index(axis) for axis in range(len(order)))]

    def batched(self, node: Node, behind: Behind, size: Dim) -> Batched | None:
        order = _order(node)
        if behind[0] is None or behind[0] > len(order):
            return None
        at = len(order) - behind[0]
        dims = [dim if dim < at else dim + 1 for dim in order]
        return Batched("aten.permute", {"dims": _inserted(dims, at, behind[0])}, behind[0])


def _order(node: Node) -> list[int]:
    return permutation(node, len(node.output.shape))


class Reshape(Rule):
    """Elements stay in their order, so the dims that both shapes begin or end with pass through.

    Index i along the first axis of (n, …) holds the i-th of n equal runs of elements, in either
    shape; behind equal first axes the same is true of the rest, and likewise from the end.
    """

    def carriers(self, node: Node) -> range:
        return range(1)  # view_as reads another one's shape

    def tracks(self, node: Node) -> Sequence[Track]:
        inner, outer = node.source.shape, node.output.shape
        first = _common(inner, outer)
        last = _common(inner[first:][::-1], outer[first:][::-1])
        middle = len(inner) - first - last
        track = (*range(first), *[None] * middle, *range(len(outer) - last, len(outer)))
        return [track, *((None,) * _rank(value) for value in node.inputs[1:])]

    def batched(self, node: Node, behind: Behind, size: Dim) -> Batched | None:
        source, place = node.source, behind[0]
        if place is None or place > len(source.shape):
            return None
        inner, outer = source.shape, node.output.shape
        if _common(inner[::-1], outer[::-1]) < place:
            if place < len(inner):
                return None
            place = len(outer)
        return Batched("aten.reshape", {"shape": _inserted(outer, size, place)}, place)

    def resized(self, node: Node, lead: Sequence[Dim]) -> tuple[str, Mapping[str, Any]]:
        return "aten.reshape", {"shape": [*lead, *node.output.shape[len(lead) :]]}


def _common(one: Sequence[Dim], other: Sequence[Dim]) -> int:
    """The number of equal sizes that two shapes begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if not same(a, b)), min(len(one), len(other)))


class Expand(Rule):
    def tracks(self, node: Node) -> Sequence[Track]:
        rank = len(node.output.shape)
        return [tuple(range(rank - _rank(node.inputs[0]), rank))]

    def batched(self, node: Node, behind: Behind, size: Dim) -> Batched | None:
        place, shape = behind[0], node.output.shape
        if place is None or place > len(shape):
            return None
        return Batched(node.op, {**node.attrs, "size": _inserted(shape, size, place)}, place)

    def resized(self, node: Node, lead: Sequence[Dim]) -> tuple[str, Mapping[str, Any]]:
        return node.op, {**node.attrs, "size": [*lead, *node.output.shape[len(lead) :]]}


class Repeat(Rule):
    """Axes that are repeated once pass; there may be new ones in front."""

    def tracks(self, node: Node) -> Sequence[Track]:
        times = attribute(node, "repeats")
        new = len(times) - _rank(node.inputs[0])
        return [tuple(at if times[at] == 1 else None for at in range(new, len(times)))]

    def batched(self, node: Node, behind: Behind, size: Dim) -> Batched | None:
        place, times = behind[0], attribute(node, "repeats")
        if place is None or place > len(times):
            return None
        return Batched(node.op, {**node.attrs, "repeats": _inserted(times, 1, place)}, place)


def normalised(node: Node) -> int:
    return len(attribute(node, "normalized_shape"))
