"""Two graphs as one that chooses: what a model computes on either side of a branch.

Both are traces of the same code, and differ by what the branch does. So much of them is common:
before the branch, and again from where its sides meet. `where` goes to the places at which the two
still differ but for what they read: f(a) on one side and f(b) on the other are f(where(c, a, b)).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import torch

from attngraph.ir import Builder, Graph, Node, ScalarType, TensorType, Value
from attngraph.ir.clone import copy_nodes
from attngraph.ir.dead import eliminate_dead_code
from attngraph.ir.dims import DimInfo, is_of_a_run, symbol, symbols_of
from attngraph.ir.effects import dim_definers, dims_of, is_function
from attngraph.ir.hashing import hashable
from attngraph.ir.ops import attribute
from attngraph.ir.traits import GATHER, INDEX, QUOTIENT, RESHAPE, ROUNDED_DIVISION, SCATTER, SELECT
from attngraph.passes.canonical.cse import CommonSubexpressionElimination

_MOST_PAIRS = 100_000
Pair = tuple[Value, Value]


class UnlikeError(Exception):
    """Two graphs whose results are of different shapes or types, or that take other inputs."""


def join(graph: Graph, other: Graph, condition: int, *, when: bool, results: int) -> None:
    """Has the first `results` outputs of `graph` be those of `other` where a condition is `when`.

    The condition is an output of `graph`, a bool without dims, at that position; outputs from
    `results` on stay as they are. `other` is of no use afterwards. Raises UnlikeError, which leaves
    both in between.
    """
    if [value.type for value in graph.inputs] != [value.type for value in other.inputs]:
        raise UnlikeError
    if len(other.outputs) != results:
        raise UnlikeError
    names, count = graph.output_names, len(graph.outputs)
    moved = _moved(other, graph)
    graph.set_outputs([*graph.outputs, *moved], [*names, *(f"other_{i}" for i in range(results))])
    simplify(graph)
    ours, theirs = graph.outputs[:count], graph.outputs[count:]
    joined = _Join(graph, ours[condition], when)
    made = joined.of(list(zip(ours[:results], theirs, strict=True)))
    graph.set_outputs([*made, *ours[results:]], names)
    eliminate_dead_code(graph)
    for operand, side in ((1, True), (2, False)):
        _guard(graph, joined.chosen, operand, graph.outputs[condition], side)


def simplify(graph: Graph) -> None:
    """Computes each thing once, so that what is equal is one value."""
    CommonSubexpressionElimination().run(graph)


def _moved(other: Graph, graph: Graph) -> list[Value]:
    """The outputs of `other`, whose nodes and constants are now in `graph` too."""
    _with_own_sizes(other, graph)
    known = dict(zip(other.inputs, graph.inputs, strict=True))
    for value in other.constants.values():
        twin = graph.constants.get(value.name)
        if twin is None or not _same_data(twin, value):
            twin = graph.add_constant(value.name, value.data, value.type)
        known[value] = twin
    copy_nodes(other, graph, known)
    graph.conditions = tuple(dict.fromkeys((*graph.conditions, *other.conditions)))
    for name, info in other.dims.items():
        graph.dims[name] = both(graph.dims.get(name, info), info)
    return [known[value] for value in other.outputs]


def _with_own_sizes(other: Graph, graph: Graph) -> None:
    """Gives the sizes of `other` that only a run tells names that `graph` doesn't have."""
    taken = {*graph.dims, *other.dims}
    free = (f"u{at}" for at in range(len(taken), 2 * len(taken) + 2) if f"u{at}" not in taken)
    renamed = {name: next(free) for name in other.dims if is_of_a_run(name)}
    if not renamed:
        return
    infos = {renamed[name]: other.dims[name] for name in renamed}
    for node in other:
        for value in node.outputs:
            if isinstance(value.type, ScalarType) and value.type.name in renamed:
                value.type = ScalarType(value.type.kind, renamed[value.type.name])
    other.define_dims({old: symbol(new) for old, new in renamed.items()})
    other.dims.update(infos)


def _guard(graph: Graph, chosen: list[Node], operand: int, condition: Value, side: bool) -> None:
    """Has what only one side reads run on harmless numbers where the other side is taken.

    `if n > 0: y = x // n` asks so that nothing is divided by 0, and others that no index is beyond
    a table's end, or that some rows are selected: of none, no size can be told from the others.
    `chosen` are the nodes that choose, `operand` what they read of this side.
    """
    since = 0 if condition.producer is None else condition.producer.number
    roots = [node.inputs[operand] for node in chosen if node.graph is graph]
    elsewhere = _behind([*graph.outputs, condition], dict.fromkeys(chosen, operand))
    only = _behind(roots, {}) - elsewhere
    shared = _sizes_beside(graph, only)
    for node in filter(only.__contains__, graph):
        if node.op in RESHAPE and -1 in node.attrs.get("shape", ()):
            sizes = {**node.attrs, "shape": list(node.output.shape)}
            graph.replace(node, graph.twin(node, attrs=sizes).outputs)
            continue
        if node.op in SELECT and "index" in node.attrs:
            _pad_selected(graph, node)
        for at, harmless in _partial(node, shared):
            value = node.inputs[at]
            if node.number < since or value is None or value.is_constant:
                continue
            build = Builder(graph, node, node.loc)
            number = build.constant(torch.tensor(harmless, dtype=value.dtype), "harmless")
            sides = (value, number) if side else (number, value)
            inputs = list(node.inputs)
            inputs[at] = build("aten.where.self", condition, *sides)
            graph.set_inputs(node, inputs)


def _behind(values: Sequence[Value | None], without: Mapping[Node, int]) -> set[Node]:
    """The nodes that values are made by; of some without what is made of one of their inputs."""
    found: set[Node] = set()
    stack = [value.producer for value in values if value is not None]
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found.add(node)
            left_out = without.get(node)
            read = (value for at, value in enumerate(node.inputs) if at != left_out)
            stack.extend(value.producer for value in read if value is not None)
    return found


def _sizes_beside(graph: Graph, only: Set[Node]) -> frozenset[str]:
    """The sizes of what isn't among these nodes, or that makes any of it."""
    rest = [node for node in graph if node not in only]
    return frozenset().union(
        *(dims_of(value) for node in rest for value in node.outputs),
        *(symbols_of(list(node.attrs.values())) for node in rest),
    )


def _pad_selected(graph: Graph, node: Node) -> None:
    """Has a node that selects one of some rows, whose number only a run tells, find one."""
    rows, dim, place = node.source, attribute(node, "dim"), attribute(node, "index")
    axis = dim % len(rows.shape)
    if not isinstance(place, int) or not any(map(is_of_a_run, symbols_of(rows.shape[axis]))):
        return
    ends = (0, place + 1) if place >= 0 else (-place, 0)
    pad = [0, 0] * (len(rows.shape) - 1 - axis) + [*ends]
    padded = Builder(graph, node, node.loc)("aten.constant_pad_nd", rows, pad=pad)
    graph.set_inputs(node, [padded, *node.inputs[1:]])


def _partial(node: Node, shared: frozenset[str]) -> list[tuple[int, int]]:
    """The inputs of which a node doesn't take every number, each with one that it takes.

    Of a mask that selects rows, whose number is none of the sizes that are `shared`, that is True:
    of no rows there is no maximum.
    """
    selects = [at for at, each in enumerate(node.inputs) if at and each and _is_mask(each)]
    if node.op in INDEX and selects:
        return [] if dims_of(node.output) & shared - _given(node) else [(at, 1) for at in selects]
    divides = node.op in QUOTIENT | ROUNDED_DIVISION
    if not divides and node.op not in GATHER | SCATTER:
        return []
    return [
        (at, int(divides))
        for at, value in enumerate(node.inputs)
        if at > 0 and value is not None and value.dtype in (torch.int64, torch.int32)
    ]


def _is_mask(value: Value) -> bool:
    return isinstance(value.type, TensorType) and value.dtype is torch.bool


def _given(node: Node) -> frozenset[str]:
    """The sizes of what a node reads."""
    return frozenset().union(*(dims_of(value) for value in node.operands))


def both(ours: DimInfo, theirs: DimInfo) -> DimInfo:
    """The sizes that are in both ranges."""
    ends = [info.high for info in (ours, theirs) if info.high is not None]
    return DimInfo(max(ours.low, theirs.low), min(ends, default=None), ours.hint)


def _same_data(ours: Value, theirs: Value) -> bool:
    if ours.type != theirs.type or ours.data is None or theirs.data is None:
        return False
    return ours.data is theirs.data or bool(torch.equal(ours.data, theirs.data))


class _Join:
    """Values of one graph on two ways through the model: the second where a condition is `when`.

    `chosen` are the nodes that choose.
    """

    def __init__(self, graph: Graph, condition: Value, when: bool) -> None:
        self._build = Builder(graph)
        self._condition, self._when = condition, when
        self._definers = dim_definers(graph)
        self._known: dict[Pair, Value | None] = {}
        self._nodes: dict[tuple[Node, Node], Node] = {}
        self.chosen: list[Node] = []

    def of(self, pairs: Sequence[Pair]) -> list[Value]:
        """What each pair is joined to. Raises UnlikeError where one can't be."""
        made = [self._made(pair) for pair in pairs]
        found = [value for value in made if value is not None]
        if len(found) < len(made):
            raise UnlikeError
        return found

    def _made(self, wanted: Pair) -> Value | None:
        """The joined value, or None where only what reads it may be chosen."""
        stack = [wanted]
        while stack:
            pair = stack[-1]
            if len(self._known) > _MOST_PAIRS:
                raise UnlikeError
            pending = [] if pair in self._known else self._read_by(pair)
            pending = [each for each in pending if each not in self._known]
            stack.extend(pending)
            if not pending:
                stack.pop()
                if pair not in self._known:
                    self._known[pair] = self._joined(pair)
        return self._known[wanted]

    def _read_by(self, pair: Pair) -> list[Pair]:
        """What two values are made of, if it is all in which they differ."""
        ours, theirs = (value.producer for value in pair)
        if ours is None or theirs is None or pair[0] is pair[1] or not self._alike(*pair):
            return []
        pairs = zip(ours.inputs, theirs.inputs, strict=True)
        return [(a, b) for a, b in pairs if a is not None and b is not None]

    def _alike(self, first: Value, second: Value) -> bool:
        ours, theirs = first.producer, second.producer
        if ours is None or theirs is None:
            return False
        return (
            ours.op == theirs.op
            and first.index == second.index
            and [value is None for value in ours.inputs]
            == [value is None for value in theirs.inputs]
            and [value.type for value in ours.outputs] == [value.type for value in theirs.outputs]
            and hashable(ours.attrs) == hashable(theirs.attrs)
            and is_function(ours)
            and not {ours, theirs} & self._definers.keys()
        )

    def _joined(self, pair: Pair) -> Value | None:
        first, second = pair
        if first is second:
            return first
        ours, theirs = first.producer, second.producer
        if ours is not None and theirs is not None and (read := self._read_by(pair)):
            inputs = [self._known[each] for each in read]
            if all(value is not None for value in inputs):
                rest = iter(inputs)
                given = [None if value is None else next(rest) for value in ours.inputs]
                if (ours, theirs) not in self._nodes:
                    self._nodes[ours, theirs] = self._build.graph.create(
                        ours.op,
                        given,
                        ours.attrs,
                        types=[value.type for value in ours.outputs],
                        names=[value.name for value in ours.outputs],
                        loc=ours.loc,
                    )
                return self._nodes[ours, theirs].outputs[first.index]
        # Of two weights neither is copied: what is made with them is chosen from.
        are_weights = first.is_constant and second.is_constant
        if first.type != second.type or isinstance(first.type, ScalarType):
            return None
        if are_weights and (first.data is None or first.data.numel() > 1):
            return None
        sides = (second, first) if self._when else (first, second)
        loc = ours.loc if ours is not None else self._build.loc
        node = self._build.at(None, loc).node("aten.where.self", self._condition, *sides)
        self.chosen.append(node)
        return node.output
