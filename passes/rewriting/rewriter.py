"""Local rules, and the worklist that applies them until none fires.

A rule is a function with the ops it looks at; lists of rules compose with +. It looks from a node
up to its producers and returns what to read instead of the node's outputs, or None.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from attngraph.errors import IRError
from attngraph.ir import Graph, Node, Type, Value
from attngraph.ir.dead import erase_dead
from attngraph.ir.effects import dim_definers
from attngraph.ir.loc import fuse_locs
from attngraph.ir.ops import op_def
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.findings import tally_of

_REWRITES_PER_NODE = 32

Replacement: TypeAlias = Value | Sequence[Value] | None


@dataclass(frozen=True)
class Rule:
    """`apply(rewriter, node)` for every node whose op is one of `ops`.

    With `keeps_name`, what replaces a node has its name: it is the same step of the model.
    """

    ops: tuple[str, ...]
    apply: Callable[[Rewriter, Node], Replacement]
    keeps_name: bool = False

    @property
    def name(self) -> str:
        return self.apply.__name__


def rule(
    *ops: str, keeps_name: bool = False
) -> Callable[[Callable[[Rewriter, Node], Replacement]], Rule]:
    """Makes a function the rule for these ops."""
    return lambda function: Rule(ops, function, keeps_name)


class Rewriter:
    """Applies rules to a graph. Rules insert nodes with `emit`.

    With `checked`, a replacement is made only if it is equal (checked.py). Without, a rule must be
    an identity for all sizes and inputs, and counts as proved.
    """

    def __init__(self, graph: Graph, rules: Iterable[Rule], checked: Checked | None = None) -> None:
        self.graph = graph
        self._checked = checked
        self._wrong: set[tuple[Rule, Node]] = set()
        self._rules: dict[str, list[Rule]] = {}
        for item in rules:
            for op in item.ops:
                self._rules.setdefault(op, []).append(item)
        self._definers = dim_definers(graph)
        self._returned = set(graph.outputs)
        self._queue: deque[Node] = deque()
        self._queued: set[Node] = set()

    def run(self) -> int:
        """Returns how many rewrites were made.

        Raises IRError where a rule undoes what another one did.
        """
        for node in self.graph:
            self._push(node)
        limit = _REWRITES_PER_NODE * (len(self.graph) + 1)
        count = 0
        while self._queue:
            node = self._queue.popleft()
            self._queued.discard(node)
            if node.graph is not self.graph or node in self._definers:
                continue
            for item in self.rules_for(node):
                if (item, node) in self._wrong:
                    continue
                replacement = item.apply(self, node)
                if replacement is not None:
                    if not self._replace(node, replacement):
                        self._wrong.add((item, node))
                        continue
                    if item.keeps_name and isinstance(replacement, tuple):
                        self.graph.take_place(replacement[0].producer, node)
                    count += 1
                    if self._checked is None:
                        tally_of(self.graph).by_proof += 1
                    if count > limit:
                        raise IRError(f"The rule {item.name} never settles on {node!r}.")
                    break
        return count

    def rules_for(self, node: Node) -> Sequence[Rule]:
        """The rules that look at a node's op, in order."""
        return self._rules.get(node.op, ())

    def above(self, value: Value) -> Node | None:
        """The node that makes a value."""
        return value.producer

    def emit(
        self,
        op: str,
        inputs: Sequence[Value | None],
        attrs: Mapping[str, Any],
        *,
        at: Node,
        types: Sequence[Type] | None = None,
        names: Sequence[str] | None = None,
        fused: Iterable[Node | None] = (),
    ) -> tuple[Value, ...]:
        """Inserts a node in the place of `at`, with its types unless others are given.

        Attributes that equal their defaults are left out. The outputs are named after the op unless
        `names` are given. `fused` are further nodes whose work the
        new one does.
        """
        kept = op_def(op).stored(attrs)
        types = [value.type for value in at.outputs] if types is None else types
        others = [node for node in fused if node is not None]
        loc = fuse_locs([*others, at], at) if others else at.loc
        node = self.graph.create(op, inputs, kept, types=types, names=names, loc=loc, before=at)
        self._push(node)
        return node.outputs

    def _push(self, node: Node) -> None:
        if node not in self._queued:
            self._queued.add(node)
            self._queue.append(node)

    def _replace(self, node: Node, replacement: Value | Sequence[Value]) -> bool:
        values = [replacement] if isinstance(replacement, Value) else replacement
        pairs = list(zip(node.outputs, values, strict=True))
        users = {old: old.users for old in node.outputs}
        if self._checked is not None and not self._checked.replace(pairs):
            return False
        for old, new in pairs:
            for user in users[old]:
                self._push(user)
            self.graph.replace_uses(old, new)
            if old in self._returned:
                self._returned.discard(old)
                self._returned.add(new)
        erase_dead(self.graph, [node], definers=self._definers)
        return True
