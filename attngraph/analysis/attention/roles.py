"""Which axis plays which part in an attention: batch, heads, groups, queries, keys, features.

Given the atoms of Q, K, V and of the probabilities, everything follows from which operand has which
atom. Storage only decides ties: an atom that shares a dim with the features is a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

from attngraph.analysis.layout.axes import Atom, Axes, Operand, climb, is_symbolic, resolve
from attngraph.analysis.layout.contraction import Contraction
from attngraph.analysis.layout.cost import cost, layout_cost
from attngraph.analysis.values.scalars import is_cast, scale_of
from attngraph.ir import Node, Value


@dataclass(frozen=True, slots=True)
class Stage:
    """An operand somewhere on its way up through layout ops and constant factors."""

    operand: Operand
    factor: float

    @property
    def step(self) -> int:
        """What the op that makes this value costs, if the value is used."""
        node = self.operand.value.producer
        return 0 if node is None else layout_cost(node)


def stages(operand: Operand) -> list[Stage]:
    """From the operand itself up to the first op that computes."""
    found = [Stage(operand, 1.0)]
    while True:
        stage = found[-1]
        above = climb(stage.operand)
        if above is not None:
            found.append(Stage(above, stage.factor))
            continue
        node = stage.operand.value.producer
        if node is not None and (narrow := _widened(node)) is not None:
            found.append(Stage(Operand(narrow, stage.operand.axes), stage.factor))
            continue
        scaling = None if node is None else scale_of(node)
        if scaling is None:
            return found
        source = Operand(scaling[0], stage.operand.axes)
        found.append(Stage(source, stage.factor * scaling[1]))


def computed(operand: Operand) -> Operand:
    """What an operand is read from: above its last layout op and constant factor."""
    return stages(operand)[-1].operand


def pair_of(product: Contraction, keys: tuple[Atom, ...]) -> tuple[Operand, Operand] | None:
    """(Q, K): the side that has the key axis is K; None where both or neither have it."""
    sides = [computed(side).atoms for side in product.sides]  # axes may be split on the way up
    wanted = set(resolve(keys))
    left, right = (wanted & set(resolve(atoms)) for atoms in sides)
    if right == wanted and not left:
        return product.left, product.right
    if left == wanted and not right:
        return product.right, product.left
    return None


def _widened(node: Node) -> Value | None:
    """x where the node casts x from half to single precision: attention kernels do that inside."""
    source = node.inputs[0] if node.inputs else None
    if source is None or not is_cast(node) or node.output.dtype != torch.float32:
        return None
    return source if source.dtype in (torch.float16, torch.bfloat16) else None


def cheapest(candidates: Sequence[Stage], target: Axes) -> Stage | None:
    """The stage that needs least copying to reach `target`; the nearest one if several.

    What lies above a stage is kept by it, so it counts too.
    """
    kept = 0
    best: tuple[int, int] | None = None
    for index in reversed(range(len(candidates))):
        kept += candidates[index].step if index < len(candidates) - 1 else 0
        needed = cost(candidates[index].operand, target)
        if needed is not None and (best is None or (needed + kept, index) < best):
            best = (needed + kept, index)
    return None if best is None else candidates[best[1]]


@dataclass(frozen=True, slots=True)
class Roles:
    """Atoms by part; each tuple is in the order in which it is packed."""

    batch: tuple[Atom, ...]
    kv_heads: tuple[Atom, ...]
    groups: tuple[Atom, ...]
    queries: tuple[Atom, ...]
    keys: tuple[Atom, ...]
    features: tuple[Atom, ...]
    value_features: tuple[Atom, ...]

    @property
    def query(self) -> Axes:
        """(B, S, H·D)"""
        return (self.batch, self.queries, (*self.kv_heads, *self.groups, *self.features))

    @property
    def key(self) -> Axes:
        """(B, T, G·D)"""
        return (self.batch, self.keys, (*self.kv_heads, *self.features))

    @property
    def value(self) -> Axes:
        """(B, T, G·E)"""
        return (self.batch, self.keys, (*self.kv_heads, *self.value_features))

    @property
    def context(self) -> Axes:
        """(B, S, H·E)"""
        return (self.batch, self.queries, (*self.kv_heads, *self.groups, *self.value_features))

    @property
    def scores(self) -> Axes:
        """(B, H, S, T)"""
        return (self.batch, (*self.kv_heads, *self.groups), self.queries, self.keys)


def _beside(candidates: Sequence[Stage], atoms: set[Atom]) -> list[Atom]:
    """Atoms that share a storage dim with one of `atoms`, outermost first."""
    found: dict[Atom, None] = {}
    for stage in reversed(candidates):
        for dim in stage.operand.dims:
            if atoms & set(dim):
                found.update(dict.fromkeys(a for a in dim if a.const is None and a not in atoms))
    return list(found)


def assign(
    query: Sequence[Stage],
    key: Sequence[Stage],
    value: Sequence[Stage],
    scores: Sequence[Atom],
    keys: tuple[Atom, ...],
    features: tuple[Atom, ...],
    output: Sequence[Atom],
    terms: Sequence[Sequence[Atom]] = (),
) -> Roles | str:
    """The parts, or a sentence that says why there are none.

    `scores` are the probabilities' atoms in storage order (keys included), `output` the context's,
    `terms` those of each bias and mask.
    """
    in_query, in_key, in_value = (set(side[-1].operand.atoms) for side in (query, key, value))
    key_set, feature_set = set(keys), set(features)
    row = [atom for atom in scores if atom not in key_set]
    value_features = tuple(a for a in value[-1].operand.atoms if a not in key_set and a not in row)
    if set(value_features) | set(row) != set(output):
        return "the output has axes that neither the scores nor the values have"
    if not feature_set <= in_query or not feature_set <= in_key:
        return "queries and keys don't share the summed axis"
    if key_set & in_query or not key_set <= in_key or not key_set <= in_value:
        return "the queries depend on the key axis"
    beside = _beside(query, feature_set)
    alone = [a for a in row if a not in in_key and a not in in_value]
    shared = [atom for atom in row if atom not in alone]
    static = [atom for atom in shared if not is_symbolic(atom.size)]
    near = [a for a in (*beside, *_beside(value, set(value_features))) if a in static]
    heads = list(dict.fromkeys(near))
    if not heads and len(shared) > 1 and static and static[-1] is shared[-1]:
        heads = [static[-1]]
    for atom in shared:
        if (atom not in in_key or atom not in in_value) and atom not in heads:
            if atom not in in_query | in_key:
                return "the values have an axis that queries and keys lack"
            side = "keys" if atom in in_key else "values"
            return f"the {side} differ from query to query"
    batch = [atom for atom in shared if atom not in heads]

    def parts(groups: Sequence[Atom]) -> Roles:
        return Roles(
            tuple(batch),
            tuple(heads),
            tuple(groups),
            tuple(atom for atom in alone if atom not in groups),
            keys,
            features,
            value_features,
        )

    certain = [atom for atom in alone if atom in beside and not is_symbolic(atom.size)]
    if len(alone) < 2 or (certain and len(certain) < len(alone)):
        return parts(certain if len(alone) > 1 else ())
    return _least(
        query, [parts(groups) for groups in _groupings(query, alone, shared, terms)], terms
    )


def _groupings(
    query: Sequence[Stage],
    alone: Sequence[Atom],
    shared: Sequence[Atom],
    terms: Sequence[Sequence[Atom]],
) -> list[tuple[Atom, ...]]:
    """What may be groups of heads, likeliest first: the static axes before the last.

    Not those that the model keeps in one axis with the last: they are one axis of queries, unless a
    bias or mask tells them apart. Where nothing is shared, the first may be the model's batch.
    """
    static = [atom for atom in alone if not is_symbolic(atom.size)]
    last = {alone[-1], *_beside(query[:1], {alone[-1]})} & set(alone)
    if any(last & set(term) and last - set(term) for term in terms):
        last = {alone[-1]}
    groups = tuple(atom for atom in alone if atom in static and atom not in last)
    free = [atom for atom in static if len(last) == 1 or atom not in last]
    others = [found for found in combinations(free, len(groups)) if found != groups]
    return [*([()] if not shared else []), groups, *others]


def _least(
    query: Sequence[Stage], found: Sequence[Roles], terms: Sequence[Sequence[Atom]]
) -> Roles:
    """Where fewest terms tell groups, or queries, apart; of these, where queries move least."""

    def price(roles: Roles) -> tuple[int, int]:
        stage = cheapest(query, roles.query)
        moved = None if stage is None else cost(stage.operand, roles.query)
        rows, groups = set(roles.queries), set(roles.groups)
        known = [(rows & set(term), groups & set(term)) for term in terms]
        apart = sum(bool(of and of != rows) or bool(by and not of) for of, by in known)
        return apart, 1 << 30 if moved is None else moved

    return min(found, key=price)
