"""One reading of windows, at one choice of sizes (windows.py says of what)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from attngraph.analysis.attention.windows import FEATURE, Below, Scores, Windows, read_product
from attngraph.analysis.layout.axes import Atom, Operand, resolve, size_of
from attngraph.analysis.layout.digits import (
    Axis,
    Digit,
    Placed,
    UnreadError,
    affine,
    digits,
    is_placed,
    placed,
)
from attngraph.analysis.layout.followed import (
    Elements,
    Followed,
    Index,
    Term,
    flat_places,
    split_places,
)
from attngraph.analysis.masks.row_policy import WEAKEST_FILL
from attngraph.ir import Dim, Node, Value
from attngraph.ir.dims import substitute
from attngraph.ir.ops import attribute

_FAR = 1 << 62  # beyond every place


@dataclass(frozen=True, slots=True)
class _End:
    """`factor` times elements of a value of a shape in numbers, or without one a number."""

    value: Value | None
    index: Index
    factor: float
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Pair:
    """A product of which the scores `where` are elements: both sides, each at one feature."""

    ends: tuple[_End, _End]
    scores: Index
    where: torch.Tensor
    feature: torch.Tensor
    factor: float
    features: Dim


@dataclass(frozen=True, slots=True)
class _Sum:
    """Terms of the result, of a `shape` in numbers: the value that a weight meets, which `keys` may
    index, and the place of the result, `flat`, which `rows` may.
    """

    value: _End
    keys: list[Axis]
    flat: torch.Tensor
    rows: list[Axis]
    shape: tuple[int, ...]
    features: Dim
    gain: float


class WindowReader:
    """One reading, at one choice of sizes."""

    def __init__(self, softmax: Node, below: Below, sizes: Mapping[str, int], most: int) -> None:
        scores = softmax.source
        self.softmax, self.scores, self.below, self.most = softmax, scores, below, most
        self.sizes, self.followed = sizes, Followed(sizes, {below.chain[-1].output})
        self.shape = self.followed.shape(scores)
        self.window = attribute(softmax, "dim") % len(self.shape)
        self.position = self.first = self.step = 0
        self.random = torch.Generator().manual_seed(0)

    def read(self) -> Windows:
        """The windows that fit all that is seen. Raises UnreadError."""
        index, hidden, fills, pairs = self._seen()
        if not any(self._settles(*at, index, hidden) for at in self._strides(pairs)):
            raise UnreadError
        scores, total = tuple(map(self._placed_scores, pairs)), self._weighed()
        value = _placed(total.value, total.keys)
        stored = digits(total.rows, total.flat, math.prod(total.shape))
        if value is None or any(digit.size is not None or digit.axis is None for digit in stored):
            raise UnreadError
        found = Windows(
            softmax=self.softmax,
            root=self.below.root,
            position=self.position,
            window=self.window,
            first=self.first,
            step=self.step,
            scores=scores,
            value=value,
            features=total.features,
            gain=total.gain * self.below.gain,
            cleared=self.below.cleared,
            chain=self.below.chain,
            order=tuple(digit.axis for digit in stored if digit.axis is not None),
        )
        self._check_axes(found)
        # A fill that is no -inf hides keys only from rows in which some score is above it.
        of_pairs = all(each.query is not None for each in scores)
        if bool((fills > -math.inf).any()) and not (of_pairs and 0 in found.offsets):
            raise UnreadError
        return found

    def _check_axes(self, found: Windows) -> None:
        """Raises UnreadError at what has no place along the sequence, as one value for all keys has
        none, and at copies of one attention along some axis.
        """
        queries = [each.query for each in found.scores if each.query is not None]
        ends = [*queries, *(each.key for each in found.scores), found.value]
        rows = {axis for axis, size in enumerate(self.scores.shape) if size != 1} - {self.window}
        is_told = all(self.position in end.axes for end in ends)
        if not is_told or rows - frozenset().union(*(end.axes for end in ends)):
            raise UnreadError
        if any(each.query is None and each.features != 1 for each in found.scores):
            raise UnreadError  # a sum over the features of a key

    def moves(self) -> bool:
        """Whether in `most` rows of scores the keys along the window move with some axis."""
        lead = [size for axis, size in enumerate(self.shape) if axis != self.window]
        flat = torch.randint(math.prod(lead), (self.most,), generator=self.random)
        times = self.shape[self.window]
        rows = iter(split_places(flat.repeat_interleave(times), lead))
        along = torch.arange(times).repeat(self.most)
        index = tuple(along if a == self.window else next(rows) for a in range(len(self.shape)))
        elements = self.followed.of(self.scores, index)
        pairs = self._pairs(elements, index, _hidden(elements))
        return any(True for _ in self._strides(pairs))

    def has(self, found: Windows) -> bool:
        """Whether all that is seen is as windows have it that were read at another size."""
        self.position, self.first, self.step = found.position, found.first, found.step
        try:
            index, hidden, _, pairs = self._seen()
            total = self._weighed()
        except UnreadError:
            return False
        order = (tuple(Digit(axis) for axis in found.order),)
        return (
            torch.equal(hidden, self._is_outside(index))
            and len(pairs) == len(found.scores)
            and all(any(self._is_of(pair, each) for each in found.scores) for pair in pairs)
            and total.gain * self.below.gain == found.gain
            and _is_placed(total.value, found.value, total.keys)
            and is_placed(Placed(self.below.root.output, order), (total.flat,), total.rows)
        )

    def _seen(self) -> tuple[Index, torch.Tensor, torch.Tensor, list[_Pair]]:
        """Places of scores, which of them are hidden, by what, and the products of the others."""
        index = self._places(self.shape, self.window)
        elements = self.followed.of(self.scores, index)
        hidden = _hidden(elements)
        return index, hidden, elements.number[hidden], self._pairs(elements, index, hidden)

    def _number(self, size: Dim) -> int:
        return int(substitute(size, self.sizes))

    # Scores

    def _places(self, shape: Sequence[int], *whole: int) -> Index:
        """All places, or of large tensors some, with all those along each axis; each of them with
        all those along the dims `whole`, which change fastest.
        """
        lead = [dim for dim in range(len(shape)) if dim not in whole]
        times, sizes = math.prod(shape[dim] for dim in whole), [shape[dim] for dim in lead]
        count, most = math.prod(sizes), max(self.most // times, *sizes, 1)
        if count <= most:
            outer = split_places(torch.arange(count), sizes)
        else:
            outer = tuple(
                torch.arange(most)[torch.randperm(most, generator=self.random)] % size
                for size in sizes
            )
            count = most
        inner = split_places(torch.arange(times).repeat(count), [shape[dim] for dim in whole])
        spread = (at.repeat_interleave(times) for at in outer)
        found = dict(zip((*lead, *whole), (*spread, *inner), strict=True))
        return tuple(found[dim] for dim in range(len(shape)))

    def _pairs(self, elements: Elements, index: Index, hidden: torch.Tensor) -> list[_Pair]:
        """The products of which each score has one element, from one of several nodes or of one."""
        alike: dict[Hashable, list[_Pair]] = {}
        for term in elements.terms:
            where = term.present & ~hidden
            if bool(where.any()):
                pair = self._pair(term, index, where)
                values = [end.value for end in pair.ends]
                alike.setdefault((*values, pair.factor, pair.features), []).append(pair)
        return [_pooled(pairs, ~hidden) for pairs in alike.values()]

    def _pair(self, term: Term, scores: Index, where: torch.Tensor) -> _Pair:
        read = None if term.value.producer is None else read_product(term.value.producer)
        if read is None:
            raise UnreadError
        contraction, axes = read
        factor = contraction.factor * _one_of(term.factor[where])
        features = size_of(resolve(contraction.summed))
        size, count = self._number(features), int(where.sum())
        each = size if count * size <= self.most else 1
        feature = torch.arange(size).repeat(count)
        if each != size:
            feature = torch.randint(size, (count,), generator=self.random)
        of_term, of_scores = (
            tuple(at[where].repeat_interleave(each) for at in index)
            for index in (term.index, scores)
        )
        places = self._atoms(axes, of_term) | self._atoms([contraction.summed], [feature])
        left, right = (self._end(side, places) for side in contraction.sides)
        factor *= left.factor * right.factor
        return _Pair((left, right), of_scores, where, feature, factor, features)

    def _end(self, side: Operand, places: Mapping[Atom, torch.Tensor]) -> _End:
        """What single elements of a side are: elements of one value, or one number."""
        elements = self.followed.of(side.value, self._index(side, places))
        if not elements.terms:
            return _End(None, (), _one_of(elements.number))
        if len(elements.terms) != 1 or bool(elements.number.any()):
            raise UnreadError
        (term,) = elements.terms
        return _End(term.value, term.index, _one_of(term.factor), self.followed.shape(term.value))

    def _atoms(
        self, axes: Sequence[tuple[Atom, ...]], index: Sequence[torch.Tensor]
    ) -> dict[Atom, torch.Tensor]:
        """The place along each axis."""
        found: dict[Atom, torch.Tensor] = {}
        for dim, at in zip(axes, index, strict=True):
            atoms = resolve(dim)
            along = split_places(at, [self._number(atom.size) for atom in atoms])
            found.update(zip(atoms, along, strict=True))
        return found

    def _index(self, side: Operand, places: Mapping[Atom, torch.Tensor]) -> Index:
        count = len(next(iter(places.values())))
        result = []
        for dim in side.dims:
            at = torch.zeros(count, dtype=torch.int64)
            for atom in dim:
                step = places[atom] if atom.const is None else atom.const
                at = at * self._number(atom.size) + step
            result.append(at)
        return tuple(result)

    def _strides(self, pairs: Sequence[_Pair]) -> Iterator[tuple[int, int]]:
        """(position, step) that some side may have: places that move along the window too."""
        for pair in pairs:
            known = torch.stack(pair.scores, dim=1)
            for end in pair.ends:
                for at in end.index:
                    _, strides = affine(at, torch.cat([known, pair.feature[:, None]], dim=1))
                    along = strides[self.window]
                    for axis, stride in enumerate(strides[:-1]):
                        is_whole = axis != self.window and stride and along % stride == 0
                        if is_whole and along // stride:
                            yield axis, along // stride

    def _settles(self, position: int, step: int, index: Index, hidden: torch.Tensor) -> bool:
        """Whether exactly the keys off both ends are hidden, if a window is laid out so."""
        along = index[position] + step * index[self.window]
        self.position, self.step, self.first = position, step, -int(along[~hidden].min())
        return torch.equal(hidden, self._is_outside(index))

    def _keys(self, index: Index) -> torch.Tensor:
        along: torch.Tensor = self.step * index[self.window]
        return index[self.position] + self.first + along

    def _is_outside(self, index: Index) -> torch.Tensor:
        keys: torch.Tensor = self._keys(index)
        return (keys < 0) | (keys >= self.shape[self.position])

    def _placed_scores(self, pair: _Pair) -> Scores:
        query, key = self._axes_of(pair)
        for one, other in (pair.ends, pair.ends[::-1]):
            try:
                ends = _placed(one, query), _placed(other, key)
            except UnreadError:
                continue
            if ends[1] is not None:
                return Scores(ends[0], ends[1], pair.factor, pair.features)
        raise UnreadError

    def _is_of(self, pair: _Pair, scores: Scores) -> bool:
        query, key = self._axes_of(pair)
        is_alike = pair.factor == scores.factor and pair.features == scores.features
        return is_alike and any(
            _is_placed(one, scores.query, query) and _is_placed(other, scores.key, key)
            for one, other in (pair.ends, pair.ends[::-1])
        )

    def _axes_of(self, pair: _Pair) -> tuple[list[Axis], list[Axis]]:
        """What may index the queries, and the keys, of a product."""
        positions = pair.scores[self.position], self._keys(pair.scores)
        query, key = (self._axes(pair.scores, at, pair.feature, pair.features) for at in positions)
        return query, key

    def _axes(
        self, scores: Index, position: torch.Tensor, feature: torch.Tensor, features: Dim
    ) -> list[Axis]:
        """What may index queries, keys and values."""
        found = [
            Axis(axis, at, self.scores.shape[axis], self.shape[axis])
            for axis, at in enumerate(scores)
            if axis != self.window
        ]
        place = self.position - (self.window < self.position)
        found[place] = replace(found[place], at=position)
        return [*found, Axis(FEATURE, feature, features, self._number(features))]

    # Weights

    def _weighed(self) -> _Sum:
        """The sums of weights times values. Raises UnreadError where not each weight of a window,
        and nothing else, meets a value.
        """
        found = read_product(self.below.root)
        assert found is not None
        contraction, axes = found
        result, weights = self.below.root.output, self.below.chain[-1].output
        shape = self.followed.shape(result)
        size = self._number(size_of(resolve(contraction.summed)))
        *index, summed = self._places((*shape, size), len(shape))
        places = self._atoms(axes, index) | self._atoms([contraction.summed], [summed])
        for mine, other in (contraction.sides, contraction.sides[::-1]):
            met = self.followed.of(mine.value, self._index(mine, places))
            if [term.value for term in met.terms] != [weights] or bool(met.number.any()):
                continue
            (term,) = met.terms
            where = term.present & ~self._is_outside(term.index)
            self._check_each_once(term.index, where, size)
            inside = {atom: at[where] for atom, at in places.items()}
            value = self._end(other, inside)
            own = [a for a in resolve(a for dim in axes for a in dim) if a not in mine.atoms]
            feature = torch.zeros(int(where.sum()), dtype=torch.int64)
            for atom in own:
                feature = feature * self._number(atom.size) + inside[atom]
            scores = tuple(at[where] for at in term.index)
            features = size_of(own)
            return _Sum(
                value=value,
                keys=self._axes(scores, self._keys(scores), feature, features),
                flat=flat_places([at[where] for at in index], shape),
                rows=self._axes(scores, scores[self.position], feature, features),
                shape=shape,
                features=features,
                gain=_one_of(term.factor[where]) * value.factor * contraction.factor,
            )
        raise UnreadError

    def _check_each_once(self, index: Index, where: torch.Tensor, size: int) -> None:
        """Whether every sum over `size` weights has each weight of one row's window once."""
        counted = where.reshape(-1, size)
        if not bool(counted.any(dim=1).all()):
            raise UnreadError
        rows = list(index)
        for axis, at in enumerate(index):
            if axis != self.window:
                spread = at.reshape(-1, size)
                low = spread.masked_fill(~counted, _FAR).amin(dim=1)
                high = spread.masked_fill(~counted, -1).amax(dim=1)
                if not torch.equal(low, high):
                    raise UnreadError
                rows[axis] = low[:, None]
        count = self.shape[self.window]
        rows[self.window] = torch.arange(count)[None]
        found = torch.zeros(len(counted), count, dtype=torch.int64)
        found.scatter_add_(1, index[self.window].reshape(-1, size), counted.to(torch.int64))
        if not torch.equal(found, (~self._is_outside(tuple(rows))).to(torch.int64)):
            raise UnreadError


def _hidden(elements: Elements) -> torch.Tensor:
    """Which scores are a fill. Raises UnreadError where a number isn't one."""
    filled = elements.number != 0
    fills = elements.number[filled]
    if not len(fills):
        return filled
    is_infinite = bool((fills == -math.inf).all())
    plain = not any(bool(term.present[filled].any()) for term in elements.terms)
    if not is_infinite and not (plain and _one_of(fills) <= WEAKEST_FILL):
        raise UnreadError
    return filled


def _pooled(pairs: Sequence[_Pair], visible: torch.Tensor) -> _Pair:
    """One product of several, of which each visible score has one element."""
    first = pairs[0]
    counts = torch.stack([pair.where.to(torch.int8) for pair in pairs]).sum(dim=0)
    if not torch.equal(counts, visible.to(torch.int8)):
        raise UnreadError
    if len(pairs) == 1:
        return first
    ends = [
        replace(first.ends[side], index=_joined([pair.ends[side].index for pair in pairs]))
        for side in range(2)
    ]
    scores = _joined([pair.scores for pair in pairs])
    feature = torch.cat([pair.feature for pair in pairs])
    return replace(first, ends=(ends[0], ends[1]), scores=scores, feature=feature, where=visible)


def _joined(indices: Sequence[Index]) -> Index:
    return tuple(map(torch.cat, zip(*indices, strict=True)))


def _one_of(numbers: torch.Tensor) -> float:
    """The number that all are, which isn't 0."""
    first = float(numbers[0]) if len(numbers) else 0.0
    if not first or not math.isfinite(first) or not bool((numbers == first).all()):
        raise UnreadError
    return first


def _is_placed(end: _End, found: Placed | None, axes: Sequence[Axis]) -> bool:
    if end.value is None or found is None:
        return end.value is None and found is None
    return end.value is found.value and is_placed(found, end.index, axes)


def _placed(end: _End, axes: Sequence[Axis]) -> Placed | None:
    """How the dims of an end's value are indexed; None where it is a number."""
    return None if end.value is None else placed(end.value, end.index, end.shape, axes)
