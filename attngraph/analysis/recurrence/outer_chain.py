"""Several updates of one state in a step, one after the other, as those of DeltaProduct are.

Between two of them stands a state, through which alone the step's next state depends on the one
before: a dominator of the graph. From each to the next the step is read as a step of one update is
(outer_step.py), and confirmed by itself (outer_proof.py); their composition is what the step does,
for all numbers. An update whose value is of an error that an earlier one made has no such state in
front of it.

What reads the state may read any of these, each by one query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attngraph.analysis.recurrence.outer_proof import proven
from attngraph.analysis.recurrence.outer_step import Reader, Sizes, read_outer_step, seen_through
from attngraph.analysis.recurrence.outer_terms import OuterStep, Runs, StateStep
from attngraph.ir import Graph, Value
from attngraph.ir.dims import same_shape
from attngraph.ir.slices import backward_slice, forward_slice
from attngraph.ir.traits import COPY

_MOST = 24  # states between two updates that are looked at


def read_outer_steps(given: StateStep) -> list[OuterStep]:
    """How a step gets the next state: by one update, or by several of one rule.

    Empty where it isn't read. With `shown`, the next state of several is a choice by it between the
    last update's state and the state before the step.
    """
    one = read_outer_step(given)
    if one is not None:
        return [one]
    state, shown = given.state, given.shown
    last = after = _copied(given.after)
    if shown is not None:
        choice = after.producer
        if choice is None or choice.inputs[0] is not shown or choice.inputs[1] is None:
            return []
        last = _copied(choice.inputs[1])
    between = _between(given.body, state, last)
    for sizes in Sizes.of(state):
        chain = _Chain(given, sizes)
        states = chain.states([state, *between, after]) if between else []
        found = chain.read(states) if states else []
        if any(step.query is not None for step in found):
            return found
    return []


def _copied(value: Value) -> Value:
    """What a value is a copy of."""
    while (node := value.producer) is not None and node.op in COPY and node.inputs[0]:
        value = node.inputs[0]
    return value


def _between(body: Graph, state: Value, after: Value) -> list[Value]:
    """The values like the state through which alone `after` depends on it, in order."""
    _, nodes = backward_slice([after], lambda value: value is state)
    reached = forward_slice([state], nodes)
    order = {node: place for place, node in enumerate(body)}
    found: list[Value] = []
    for node in sorted(nodes, key=lambda node: order[node]):
        for value in node.outputs:
            if value is after or value not in reached or value.dtype != state.dtype:
                continue
            if same_shape(value.shape, state.shape) and len(found) < _MOST:
                leaves, _ = backward_slice([after], lambda each, cut=value: each is cut)  # type: ignore[misc]
                if state not in leaves:
                    found.append(value)
    return found


@dataclass(frozen=True)
class _Chain:
    given: StateStep
    sizes: Sizes

    def states(self, points: Sequence[Value]) -> list[Value]:
        """Those of the points from each of which one update leads to the next, to the last one;
        none where there are no two updates that do.

        Points may lie within an update, as a state that has decayed does, or be one state in two
        forms. So each is reached from the nearest of those before it from which it can be.
        """
        ways = {points[0]: [points[0]]}
        for at, point in enumerate(points[1:], 1):
            for before in reversed(points[:at]):
                shown = self.given.shown if point is points[-1] else None
                if before in ways and self._update(ways[before], point, None, shown) is not None:
                    ways[point] = [*ways[before], point]
                    break
        found = ways.get(points[-1], [])
        return found if len(found) > 2 else []

    def read(self, states: Sequence[Value]) -> list[OuterStep]:
        """The updates between the states, each with what reads the state behind it, the first one
        with what reads that in front of it or behind it."""
        seen = self._seen(states)
        found: list[OuterStep] = []
        for at, after in enumerate(states[1:], 1):
            both = [states[0], after] if at == 1 else [after]
            reads = [seen[state] for state in both if state in seen]
            z = reads[0] if reads else None
            is_last = after is states[-1]
            step = self._update(states[:at], after, z, self.given.shown if is_last else None)
            if len(reads) > 1 or step is None or step.gain or (step.reads_before and at > 1):
                return []
            found.append(step)
        if found[0].reads_before and found[-1].query is not None:
            return []  # the last state of one token is the first of the next
        if found[0].rule == "none" and self.sizes.features == 1:
            return []  # a Scan over so many tokens (`is_by_channel`), slower than the loop
        return found if len({step.rule for step in found}) == 1 else []

    def _seen(self, states: Sequence[Value]) -> dict[Value, Value]:
        """The value z through which alone the rest reads each state, of those that it reads by
        one; none where it reads any otherwise."""
        found, rest = {}, self.given.rest
        for state in states:
            z = seen_through(self.given.body, state, state, rest, self.sizes.seen, states)
            if z is not None:
                found[state] = z
        ends, _ = backward_slice(rest, {*states, *found.values()}.__contains__)
        return {} if set(ends) & set(states) else found

    def _update(
        self, states: Sequence[Value], after: Value, z: Value | None, shown: Value | None
    ) -> OuterStep | None:
        """The update from the last of the states."""
        results, given = [after] if z is None else [after, z], self.given
        stays = None if shown is None else states[0]
        runs = Runs(given.body, states[-1], results, given.known, given.data, stays)
        for found in Reader(runs, self.sizes, given.least).read():
            step = proven(found, runs, given.narrow, shown)
            if step is not None:
                return step
        return None
