"""Reads an online softmax: Σ cᵢ exp(Sᵢ) Vᵢ over Σ cᵢ exp(Sᵢ), for blocks of keys, as rescaled.

A running maximum, and whatever else is the same for all keys of a row, is a factor: products of
powers, of which exp(m) · exp(−m) is 1. What m is doesn't matter, for each block ends with the same
factor as every other, above and below. So the quotient is softmax(cat Sᵢ) · cat Vᵢ wherever it is
finite (Milakov and Gimelshein, 2018; Rabe and Staats, 2021; Dao et al., 2022).

Nor need the quotient be written as one. softmax(Sᵢ) is exp(Sᵢ) over Tᵢ = Σ exp(Sᵢ), of which
logsumexp(Sᵢ) is the logarithm, so contexts of blocks that are merged by their logsumexp (ring
attention, Liu et al., 2023), or by a softmax of those, are the same sums of blocks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from attngraph.analysis.attention.climbing import (
    at_places,
    chosen_part,
    factored,
    past_layout,
    softmax_of,
    summed_over,
)
from attngraph.analysis.attention.exponentials import EXP, SUM, reciprocal_of
from attngraph.analysis.layout.axes import Atom, Axes, Operand, fresh_axes, resolve, sides_of, top
from attngraph.analysis.layout.contraction import Contraction, read_contraction
from attngraph.analysis.values.scalars import uniform
from attngraph.ir import Node, Value
from attngraph.ir.ops import attribute
from attngraph.ir.slices import backward_slice
from attngraph.ir.traits import (
    ADDITIVE,
    CAST,
    EXPONENTIAL,
    JOIN,
    LAYOUT,
    LOG_ADD,
    LOG_SUM,
    MATMUL,
    MULTIPLICATIVE,
    PLAIN_SOFTMAX,
    POINTWISE,
    REDUCTION,
)

MERGES = LOG_SUM | LOG_ADD
"""Logarithms of sums, by which contexts of blocks are merged."""

_ADD = "aten.add.Tensor"
_MOST_WAYS = 1 << 12
_DEEPEST = 160
_THROUGH = (
    ADDITIVE
    | MULTIPLICATIVE
    | LAYOUT
    | CAST
    | JOIN
    | EXPONENTIAL
    | REDUCTION
    | MATMUL
    | POINTWISE
    | MERGES
    | PLAIN_SOFTMAX
)


@dataclass(frozen=True, slots=True)
class _Base:
    """A value that is the same for all keys of a row, or with `is_exponent` its exponential,
    summed over `keys`.
    """

    value: Value
    places: tuple[object, ...]
    is_exponent: bool
    operand: Operand = field(compare=False)
    keys: tuple[Atom, ...] = field(default=(), compare=False)


_Powers = Counter[_Base]
"""What multiplies a row, as powers."""


@dataclass(frozen=True, slots=True)
class Block:
    """exp(`scores`) summed over `keys`, times `value` if that is given."""

    scores: Operand
    keys: tuple[Atom, ...]
    value: Operand | None = None

    @property
    def place(self) -> tuple[Value, tuple[object, ...]]:
        """The scores, with one name for all keys."""
        keys = set(resolve(self.keys))
        dims = tuple(() if keys & set(dim) else dim for dim in self.scores.dims)
        return self.scores.value, Operand(self.scores.value, dims).places

    @property
    def total(self) -> _Powers:
        """Σ exp(`scores`), as a factor of the row."""
        return _Powers({_Base(*self.place, True, self.scores, self.keys): 1})


_Terms = list[tuple[Block, _Powers]]


def read_online(node: Node, *, merged: bool = False) -> tuple[list[Block], Axes] | None:
    """The blocks whose quotient a node is, and its axes; None where it is another one.

    With `merged`, the node may be a sum of quotients too.
    """
    if node.op not in MULTIPLICATIVE and not (merged and node.op in (_ADD, SUM)):
        return None
    if not node.output.dtype.is_floating_point or not _is_small(node):
        return None
    output = fresh_axes(node.output.shape)
    above: _Terms | None = None
    for _ in range(2):  # axes that are split on the way are whole in what was read before
        above = _rows(Operand(node.output, output))
    if above is None or len(above) < 2 or any(block.value is None for block, _ in above):
        return None
    totals = [base for base, power in above[0][1].items() if power == -1]
    for base in totals:
        below: _Terms | None = None
        for _ in range(2):
            below = _powered(base) if base.is_exponent else _rows(base.operand)
        if below is not None and _is_quotient(above, below, base):
            return [block for block, _ in above], output
    return None


def _is_small(root: Node) -> bool:
    """Whether few ways lead up from a node through what is read, and none is long.

    In an unrolled recurrence their number may double with each step.
    """

    def is_end(value: Value) -> bool:
        node = value.producer
        return node is None or node.op not in _THROUGH

    ways: dict[Value, tuple[int, int]] = {}
    for node in backward_slice([root.output], is_end)[1]:
        found = [ways.get(source, (1, 1)) for source in node.operands]
        count, depth = sum(n for n, _ in found), 1 + max((d for _, d in found), default=0)
        if count > _MOST_WAYS or depth > _DEEPEST:
            return False
        ways.update(dict.fromkeys(node.outputs, (count, depth)))
    return True


def _is_quotient(above: _Terms, below: _Terms, total: _Base) -> bool:
    """Whether both are sums over the same blocks, each with the factor that all have."""
    factor = below[0][1] if below else _Powers()
    known = {block.place: powers for block, powers in below if block.value is None}
    if len(known) != len(below) or len({block.place for block, _ in above}) != len(above):
        return False
    if set(known) != {block.place for block, _ in above}:
        return False
    divided = _times(factor, _Powers({total: 1}), -1)
    return all(p == factor for p in known.values()) and all(p == divided for _, p in above)


def _power(operand: Operand, power: int, *, is_exponent: bool = False) -> _Powers:
    return _Powers({_Base(operand.value, operand.places, is_exponent, operand): power})


def _times(one: _Powers, other: _Powers, sign: int = 1) -> _Powers:
    product = _Powers(one)
    for base, power in other.items():
        product[base] += sign * power
    return _Powers({base: power for base, power in product.items() if power})


def _rows(operand: Operand) -> _Terms | None:
    """A value as a sum of blocks, each times a factor per row."""
    node = operand.value.producer
    if uniform(operand.value) == 0.0:
        return []
    if node is None or len(node.outputs) != 1:
        return None
    if (inner := past_layout(operand)) is not None:
        return _rows(inner)
    if (chosen := chosen_part(operand)) is not None:
        return _rows(chosen)
    if node.op == _ADD and attribute(node, "alpha") == 1:
        found = [(_rows(side), side) for side in sides_of(node, operand.axes)]
        left, right = (_single(side) if own is None else own for own, side in found)
        return None if left is None or right is None else [*left, *right]
    if node.op in MULTIPLICATIVE:
        return _multiplied(node, operand.axes)
    if node.op == SUM and (stacked := _over_places(node, operand.axes)) is not None:
        return stacked
    if (product := read_contraction(node, operand.axes)) is not None:
        return _weighed(product)
    summed = summed_over(node, operand.axes) if node.op == SUM else None
    if summed is None:
        return None
    inner, keys = summed[0], summed[0].axes[summed[1]]
    weights = _weights(inner, keys)
    return None if weights is None else [(Block(weights[0], keys), weights[1])]


def _powered(base: _Base) -> _Terms | None:
    """exp of a value, summed over the keys of a base, as a sum of blocks."""
    operand, wanted = base.operand, set(resolve(base.keys))
    node = operand.value.producer
    if wanted:
        dims = [dim for dim, index in enumerate(operand.dims) if wanted & set(index)]
        places = at_places(operand, dims[0]) if len(dims) == 1 else []
        stacked = [_exponential(place) for place in places if chosen_part(place) is not None]
        if not stacked or any(terms is None for terms in stacked):
            return [(Block(operand, base.keys), _Powers())]
        return [term for terms in stacked for term in terms or ()]
    return None if node is None else _exponential(operand)


def _exponential(operand: Operand) -> _Terms | None:
    """exp of a value as a sum of blocks, each times a factor per row."""
    node = operand.value.producer
    for inner in (past_layout(operand), chosen_part(operand)):
        if inner is not None:
            return _exponential(inner)
    if node is None:
        return None
    if node.op in LOG_ADD:
        left, right = map(_exponential, sides_of(node, operand.axes))
        return None if left is None or right is None else [*left, *right]
    if node.op in LOG_SUM:
        total = _logarithm(node, operand.axes)
        return None if total is None else _powered(total)
    if node.op == "aten.log" and node.inputs[0] is not None:
        return _rows(Operand(node.inputs[0], operand.axes))
    if node.op in ADDITIVE and attribute(node, "alpha") == 1:
        one, other = sides_of(node, operand.axes)
        ways = [(one, other, -1 if node.op == "aten.sub.Tensor" else 1)]
        ways += [(other, one, 1)] if node.op == _ADD else []
        for side, factor, sign in ways:
            if (terms := _exponential(side)) is not None:
                powers = _exponent(factor, sign, set())[1]
                return [(block, _times(own, powers)) for block, own in terms]
    return None


def _logarithm(node: Node, axes: Axes) -> _Base | None:
    """The sum whose logarithm a logsumexp over one axis is."""
    summed = summed_over(node, axes)
    if summed is None:
        return None
    (base,) = Block(summed[0], summed[0].axes[summed[1]]).total
    return base


def _single(operand: Operand) -> _Terms | None:
    """A block of one key, whose sum is itself."""
    while (inner := past_layout(operand)) is not None:
        operand = inner
    node = operand.value.producer
    weights = _weights(operand, ()) if node is not None and node.op == EXP else None
    return None if weights is None else [(Block(weights[0], ()), weights[1])]


def _multiplied(node: Node, axes: Axes) -> _Terms | None:
    """Blocks times a factor; a running sum is a factor of the context, and not the other way."""
    sums: _Terms | None = None
    for terms, factor, sign in factored(node, axes):
        found = _rows(terms)
        if found is None:
            continue
        powers = _factor(factor)
        found = [(block, _times(own, powers, sign)) for block, own in found]
        if any(block.value is not None for block, _ in found):
            return found
        sums = found if sums is None else sums
    return sums


def _weighed(product: Contraction) -> _Terms | None:
    """A product of weights and values, and what is added to it."""
    if product.factor != 1.0:
        return None
    for mine, other in (product.sides, product.sides[::-1]):
        weights = _weights(mine, product.summed)
        if weights is None or set(resolve(product.summed)) - set(other.atoms):
            continue
        found: _Terms = [(Block(weights[0], product.summed, other), weights[1])]
        for addend, scale in product.addends:
            more = _rows(addend) if scale == 1.0 else None
            if more is None:
                return None
            found += more
        return found
    return None


def _over_places(node: Node, axes: Axes) -> _Terms | None:
    """A sum over a few places of an axis: of what was stacked there."""
    summed = summed_over(node, axes)
    places = [] if summed is None else at_places(*summed)
    found: _Terms = []
    for place in places:
        terms = _rows(place)
        if terms is None:
            return None
        found += terms
    return found or None


def _weights(operand: Operand, keys: tuple[Atom, ...]) -> tuple[Operand, _Powers] | None:
    """(S, factor) where a value is exp(S), with the axis of keys, times a factor per row."""
    wanted = set(resolve(keys))
    node = operand.value.producer
    if node is None:
        return None
    if node.op == EXP and node.inputs[0] is not None:
        scores, powers = _exponent(Operand(node.inputs[0], operand.axes), 1, wanted)
        if wanted:
            return (scores[0], powers) if len(scores) == 1 else None
        single = [base for base, power in powers.items() if base.is_exponent and power == 1]
        if len(single) != 1:
            return None
        return single[0].operand, _times(powers, _Powers({single[0]: 1}), -1)
    if (inner := past_layout(operand)) is not None:
        return _weights(inner, keys)
    if (softmax := softmax_of(operand)) is not None:
        whole, dim = softmax
        if not wanted or set(resolve(operand.axes[dim])) != wanted:
            return None
        return whole, _times(_Powers(), Block(whole, keys).total, -1)
    if node.op in MULTIPLICATIVE:
        for mine, factor, sign in factored(node, operand.axes):
            found = _weights(mine, keys) if not wanted & set(top(factor).atoms) else None
            if found is not None:
                return found[0], _times(found[1], _factor(factor), sign)
    return None


def _exponent(operand: Operand, sign: int, keys: set[Atom]) -> tuple[list[Operand], _Powers]:
    """What has an axis of `keys` in a sum, and exp of what hasn't."""
    node = operand.value.producer
    if node is not None and node.op in ADDITIVE and attribute(node, "alpha") == 1:
        sides = sides_of(node, operand.axes)
        having = [bool(keys & set(top(side).atoms)) for side in sides]
        signs = [sign, -sign if node.op == "aten.sub.Tensor" else sign]
        if not (all(having) or (having[1] and signs[1] < 0)):
            found = [_exponent(side, s, keys) for side, s in zip(sides, signs, strict=True)]
            return [*found[0][0], *found[1][0]], _times(found[0][1], found[1][1])
    if keys & set(top(operand).atoms):
        return ([operand] if sign > 0 else []), _Powers()
    for inner in (past_layout(operand), chosen_part(operand)):
        if inner is not None:
            return _exponent(inner, sign, keys)
    if node is not None and node.op in LOG_SUM:
        total = _logarithm(node, operand.axes)
        if total is not None:
            return [], _Powers({total: sign})
    if node is not None and node.op == "aten.log" and node.inputs[0] is not None:
        return [], _times(_Powers(), _factor(Operand(node.inputs[0], operand.axes)), sign)
    return [], _power(operand, sign, is_exponent=True)


def _factor(operand: Operand) -> _Powers:
    """A factor per row as powers."""
    node = operand.value.producer
    for inner in (past_layout(operand), chosen_part(operand)):
        if inner is not None:
            return _factor(inner)
    if node is not None and node.op == EXP and node.inputs[0] is not None:
        return _exponent(Operand(node.inputs[0], operand.axes), 1, set())[1]
    if (inverse := reciprocal_of(node)) is not None:
        return _times(_Powers(), _factor(Operand(inverse, operand.axes)), -1)
    if node is not None and node.op in MULTIPLICATIVE:
        left, right = map(_factor, sides_of(node, operand.axes))
        return _times(left, right, 1 if node.op == "aten.mul.Tensor" else -1)
    if (softmax := softmax_of(operand)) is not None:
        scores, dim = softmax
        keys = fresh_axes([scores.value.shape[dim]])[0]
        whole = Operand(scores.value, (*scores.axes[:dim], keys, *scores.axes[dim + 1 :]))
        return _times(_exponent(scores, 1, set())[1], Block(whole, keys).total, -1)
    # One sum is known by its scores, however these were shifted: a softmax of them divides by it.
    terms = _rows(operand) if node is not None and node.op == SUM else None
    if terms is not None and len(terms) == 1 and terms[0][0].value is None:
        return _times(terms[0][0].total, terms[0][1])
    return _power(operand, 1)
