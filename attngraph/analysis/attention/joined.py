"""Reads scores and values that are kept in parts along the keys: memories, prefixes, windows.

Scores: cat(s·⟨Q, K₁⟩ + b₁, s·⟨Q, K₂⟩ + b₂, …) along the keys. Values: Σ P[:, ofᵢ] Vᵢ over parts of
the weights that follow one another. Either is one product with what is concatenated, of which no
part says anything that the others don't allow; everything else is a `Declined`, or None.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from attngraph.analysis.attention.logits import Bias, Factor, Logits, Mask, Preference, read_logits
from attngraph.analysis.attention.refusals import Declined, Refusal
from attngraph.analysis.attention.roles import computed, pair_of, stages
from attngraph.analysis.layout.axes import (
    Atom,
    Axes,
    Operand,
    climb,
    fresh_axes,
    resolve,
    sides_of,
)
from attngraph.analysis.layout.contraction import Contraction, read_contraction
from attngraph.analysis.layout.moves import Cut, counted_start, move_of
from attngraph.analysis.values.scalars import widens
from attngraph.ir import Dim, Node, Value
from attngraph.ir.dims import as_dim, same
from attngraph.ir.ops import attribute, input_of
from attngraph.ir.traits import COPY, SLICE, SPLIT

_MOST_TERMS = 64


@dataclass(frozen=True, slots=True)
class Part:
    """Keys, or values, of one part, whose key axis is `keys`; the scores take them times `scale`,
    and times the `factors`."""

    operand: Operand
    keys: tuple[Atom, ...]
    size: Dim
    scale: float = 1.0
    factors: tuple[Factor, ...] = ()


Terms = tuple["Bias | Mask | None", ...]
"""A step of the scores, part by part: None where it leaves a part as it is."""


@dataclass(frozen=True, slots=True)
class JoinedScores:
    """What `node` joins along `dim`: the scores of one query with several parts of keys.

    Its other axes are `axes`. `steps` come after the cap, if there is an `outer` one.
    """

    node: Node
    dim: int
    axes: Axes
    query: Operand
    features: tuple[Atom, ...]
    parts: tuple[Part, ...]
    outer: float | None
    factors: tuple[Factor, ...]
    steps: tuple[Terms, ...]
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class SplitWeights:
    """What `node` sums: parts of the `weights`, which are indexed by `axes`, times `parts`.

    Its result is indexed by `output`.
    """

    node: Node
    weights: Value
    dim: int
    axes: Axes
    parts: tuple[Part, ...]
    output: Axes


def read_joined_scores(node: Node) -> JoinedScores | Declined | None:
    """The scores that a concatenation joins; None where not all of its parts are products."""
    values: Sequence[Value] = input_of(node, "tensors")
    dim = attribute(node, "dim") % len(node.output.shape)
    axes = fresh_axes(node.output.shape)
    if len(values) < 2 or not node.output.dtype.is_floating_point:
        return None
    found: list[tuple[Logits, tuple[Atom, ...]]] = []
    for value in values:
        keys = fresh_axes([value.shape[dim]])[0]
        operand = Operand(value, (*axes[:dim], keys, *axes[dim + 1 :]))
        logits = read_logits(operand, keys, _ranked(keys), shifts=False)
        if value.dtype != node.output.dtype or isinstance(logits, Declined):
            return None
        found.append((logits, keys))
    whole = [logits.contraction for logits, keys in found if resolve(keys)]
    if not whole:
        return None
    for logits, _ in found:  # axes are split on the way, before any is compared
        for side in logits.contraction.sides:
            stages(side)
    query = _sides(*next(item for item in found if resolve(item[1])))[0]
    features = resolve(whole[0].summed)
    parts: list[Part] = []
    for value, (logits, keys) in zip(values, found, strict=True):
        part = _with_query(logits, keys, query, features, value.shape[dim])
        if part is None:
            return Refusal.JOINED_QUERIES.at(logits.node)
        parts.append(part)
    outers = {logits.outer for logits, _ in found}
    if len(outers) > 1:
        return Refusal.JOINED_CAPS.at(node)
    if not _are_shared(query, parts, features):
        return Refusal.JOINED_APART.at(node)
    factors = _shared_factors([part.factors for part in parts])
    if factors is not None:
        parts = [replace(part, factors=()) for part in parts]
    elif not all(
        _is_of_keys(factor, part, parts, features) for part in parts for factor in part.factors
    ):
        return Refusal.JOINED_FACTORS.at(node)
    steps = _aligned([logits.steps for logits, _ in found])
    if steps is None:
        return None
    nodes = tuple(node for logits, _ in found for node in logits.nodes)
    return JoinedScores(
        node,
        dim,
        (*axes[:dim], (), *axes[dim + 1 :]),
        computed(query),
        features,
        tuple(parts),
        outers.pop(),
        factors or (),
        steps,
        nodes,
    )


def read_split_weights(node: Node) -> SplitWeights | None:
    """The products of parts of the weights with values of their own that a node sums, if they are
    all: no place is left out, and none is taken twice."""
    output = fresh_axes(node.output.shape)
    terms: list[tuple[Cut, Operand, Operand, tuple[Atom, ...]]] = []
    for product in _products(Operand(node.output, output)):
        term = None if product is None else _weighted(product)
        if term is None or len(terms) == _MOST_TERMS:
            return None
        terms.append(term)
    if len(terms) < 2:
        return None
    cut, first, _, _ = terms[0]
    weights, dim = cut.source, cut.dim
    size = weights.shape[dim]
    parts: list[Part] = []
    starts: list[Dim] = []
    for cut, weight, value, summed in terms:
        if cut.source is not weights or cut.dim != dim:
            return None
        places, wanted = weight.places, first.places
        if places[:dim] != wanted[:dim] or places[dim + 1 :] != wanted[dim + 1 :]:
            return None
        starts.append(counted_start(cut))
        parts.append(Part(value, summed, weight.value.shape[dim]))
    ordered: list[Part] = []
    end: Dim = 0
    while len(ordered) < len(parts):
        following = [p for p, s in zip(parts, starts, strict=True) if same(s, end)]
        if len(following) != 1 or following[0] in ordered:
            return None
        ordered.append(following[0])
        end = as_dim(end + following[0].size)
    if not same(end, size):
        return None
    axes = (*first.dims[:dim], (), *first.dims[dim + 1 :])
    return SplitWeights(node, weights, dim, axes, tuple(ordered), output)


def lead_of(parts: Sequence[Part], features: Sequence[Atom]) -> list[Atom]:
    """The axes, besides keys and features, that any part has: first those of the part with most."""
    found = sorted((_lead(part, features) for part in parts), key=len, reverse=True)
    return list(dict.fromkeys(atom for lead in found for atom in lead))


def _lead(part: Part, features: Sequence[Atom]) -> list[Atom]:
    without = {*resolve(part.keys), *features}
    return [atom for atom in computed(part.operand).atoms if atom not in without]


def _are_shared(query: Operand, parts: Sequence[Part], features: Sequence[Atom]) -> bool:
    """Whether some part has each axis that another has, or queries differ along one that none has.

    Else joined keys would be a copy for each query, as those of its row and of its column.
    """
    every = {atom for part in parts for atom in _lead(part, features)}
    has_whole = any(every <= set(_lead(part, features)) for part in parts)
    return has_whole or bool(set(computed(query).atoms) - every - set(features))


def _is_of_keys(
    factor: Factor, part: Part, parts: Sequence[Part], features: Sequence[Atom]
) -> bool:
    """Whether a factor of a part's scores can multiply its keys instead."""
    return set(factor.atoms) <= {*lead_of(parts, features), *resolve(part.keys)}


def _ranked(keys: tuple[Atom, ...]) -> Preference:
    def prefer(product: Contraction) -> int | None:
        pair = (product.left, product.right) if not resolve(keys) else pair_of(product, keys)
        if pair is None:
            return None
        is_projected = any(computed(side).value.is_constant for side in product.sides)
        return 64 * is_projected - len(set(pair[1].atoms))

    return prefer


def _sides(logits: Logits, keys: tuple[Atom, ...]) -> tuple[Operand, Operand]:
    pair = pair_of(logits.contraction, keys)
    assert pair is not None
    return pair


def _with_query(
    logits: Logits,
    keys: tuple[Atom, ...],
    query: Operand,
    features: tuple[Atom, ...],
    size: Dim,
) -> Part | None:
    """The part whose keys meet this query, with its own scale; None where they meet another one."""
    left, right = logits.contraction.sides
    pairs = [_sides(logits, keys)] if resolve(keys) else [(left, right), (right, left)]
    goal = stages(query)[-1]
    for mine, key in pairs:
        stage = stages(mine)[-1]
        summed = resolve(logits.contraction.summed)
        if stage.operand.value is not goal.operand.value or len(summed) != len(features):
            continue
        names = dict(zip(summed, features, strict=True))
        if not all(same(ours.size, theirs.size) for ours, theirs in names.items()):
            continue
        renamed = tuple(tuple(names.get(atom, atom) for atom in dim) for dim in stage.operand.dims)
        if Operand(stage.operand.value, renamed).places != goal.operand.places:
            continue
        operand = computed(key)
        factor = stage.factor * stages(key)[-1].factor * logits.scale
        dims = tuple(tuple(names.get(atom, atom) for atom in dim) for dim in operand.dims)
        return Part(Operand(operand.value, dims), keys, size, factor, logits.factors)
    return None


def _shared_factors(factors: Sequence[tuple[Factor, ...]]) -> tuple[Factor, ...] | None:
    """The factors where they are the same for all parts."""

    def named(factor: Factor) -> tuple[object, ...]:
        operand = factor.operand
        known = None if operand is None else (operand.value, operand.places)
        return known, factor.divides, factor.number

    kinds = [[named(factor) for factor in of_part] for of_part in factors]
    return factors[0] if all(kind == kinds[0] for kind in kinds) else None


def _aligned(steps: Sequence[tuple[Bias | Mask, ...]]) -> tuple[Terms, ...] | None:
    """The steps of all parts, in the order of each; what is alike of several is one step.

    Biases first, where an order is free: most masks come last.
    """
    rest = [list(of_part) for of_part in steps]
    found: list[Terms] = []
    while any(rest):
        kinds = [_kind(of_part[0]) for of_part in rest if of_part]
        if None in kinds:
            return None
        kind = 0.0 if 0.0 in kinds else kinds[0]
        taken = [bool(of_part) and _kind(of_part[0]) == kind for of_part in rest]
        found.append(
            tuple(
                of_part.pop(0) if take else None for of_part, take in zip(rest, taken, strict=True)
            )
        )
    return tuple(found)


def _kind(step: Bias | Mask) -> float | None:
    """0 for a bias, the fill of a mask; None for a step that can't be joined."""
    if isinstance(step, Bias):
        return None if step.floor is not None else 0.0
    return None if step.times or math.isnan(step.fill) else step.fill


def _products(operand: Operand) -> Iterator[Contraction | None]:
    """The products that an operand is the sum of; None for what is neither."""
    node = operand.value.producer
    if node is None or len(node.outputs) != 1:
        yield None
        return
    if (above := climb(operand)) is not None and move_of(operand.value) is not None:
        yield from _products(above)
        return
    if node.op == "aten.add.Tensor" and attribute(node, "alpha") == 1:
        for side in sides_of(node, operand.axes):
            if side.value.dtype != node.output.dtype:
                yield None
                return
            yield from _products(side)
        return
    product = read_contraction(node, operand.axes)
    if node.op == "aten.mul.Tensor":
        left, right = sides_of(node, operand.axes)
        product = Contraction(left, right, ())  # a part of one place
    if product is None or product.factor != 1.0:
        yield None
        return
    yield replace(product, addends=())
    for addend, factor in product.addends:
        if factor != 1.0:
            yield None
            return
        yield from _products(addend)


def _weighted(product: Contraction) -> tuple[Cut, Operand, Operand, tuple[Atom, ...]] | None:
    """(the cut of the weights, the part that it makes, the values, their key axis)."""
    for mine, other in (product.sides, product.sides[::-1]):
        operand: Operand | None = mine
        while operand is not None and (node := operand.value.producer) is not None:
            move = move_of(operand.value)
            is_part = isinstance(move, Cut) and node.op in SLICE | SPLIT and move.step == 1
            if is_part and isinstance(move, Cut):
                along = resolve(operand.axes[move.dim])
                if along == resolve(product.summed):
                    return move, operand, other, product.summed
            if node.op not in COPY and widens(node) and node.inputs[0] is not None:
                operand = Operand(node.inputs[0], operand.axes)
            else:
                operand = climb(operand)
    return None
