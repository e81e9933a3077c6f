"""Loops over time that torch.export unrolled: equal steps, each fed by the one before."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass

from attngraph.analysis.layout.moves import Cut, Regrouped, move_of
from attngraph.ir import Graph, Node, Value
from attngraph.ir.hashing import hashable
from attngraph.ir.slices import backward_slice
from attngraph.ir.traits import (
    ADDITIVE,
    ADDMM,
    JOIN,
    LAYOUT,
    LINEAR,
    MATMUL,
    NEGATION,
    PAD,
    SCALE,
    SCATTER,
    SHIFT,
)

_LEAST = 3  # steps: the first two say what a step is, and the third confirms it

_LEAST_TOLD = 5  # queries, keys, values and a gate are four places of one axis

_LINEAR = LAYOUT | MATMUL | LINEAR | ADDMM | ADDITIVE | SHIFT | SCALE | NEGATION

_GATHERING = JOIN | PAD | SCATTER  # of one step's result beside those of the others


@dataclass(frozen=True)
class Slices:
    """`items[t]` is `source` at place t of an axis; `masks` says which items a value depends on."""

    source: Value
    dim: int
    items: tuple[Value, ...]
    masks: dict[Value, int]


@dataclass(frozen=True)
class Chain:
    """Steps of a loop in their order: step t makes `states[t]` of `states[t - 1]` and `items[t]`.

    `items` are those of `slices`, from the last on if `reverse`. The first step may be of another
    kind: `initial` is what it starts from, if it is not. `nodes` are those of all other steps.
    """

    slices: Slices
    reverse: bool
    items: tuple[Value, ...]
    states: tuple[tuple[Value, ...], ...]
    initial: tuple[Value, ...] | None
    nodes: frozenset[Node]


class Twins:
    """Finds the nodes that do to other values what some nodes do to theirs."""

    def __init__(self, graph: Graph) -> None:
        self._known: dict[Hashable, Node] = {}
        for node in graph:
            self._known.setdefault((node.op, node.inputs, hashable(node.attrs)), node)

    def follow(self, nodes: Sequence[Node], replaced: dict[Value, Value]) -> list[Node] | None:
        """The twins of nodes in execution order, and in `replaced` their values; None if one lacks.

        Nodes that read nothing that is replaced are their own twins.
        """
        twins = []
        for node in nodes:
            inputs = tuple(replaced.get(v, v) if v is not None else None for v in node.inputs)
            twin = node
            if inputs != node.inputs:
                found = self._known.get((node.op, inputs, hashable(node.attrs)))
                if found is None:
                    return None
                twin = found
                replaced.update(zip(node.outputs, twin.outputs, strict=True))
            twins.append(twin)
        return twins


def unrolled_loops(graph: Graph) -> Iterator[Chain]:
    """Each chain with one or two states that depend on nothing else that changes.

    Equal nodes must have been merged.
    """
    slices = list(_slices(graph))
    twins = Twins(graph) if slices else None
    for each in slices:
        for reverse in (False, True):
            if twins is not None:
                yield from _chains(twins, each, reverse)


def steps_in_a_row(graph: Graph, least: int = _LEAST_TOLD) -> Iterator[tuple[int, Node]]:
    """Each axis of which every place meets what the places before it gave: its size, and a node of
    the loop. A loop over several such axes comes once, and so do those of one module that have as
    many steps. Those of fewer places than `least` are left out.

    Such a loop need not be one of `unrolled_loops`. Between two places something other than a sum
    or a linear map has to happen, such as a product of what a place has and what came before it:
    heads that are added up are no steps in time, and neither are places that are written one by
    one.
    """
    told: set[tuple[int, str, str]] = set()
    for each in _slices(graph, kept=True, least=least):
        count = len(each.items)
        if _is_weight(each.source):
            continue
        changed: dict[int, Node] = {}
        for node in graph:
            is_step = not (node.op in _GATHERING or _is_linear(node)) or _multiplies(node, each)
            for value in node.outputs if is_step else ():
                if value in each.masks:
                    changed.setdefault(each.masks[value], node)
        # The first place meets nothing, and what the last one leaves nothing may read.
        for start, end in ((0, count), (1, count), (1, count - 1)):
            for items in (range(start, end), range(count - end, count - start)[::-1]):
                prefixes = [
                    sum(1 << at for at in items[:size]) for size in range(2, len(items) + 1)
                ]
                if len(prefixes) < 2 or not all(prefix in changed for prefix in prefixes):
                    continue
                inside = changed[prefixes[-2]]  # what depends on all places may lie after the loop
                steps = each.source.shape[each.dim]
                loop = steps, inside.loc.file, inside.loc.module
                if loop not in told:
                    told.add(loop)
                    yield steps, inside


def _multiplies(node: Node, slices: Slices) -> bool:
    """Whether a product has what came before a place, and what that place has."""
    if node.op != "aten.mul.Tensor" and node.op not in MATMUL:
        return False
    masks = [slices.masks.get(value, 0) if value is not None else 0 for value in node.inputs]
    return all(masks) and masks[0] != masks[1]


def _slices(graph: Graph, *, kept: bool = False, least: int = _LEAST) -> Iterator[Slices]:
    """Every axis of static size that is taken apart completely, into `least` places or more; with
    `kept` places that are axes of size 1 are taken, too, and the first or the last may be left.
    """
    found: dict[tuple[Value, int], dict[int, Value]] = {}
    for node in graph:
        for source, dim, index, item in _taken(node, kept=kept):
            found.setdefault((source, dim), {}).setdefault(index, item)
    for (source, dim), items in found.items():
        steps = source.shape[dim]
        if not isinstance(steps, int) or min(steps, len(items)) < least:
            continue
        # A decay of the first step, or of the last one, may be of nothing that is read.
        whole = [range(steps), *([range(1, steps), range(steps - 1), range(1, steps - 1)] * kept)]
        if any(items.keys() == {*places} for places in whole):
            ordered = tuple(items[index] for index in sorted(items))
            yield Slices(source, dim, ordered, _masks(graph, ordered))


def _taken(node: Node, *, kept: bool) -> Iterator[tuple[Value, int, int, Value]]:
    """(source, axis, place, item) for each item that a node takes from an axis."""
    for item in node.outputs:
        move = move_of(item)
        if kept and isinstance(move, Cut) and item.shape[move.dim : move.dim + 1] == (1,):
            if move.first is not None and isinstance(move.source.shape[move.dim], int):
                yield move.source, move.dim, move.first, item
            continue
        if isinstance(move, Regrouped):  # of one place, whose axis goes
            part, move = move.source, move_of(move.source)
            if not isinstance(move, Cut) or move.single:
                continue
            at = move.dim
            if part.shape[at] != 1 or item.shape != (*part.shape[:at], *part.shape[at + 1 :]):
                continue
        elif not isinstance(move, Cut) or not move.single:
            continue
        if move.first is not None and isinstance(move.source.shape[move.dim], int):
            yield move.source, move.dim, move.first, item


def _masks(graph: Graph, items: Sequence[Value]) -> dict[Value, int]:
    """Bit t is set where a value depends on item t; values that depend on none are left out."""
    masks = {item: 1 << place for place, item in enumerate(items)}
    for node in graph:
        mask = 0
        for value in node.inputs:
            mask |= masks.get(value, 0) if value is not None else 0
        if mask:
            for value in node.outputs:
                masks.setdefault(value, mask)
    return masks


def _chains(twins: Twins, slices: Slices, reverse: bool) -> Iterator[Chain]:
    items = slices.items[::-1] if reverse else slices.items
    bits = [slices.masks[item] for item in items]
    first, second, third = bits[0], bits[0] | bits[1], bits[0] | bits[1] | bits[2]
    before = _handed(slices.masks, first, second)
    after = _handed(slices.masks, second, third) if before else []
    cut = {*before, items[1]}
    read: dict[Value, tuple[Value, ...]] = {}
    for value in after:
        leaves, _ = backward_slice([value], cut.__contains__)
        states = tuple(leaf for leaf in before if leaf in leaves)
        changing = {leaf for leaf in leaves if slices.masks.get(leaf)}
        if changing <= cut and 1 <= len(states) <= 2:
            read[value] = states
    for value, states in read.items():
        candidates: list[tuple[Value, ...]] = [(value,)] if len(states) == 1 else []
        candidates += [(value, v) for v in read if v is not value and len(states) == 2]
        for following in candidates:
            joint = {state for v in following for state in read[v]}
            if len(joint) == len(following) and joint == set(states):
                found = _followed(twins, slices, reverse, items, states, following)
                if found is not None:
                    yield found


def _handed(masks: dict[Value, int], mask: int, next_mask: int) -> list[Value]:
    """The values of one step that the next one reads, before what is linear in one of them."""

    def is_next(node: Node) -> bool:
        return any(masks.get(value) == next_mask for value in node.outputs)

    handed = [v for v, own in masks.items() if own == mask and any(map(is_next, v.users))]
    return list(dict.fromkeys(_base(masks, value) for value in handed))


def _is_linear(node: Node) -> bool:
    """Whether a node is linear in each operand where the others are constants."""
    return node.op in _LINEAR or node.op == "aten.mul.Tensor"


def _base(masks: dict[Value, int], value: Value) -> Value:
    """What a value is linear in, as far up as that is one value of its own step."""
    while (node := value.producer) is not None and _is_linear(node):
        changing = [source for source in node.inputs if source is not None and masks.get(source)]
        others = [source for source in node.inputs if source not in (None, *changing)]
        if len(changing) != 1 or masks[changing[0]] != masks[value]:
            break
        if not all(map(_is_weight, others)):  # the first step's state changes in the second
            break
        value = changing[0]
    return value


def _is_weight(value: Value | None) -> bool:
    """Whether a value is made of constants alone."""
    node = None if value is None else value.producer
    if node is None:
        return value is not None and value.is_constant
    return bool(node.inputs) and all(map(_is_weight, node.inputs))


def _followed(
    twins: Twins,
    slices: Slices,
    reverse: bool,
    items: tuple[Value, ...],
    states: tuple[Value, ...],
    following: tuple[Value, ...],
) -> Chain | None:
    """The chain in which `following` is the step after `states`, through to the last item."""
    cut = {*states, items[1]}
    _, body = backward_slice(following, cut.__contains__)
    body = [node for node in body if any(slices.masks.get(value) for value in node.outputs)]
    chain, nodes = [states, following], set(body)
    for item in items[2:]:
        replaced = dict(zip((*states, items[1]), (*chain[-1], item), strict=True))
        found = twins.follow(body, replaced)
        if found is None:
            return None
        nodes.update(found)
        chain.append(tuple(replaced[value] for value in following))
    initial = _initial(slices.masks, states, following, cut, items)
    return Chain(slices, reverse, items, tuple(chain), initial, frozenset(nodes))


def _initial(
    masks: dict[Value, int],
    states: tuple[Value, ...],
    following: tuple[Value, ...],
    cut: set[Value],
    items: tuple[Value, ...],
) -> tuple[Value, ...] | None:
    """What the first step starts from, if it does what the second does."""
    bound = unify(list(zip(following, states, strict=True)), cut)
    if bound is None:
        return None
    initial = tuple(bound[state] for state in states if state in bound)
    if len(initial) != len(states) or bound.get(items[1]) is not items[0]:
        return None
    return None if any(masks.get(value) for value in initial) else initial


def unify(
    pairs: Sequence[tuple[Value, Value]], cut: Collection[Value]
) -> dict[Value, Value] | None:
    """What each value in `cut` is in the second of a pair, where that is made as the first is."""
    bound: dict[Value, Value] = {}
    pending = list(pairs)
    while pending:
        there, here = pending.pop()
        if bound.setdefault(there, here) is not here:
            return None
        if there in cut or there is here:
            continue
        a, b = there.producer, here.producer
        if a is None or b is None or a.op != b.op or there.index != here.index:
            return None
        if len(a.inputs) != len(b.inputs) or hashable(a.attrs) != hashable(b.attrs):
            return None
        for one, other in zip(a.inputs, b.inputs, strict=True):
            if (one is None) != (other is None):
                return None
            if one is not None and other is not None:
                pending.append((one, other))
    return bound
