"""Loop fission: two loops, one after the other, in the place of one, by who reads which states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from attngraph.ir import Builder, Graph, Node, Value
from attngraph.ir.dead import eliminate_dead_code
from attngraph.ir.slices import backward_slice, forward_slice
from attngraph.passes.loops.scan_parts import ScanParts

Group = frozenset[int]
"""Some of a loop's states, by their places."""


@dataclass(frozen=True)
class Fission:
    """Two loops in the place of `loop`, which nothing reads yet.

    `first` steps through the states at the places `early`, and gives what the rest of a step reads
    of it; `second` has the other states, and takes this as what differs from step to step.
    """

    loop: Node
    early: Group
    first: Node
    second: Node

    @property
    def late(self) -> list[int]:
        """The places of the second loop's states."""
        count = len(self.early) + self.second.attrs["carried"]
        return [at for at in range(count) if at not in self.early]

    @property
    def made(self) -> list[tuple[Value, Value]]:
        """The early states' last values, each with what stands for it."""
        olds = [self.loop.outputs[at] for at in sorted(self.early)]
        return list(zip(olds, self.first.outputs, strict=False))

    @property
    def remaining(self) -> list[Value]:
        """The loop's results that those of the second loop are, in their order."""
        return [old for at, old in enumerate(self.loop.outputs) if at not in self.early]


def fission(graph: Graph, node: Node, early: Group) -> Fission | None:
    """Divides a loop, in front of itself. The early states read no others.

    What leads from them to their next values stays in the first loop, and of it is handed on what a
    step reads beside: the rest of what they alone decide may then be computed for all steps at
    once. If that is more than the loop takes and gives itself, as with states that are matrices,
    the first loop computes all that they decide, and None if what it hands on is still more.
    """
    return _Division(graph, node, early).made()


class _Division(ScanParts):
    def __init__(self, graph: Graph, node: Node, early: Group) -> None:
        super().__init__(graph, node)
        self.early = early
        states = list(self.initial)
        self.ahead = [state for at, state in enumerate(states) if at in early]
        self.behind = [state for at, state in enumerate(states) if at not in early]
        nexts = dict(zip(states, self.body.outputs, strict=False))
        self.nexts = [nexts[state] for state in self.ahead]
        self.roots = [*(nexts[state] for state in self.behind), *self.results]

    def made(self) -> Fission | None:
        most = self.elements([*self.stacked, *self.results])
        late = forward_slice(self.behind, self.body)
        _, least = backward_slice(self.nexts, self.operands.__contains__)
        whole = [node for node in self.body if not any(value in late for value in node.inputs)]
        for nodes in (least, whole):
            given = self._handed_on(nodes)
            if self.elements(given) <= most:
                return self._divided(given)
        return None

    def _handed_on(self, nodes: Iterable[Node]) -> list[Value]:
        """What the rest of a step reads of the early states and what these nodes make of them."""
        own = list(nodes)
        reached = forward_slice(self.ahead, own)
        inside = [*self.ahead, *(value for node in own for value in node.outputs)]
        inside = [value for value in inside if value in reached]
        needed, others = backward_slice(self.roots, {*inside, *self.operands}.__contains__)
        read = {*needed, *(value for node in others for value in node.inputs)}
        return [value for value in inside if value in read]

    def _divided(self, given: Sequence[Value]) -> Fission:
        build = Builder(self.graph, self.node, self.node.loc)
        first = self.rebuilt(build, self.ahead, self.stacked, [*self.nexts, *given])
        handed = dict(zip(given, first.outputs[len(self.ahead) :], strict=True))
        second = self.rebuilt(build, self.behind, {**self.stacked, **handed}, self.roots)
        return Fission(self.node, self.early, first, second)


def divide(
    graph: Graph,
    node: Node,
    taken: Callable[[Fission], set[int]],
    make: Callable[[Fission], bool],
) -> bool:
    """Divides a loop where the second one can be taken apart; False where it is left as it is.

    `taken` tries which states leave the second loop, by their places in the one, and `make` makes
    it so. States that would be left there, and read none that leave, are in the first loop too: one
    in front is enough.
    """

    def attempt(early: Group) -> set[int]:
        parts = fission(graph, node, early)
        found = set[int]() if parts is None else taken(parts)
        eliminate_dead_code(graph)
        return found

    needs = needed_states(graph, node)
    for early in ways(needs):
        leave = attempt(early)
        left = {*range(len(needs))} - leave - early
        more = early.union(left, *(needs[at] for at in left))
        if leave and left and more.isdisjoint(leave) and attempt(more) == leave:
            early = more
        parts = fission(graph, node, early) if leave else None
        if parts is not None and make(parts):
            return True
    return False


def ways(needs: Sequence[Group]) -> Iterator[Group]:
    """The groups of states that others read and that read none of these, by what each needs: first
    all of them."""
    found = [
        own - {at}
        for at, own in enumerate(needs)
        if own - {at} and all(at not in needs[other] for other in own - {at})
    ]
    groups = dict.fromkeys([Group().union(*found), *found])
    yield from (group for group in groups if 0 < len(group) < len(needs))


def closed_groups(needs: Sequence[Group]) -> list[Group]:
    """What single states need, beside which there are others; the smallest first."""
    groups = (group for group in {*needs} if len(group) < len(needs))
    return sorted(groups, key=lambda group: (len(group), sorted(group)))


def needed_states(graph: Graph, node: Node) -> list[Group]:
    """The states that each one depends on, after any number of steps."""
    parts = ScanParts(graph, node)
    states = list(parts.initial)
    needs = []
    for after in parts.body.outputs[: len(states)]:
        leaves, _ = backward_slice([after], parts.operands.__contains__)
        needs.append({at for at, state in enumerate(states) if state in leaves})
    for _ in states:
        for own in needs:
            own.update(*(needs[other] for other in list(own)))
    return [Group(own) for own in needs]
