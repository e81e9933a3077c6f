"""raise-recurrence: loops over the cell of an RNN, LSTM or GRU become one operator."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from attngraph.analysis.recurrence.cells import Cell, read_cell
from attngraph.analysis.recurrence.kept import why_kept
from attngraph.analysis.recurrence.steps import known_data, read_step
from attngraph.analysis.recurrence.unrolled import Chain, steps_in_a_row, unify, unrolled_loops
from attngraph.analysis.values.scalars import uniform
from attngraph.ir import Builder, Graph, Node, Remark, Value, remark_on
from attngraph.ir.dead import eliminate_dead_code
from attngraph.ir.loc import fuse_locs
from attngraph.ir.ops import attribute
from attngraph.ir.slices import backward_slice
from attngraph.ir.traits import JOIN
from attngraph.passes.loops.batched_steps import Plan, plan
from attngraph.passes.loops.fission import closed_groups, fission, needed_states
from attngraph.passes.loops.scan_parts import ScanParts
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import GraphPass
from attngraph.passes.rewriting.trials import LOGITS

_LOOPS = (
    "It runs as an ONNX Scan, of any length.",
    "It runs as an ONNX Scan, of the sample's length: ask for that axis to be dynamic for others.",
)
"""What becomes of a loop of an open length, and of one of a fixed one."""

_REASSOCIATES = "The steps of a loop are one operator, which sums the products of a gate by itself."


class RaiseRecurrence(GraphPass, name="raise-recurrence", exact=False):
    """Reads each `attn.scan` and each unrolled loop over static steps (cells.py says how).

    What a step computes from its new state is batched over all steps, after `attn.recurrent`. A
    loop stays as it is if its step is no such cell, if an LSTM's memory is read between two steps,
    or if what a step computes can't be batched. A remark then says why, or of an unrolled one that
    its length is fixed; with `exact_only` that is all. Without `recurrences` the target has no
    operator for those of outer products.
    """

    exact_only: bool = False
    recurrences: bool = True

    def run(self, graph: Graph) -> list[Remark]:
        checked = Checked(
            graph, self.name, LOGITS, rounds=True, depth=None, exact_only=self.exact_only
        )
        if checked.allows(_REASSOCIATES):
            whole = set[Node]()
            while left := [n for n in graph if n.op == "attn.scan" and n not in whole]:
                whole.update(
                    node
                    for node in left
                    if not _raise_scan(graph, checked, node) and not _divide(graph, checked, node)
                )
            refused: set[tuple[Value, ...]] = set()
            while _raise_unrolled(graph, checked, refused):
                eliminate_dead_code(graph)
        kept = [remark for node in graph if node.op == "attn.scan" for remark in self._kept(node)]
        unrolled = (_unrolled(*found) for found in steps_in_a_row(graph))
        return [*checked.remarks, *kept, *unrolled]

    def _kept(self, loop: Node) -> Iterator[Remark]:
        """Why a loop stays: of the states that attention may have, as a site that is declined;
        where it has none of them, as a note on the first."""
        general = "with --exact loops stay as they are written" if self.exact_only else ""
        found = list(why_kept(loop))
        for kept in [each for each in found if each.is_matrix] or found[:1]:
            is_read = not general and (self.recurrences or not kept.is_matrix)
            why = kept.why if is_read else general or "the target has no operator for it"
            status = "declined" if kept.is_matrix else "note"
            reason = f"A recurrence stays a loop over its steps: {why}."
            hint = _LOOPS[isinstance(loop.input(attribute(loop, "carried")).shape[0], int)]
            name = loop.outputs[0].name
            yield remark_on(
                kept.node, status, "recurrence-kept", reason, hint, name=name, blamed=kept.node
            )


def _unrolled(steps: int, last: Node) -> Remark:
    reason = f"A loop over time was unrolled into {steps} steps, so its length is fixed."
    hint = (
        "Ask for that axis to be dynamic, and a loop over it stays one, or is an operator over all "
        "steps, as nn.RNN, nn.GRU and nn.LSTM always are."
    )
    return remark_on(last, "note", "unrolled", reason, hint)


def _raise_scan(graph: Graph, checked: Checked, node: Node) -> bool:
    """Makes a loop over a cell one operator; False where it is none."""
    read = [old for old in node.outputs if old.uses or old in graph.outputs]
    found = _CellLoop.of(graph, node, read)
    if found is None:
        return False
    pairs = found.replaced()
    done = checked.replace(pairs, reassociates=_REASSOCIATES, at=node)
    eliminate_dead_code(graph)
    return done


def _divide(graph: Graph, checked: Checked, node: Node) -> bool:
    """Divides a loop (fission.py) of which a part is one over a cell, as that of two layers is."""
    leaves = node.operands
    for early in closed_groups(needed_states(graph, node)):
        parts = fission(graph, node, early)
        if parts is not None:
            halves = parts.first, parts.second
            if any(_CellLoop.of(graph, half, half.outputs) is not None for half in halves):
                olds = [*parts.made, *zip(parts.remaining, parts.second.outputs, strict=True)]
                read = [(old, new) for old, new in olds if old.uses or old in graph.outputs]
                if checked.replace(read, leaves=leaves, at=node):
                    eliminate_dead_code(graph)
                    return True
        eliminate_dead_code(graph)
    return False


@dataclass(frozen=True)
class _CellLoop:
    """A loop over a cell, by its results that are read, each with how it is made of the states."""

    loop: ScanParts
    cell: Cell
    read: Sequence[Value]
    plans: Sequence[tuple[Value, Plan]]

    @classmethod
    def of(cls, graph: Graph, node: Node, read: Collection[Value]) -> _CellLoop | None:
        if not 1 <= attribute(node, "carried") <= 2 or not attribute(node, "scanned"):
            return None
        loop = ScanParts(graph, node)
        states, items, carried = list(loop.initial), list(loop.stacked), loop.carried

        def data(value: Value) -> torch.Tensor | None:
            return known_data(loop.operands.get(value, value))

        step = read_step(states, items, loop.body.outputs[:carried], data)
        cell = None if step is None else read_cell(step)
        if cell is None:
            return None
        varying = {*items, loop.body.outputs[cell.states[0]], states[cell.states[0]]}
        plans: list[tuple[Value, Plan]] = []
        for old, root in zip(node.outputs[carried:], loop.results, strict=True):
            if old in read:
                made = loop.planned(root, varying)
                if made is None:
                    return None
                plans.append((old, made))
        return cls(loop, cell, list(read), plans)

    def replaced(self) -> list[tuple[Value, Value]]:
        """What is read, with what takes its place."""
        loop, cell = self.loop, self.cell
        node, states = loop.node, list(loop.initial)
        after, before = (values[cell.states[0]] for values in (loop.body.outputs, states))
        build = Builder(loop.graph, node, node.loc)
        known = dict(loop.stacked)
        initial = [loop.initial[states[at]] for at in cell.states]
        layer = _Layer(build, cell, list(known.values()), initial)
        known[after] = layer.stacked
        known[before] = layer.shifted() if _reads(self.plans, before) else layer.stacked
        lasts = zip(cell.states, layer.finals, strict=True)
        pairs = [(node.outputs[at], final) for at, final in lasts if node.outputs[at] in self.read]
        return pairs + [(old, made.make(build, known, loop.outside)) for old, made in self.plans]


def _reads(plans: Sequence[tuple[Value, Plan]], value: Value) -> bool:
    roots = (made.root is value for _, made in plans)
    return any(roots) or any(value in node.inputs for _, made in plans for node, _, _ in made.nodes)


class _Layer:
    """The nodes of one `attn.recurrent` over x (T, B, I), or (T, I) without a batch.

    `stacked` are its states h, (T, B, H) or (T, H), `finals` the last h, and c of an LSTM.
    """

    def __init__(
        self, build: Builder, cell: Cell, sequences: Sequence[Value], initial: Sequence[Value]
    ) -> None:
        self.build, self.initial = build, initial
        state = initial[0]
        batched = len(state.shape) == 2
        x = sequences[0] if len(sequences) == 1 else build("aten.cat", *sequences, dim=-1)
        if not batched:
            x = _with_axis(build, x, 1)
        stem = state.name if state.producer is None else "recurrent"
        weights = [
            None if data is None else build.constant(data[None].to(state.dtype), f"{stem}.{name}")
            for name, data in (
                ("weight", cell.weight),
                ("recurrence", cell.recurrence),
                ("bias", cell.bias),
            )
        ]
        h, c = [*(self._lifted(value, batched) for value in initial), None][:2]
        y, *finals = build.node("attn.recurrent", x, h, c, *weights, cell=cell.kind).outputs
        self.stacked = y if batched else build("aten.reshape", y, shape=[y.shape[0], y.shape[2]])
        self.finals = [build("aten.reshape", final, shape=list(state.shape)) for final in finals]

    def _lifted(self, state: Value, batched: bool) -> Value | None:
        if uniform(state) == 0.0:
            return None
        lead = [1] if batched else [1, 1]
        return self.build("aten.reshape", state, shape=[*lead, *state.shape])

    def shifted(self) -> Value:
        """The state before each step."""
        first = _with_axis(self.build, self.initial[0], 0)
        rest = self.build("aten.slice.Tensor", self.stacked, dim=0, start=0, end=-1)
        return self.build("aten.cat", first, rest, dim=0)


def _with_axis(build: Builder, value: Value, dim: int) -> Value:
    """The value with one axis more, of size 1."""
    shape = value.shape
    return build("aten.reshape", value, shape=[*shape[:dim], 1, *shape[dim:]])


def _raise_unrolled(graph: Graph, checked: Checked, refused: set[tuple[Value, ...]]) -> bool:
    """Raises the first unrolled loop over a cell; False if there is none."""
    for chain in unrolled_loops(graph):
        if chain.states[-1] not in refused:
            refused.add(chain.states[-1])
            step = read_step(
                chain.states[0], chain.items[1:2], chain.states[1], lambda value: value.data
            )
            cell = None if step is None else read_cell(step)
            if cell is not None and _replace_chain(graph, checked, chain, cell):
                return True
    return False


def _replace_chain(graph: Graph, checked: Checked, chain: Chain, cell: Cell) -> bool:
    hidden = [states[cell.states[0]] for states in chain.states]
    memory = [states[cell.states[1]] for states in chain.states] if len(cell.states) > 1 else []
    start = 0 if chain.initial is not None else 1
    gathered = _gathered(graph, chain, hidden)
    read = _read(graph, {*hidden, *memory}, {node for node, _, _ in gathered})
    if any(value in read for value in memory[start:-1]):
        return False
    anchor = hidden[0].producer
    assert anchor is not None
    in_order = sorted(chain.nodes, key=lambda node: node.number)
    build = Builder(graph, anchor, fuse_locs(in_order, anchor))
    x = _sequence(build, chain, start)
    begin = chain.states[0] if chain.initial is None else chain.initial
    layer = _Layer(build, cell, [x], [begin[at] for at in cell.states])
    y = layer.stacked
    if start:
        y = build("aten.cat", _with_axis(build, hidden[0], 0), y, dim=0)
    pairs = []
    for node, made, flipped in gathered:
        known = {hidden[1]: y, chain.items[1]: _sequence(build, chain, 0)}
        whole = made.make(build, known, lambda value: value)
        pairs.append((node.output, _placed(build, node, whole, flipped)))
    places = [place for place in range(start, len(hidden)) if hidden[place] in read]
    for place in places:
        if len(places) > 1 or place < len(hidden) - 1:
            pairs.append((hidden[place], build("aten.select.int", y, dim=0, index=place)))
        else:
            pairs.append((hidden[-1], layer.finals[0]))
    if memory and memory[-1] in read:
        pairs.append((memory[-1], layer.finals[1]))
    done = bool(pairs) and checked.replace(pairs, reassociates=_REASSOCIATES, at=anchor)
    if not done:
        eliminate_dead_code(graph)
    graph.sort()
    return done


def _sequence(build: Builder, chain: Chain, start: int) -> Value:
    """The items from `start` on, in the order of the steps, stacked along a first axis."""
    source, dim = chain.slices.source, chain.slices.dim
    order = [dim, *(axis for axis in range(len(source.shape)) if axis != dim)]
    x = build("aten.permute", source, dims=order) if dim else source
    x = build("aten.flip", x, dims=[0]) if chain.reverse else x
    return build("aten.slice.Tensor", x, dim=0, start=start) if start else x


Gathered = tuple[Node, Plan, bool]


def _gathered(graph: Graph, chain: Chain, hidden: Sequence[Value]) -> list[Gathered]:
    """Nodes that stack or concatenate what every step gives: how each step makes it, and whether
    the last step comes first."""
    masks, found = chain.slices.masks, []
    varying = {hidden[1], chain.items[1]}
    for node in graph:
        if node.op not in JOIN or len(node.inputs) != len(hidden):
            continue
        for flipped in (False, True):
            given = [value for value in (node.inputs[::-1] if flipped else node.inputs) if value]
            made = plan(given[1], varying, len(hidden), lambda value: not masks.get(value))
            if made is not None and _is_made(made, given, chain, hidden):
                found.append((node, made, flipped))
                break
    return found


def _is_made(made: Plan, given: Sequence[Value], chain: Chain, hidden: Sequence[Value]) -> bool:
    """Whether each step computes its result from its own state and item as the plan does."""
    for item, state, value in zip(chain.items, hidden, given, strict=True):
        leaves = {hidden[1]: state, chain.items[1]: item}
        bound = unify([(made.root, value)], leaves)
        if bound is None or any(bound.get(leaf, own) is not own for leaf, own in leaves.items()):
            return False
    return True


def _read(graph: Graph, states: set[Value], replaced: set[Node]) -> set[Value]:
    """The states that are read once the loop and the replaced nodes are gone."""
    leaves, _ = backward_slice(graph.outputs, lambda v: v in states or v.producer in replaced)
    return {leaf for leaf in leaves if leaf in states and leaf.producer not in replaced}


def _placed(build: Builder, node: Node, whole: Value, flipped: bool) -> Value:
    """Results (T, …) where `node` puts them: on an axis of their own, or on a joint one."""
    whole = build("aten.flip", whole, dims=[0]) if flipped else whole
    dim = attribute(node, "dim") % len(node.output.shape)
    order = [*range(1, dim + 1), 0, *range(dim + 1, len(whole.shape))]
    placed = build("aten.permute", whole, dims=order) if dim else whole
    if node.op == "aten.stack":
        return placed
    return build("aten.reshape", placed, shape=list(node.output.shape))
