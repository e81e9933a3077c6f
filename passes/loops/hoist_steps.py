"""hoist-steps: products with weights leave a loop, unless its states wait for them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from attngraph.ir import Builder, Graph, Node, Remark, Value
from attngraph.ir.dead import eliminate_dead_code
from attngraph.ir.ops import attribute
from attngraph.ir.slices import backward_slice, forward_slice
from attngraph.ir.traits import MATMUL, PRODUCT
from attngraph.passes.loops.batched_steps import Plan
from attngraph.passes.loops.scan_parts import ScanParts
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import GraphPass
from attngraph.passes.rewriting.trials import LOGITS

_REASSOCIATES = "A product with weights in a loop is one product for all steps."


class HoistSteps(GraphPass, name="hoist-steps", exact=False):
    """Splits each `attn.scan` into what all steps compute at once, the loop, and what follows it.

    What reads no state is computed in front of the loop if a product with weights is in it, as far
    as no step's value is broadcast to a larger one. What no state reads is computed behind it from
    the first such product on; the loop then gives what that reads. A value whose ops can't be
    batched stays in the loop.
    """

    exact_only: bool = False

    def run(self, graph: Graph) -> list[Remark]:
        checked = Checked(graph, self.name, LOGITS, depth=None, exact_only=self.exact_only)
        if checked.allows(_REASSOCIATES):
            for node in graph:
                if node.op == "attn.scan" and attribute(node, "scanned"):
                    _Loop(graph, node).split(checked)
        return checked.remarks


class _Loop(ScanParts):
    def __init__(self, graph: Graph, node: Node) -> None:
        super().__init__(graph, node)
        self.dependent = forward_slice(self.initial, self.body)

    def split(self, checked: Checked) -> None:
        front = self._in_front()
        behind = self._behind({root for root, _ in front})
        if not front and not behind:
            return
        build = Builder(self.graph, self.node, self.node.loc)
        known = dict(self.stacked)
        for _, made in front:
            made.make(build, known, self.outside)
        loop, stacked = self._loop(build, known, [root for root, _ in front], behind)
        known.update(stacked)
        pairs = list(zip(self.node.outputs, loop.outputs[: self.carried], strict=False))
        for old, root in zip(self.node.outputs[self.carried :], self.results, strict=True):
            late = behind.get(root)
            new = known[root] if late is None else late.make(build, known, self.outside)
            pairs.append((old, new))
        used = [(old, new) for old, new in pairs if old.uses or old in self.graph.outputs]
        checked.replace(used, reassociates=_REASSOCIATES, at=self.node)
        eliminate_dead_code(self.graph)

    def _in_front(self) -> list[tuple[Value, Plan]]:
        """What the loop reads of all that reads no state, where it is worth a node of its own."""
        fixed = {*self.fixed, *self.body.constants.values()}
        inside, early = set(self.dependent), list[Node]()
        for node in self.body:
            if any(value in inside for value in node.inputs) or self._grows(node):
                inside.update(node.outputs)
            else:
                early.append(node)
        made = {value for node in early for value in node.outputs}
        read = {value for node in self.body if node not in early for value in node.inputs}
        frontier = [v for v in made if v in read or v in self.body.outputs]
        found = []
        for root in sorted(frontier, key=lambda value: value.name):
            _, nodes = backward_slice([root], fixed.__contains__)
            done = any(map(self._is_product, nodes)) and self.planned(root, self.stacked)
            if done:
                found.append((root, done))
        return found

    def _behind(self, front: Collection[Value]) -> dict[Value, Plan]:
        """The results of a step that are made behind the loop, and how."""
        needed = {*backward_slice(self.body.outputs[: self.carried], lambda _: False)[1]}
        late: set[Value] = set()
        for node in self.body:
            reads_state = any(value in self.dependent for value in node.inputs)
            is_late = any(value in late for value in node.inputs)
            if node not in needed and (is_late or (reads_state and self._is_product(node))):
                late.update(node.outputs)
        found = {}
        for root in self.results:
            if root in late:
                kept = self.dependent - late
                varying, _ = backward_slice([root], kept.__contains__)
                cut = {value for value in varying if not self.is_outside(value)}
                done = self.planned(root, cut | {*front})
                if done is not None:
                    found[root] = done
        return found

    def _loop(
        self,
        build: Builder,
        known: dict[Value, Value],
        front: Sequence[Value],
        behind: dict[Value, Plan],
    ) -> tuple[Node, dict[Value, Value]]:
        """The loop that is left, and all values of a step that it gives, stacked."""
        cuts = [leaf for made in behind.values() for leaf in _varying(made)]
        kept = [root for root in self.results if root not in behind]
        given = list(dict.fromkeys(value for value in [*cuts, *kept] if value not in known))
        stacked = {item: known[item] for item in [*self.stacked, *front]}
        after = self.body.outputs[: self.carried]
        loop = self.rebuilt(build, list(self.initial), stacked, [*after, *given])
        return loop, dict(zip(given, loop.outputs[self.carried :], strict=True))

    def _grows(self, node: Node) -> bool:
        """Whether a step's result is larger than what it is made of: of all steps, it would be more
        to keep than the loop ever holds."""
        read = [v for v in node.operands if not self.is_outside(v)]
        if not read or self._is_product(node):
            return False
        return max(self.elements([v]) for v in node.outputs) > self.elements(read)

    def _is_product(self, node: Node) -> bool:
        weights = node.inputs if node.op in MATMUL else node.inputs[1:2]
        is_product = node.op in PRODUCT
        return is_product and any(v is not None and self.is_outside(v) for v in weights)


def _varying(made: Plan) -> list[Value]:
    own = {value for node, _, _ in made.nodes for value in node.outputs}
    read = [made.root, *(v for node, _, _ in made.nodes for v in node.operands)]
    return [value for value in read if value not in own and value not in made.leaves]
