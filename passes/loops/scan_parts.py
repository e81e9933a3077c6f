"""An `attn.scan` taken apart into the values of one step, and put together again."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from attngraph.ir import Builder, Dim, Graph, Node, TensorType, Value
from attngraph.ir.body_sizes import give_sizes
from attngraph.ir.clone import extract
from attngraph.ir.dead import eliminate_dead_code
from attngraph.ir.dims import substitute
from attngraph.ir.ops import attribute
from attngraph.ir.slices import backward_slice
from attngraph.passes.loops.batched_steps import Plan, plan


class ScanParts:
    """The inputs of a step with what the loop is given for them.

    `initial` has the states, `stacked` what differs from step to step, with all steps first, and
    `fixed` what every step reads as it is.
    """

    def __init__(self, graph: Graph, node: Node, body: Graph | None = None) -> None:
        self.graph, self.node = graph, node
        self.body: Graph = attribute(node, "body") if body is None else body
        self.carried: int = attribute(node, "carried")
        own, inputs = self.carried + attribute(node, "scanned"), self.body.inputs
        given = node.operands
        self.operands = dict(zip(inputs, given, strict=True))
        self.initial = {state: self.operands[state] for state in inputs[: self.carried]}
        self.stacked = {item: self.operands[item] for item in inputs[self.carried : own]}
        self.fixed = {value: self.operands[value] for value in inputs[own:]}
        self.steps: Dim = given[self.carried].shape[0]

    @property
    def results(self) -> list[Value]:
        """What a step gives beside the states' next values."""
        return list(self.body.outputs[self.carried :])

    def elements(self, values: Iterable[Value]) -> int:
        """How many numbers of a step these are, at the sample's sizes."""
        dims = {**self.graph.dims, **self.body.dims}
        hints = {name: info.hint for name, info in dims.items()}
        shapes = [value.shape if isinstance(value.type, TensorType) else () for value in values]
        return sum(math.prod(int(substitute(n, hints)) for n in shape) for shape in shapes)

    def is_outside(self, value: Value) -> bool:
        """Whether every step reads the same."""
        return value in self.fixed or value.data is not None

    def outside(self, value: Value) -> Value:
        """The value in the graph that holds the loop; `is_outside` is true of it."""
        if value in self.fixed:
            return self.fixed[value]
        return self.graph.add_constant(f"{self.node.outputs[0].name}.{value.name}", value.data)

    def planned(self, root: Value, varying: Collection[Value]) -> Plan | None:
        """How a value of one step is computed for all steps at once (`plan`)."""
        return plan(root, varying, self.steps, self.is_outside)

    def rebuilt(
        self,
        build: Builder,
        states: Sequence[Value],
        stacked: Mapping[Value, Value],
        roots: Iterable[Value],
    ) -> Node:
        """A loop over these states that gives these values of a step, from what they need."""
        roots = list(roots)
        leaves, _ = backward_slice(roots, {*states, *stacked, *self.fixed}.__contains__)
        items = [item for item in stacked if item in leaves] or list(stacked)[:1]
        fixed = [value for value in self.fixed if value in leaves]
        body = extract(self.body, [*states, *items, *fixed], roots)
        return build.node(
            "attn.scan",
            *(self.initial[state] for state in states),
            *(stacked[item] for item in items),
            *(self.fixed[value] for value in fixed),
            *give_sizes(body, build),
            body=body,
            carried=len(states),
            scanned=len(items),
        )


def read_alone(graph: Graph) -> None:
    """Has each loop take what its steps read, and no more."""
    for node in list(graph):
        if node.op != "attn.scan":
            continue
        parts = ScanParts(graph, node)
        roots = list(parts.body.outputs)
        leaves, _ = backward_slice(roots, parts.operands.__contains__)
        unread = [value for value in (*parts.stacked, *parts.fixed) if value not in leaves]
        if not unread or (len(parts.stacked) == 1 and parts.stacked.keys() >= {*unread}):
            continue
        build = Builder(graph, node, node.loc)
        made = parts.rebuilt(build, list(parts.initial), parts.stacked, roots)
        graph.replace(node, made.outputs)
    eliminate_dead_code(graph)
