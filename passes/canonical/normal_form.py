"""The normal form: one way to write each thing, which every analysis and later pass relies on.

A graph is in normal form if no rule of `FORMS` would write one of its nodes otherwise, whatever
stands above that node. `canonicalize` brings any graph into it, and each pass that runs after it
keeps it: a pass writes only such nodes as these rules leave alone. docs/normal-form.md shows each
rule at work.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from attngraph.errors import IRError
from attngraph.ir import Graph, Node, Value
from attngraph.ir.printer import excerpt
from attngraph.passes.canonical.layout_forms import LAYOUT_FORMS
from attngraph.passes.canonical.value_forms import VALUE_FORMS
from attngraph.passes.rewriting.rewriter import Rewriter, Rule

FORMS = VALUE_FORMS + LAYOUT_FORMS


class _Rewritten(Exception):
    """A rule is about to write a node otherwise."""


class _Alone(Rewriter):
    """Shows a rule one node with nothing above it, and inserts nothing."""

    def above(self, value: Value) -> Node | None:
        return None

    def emit(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _Rewritten

    def rule_against(self, node: Node) -> Rule | None:
        """The first rule that would write a node otherwise."""
        for item in self.rules_for(node):
            try:
                if item.apply(self, node) is not None:
                    return item
            except _Rewritten:
                return item
        return None


def deviations(graph: Graph) -> Iterator[tuple[Node, Rule]]:
    """The nodes that aren't in normal form, each with a rule that would write it otherwise."""
    alone = _Alone(graph, FORMS)
    for node in graph:
        if (item := alone.rule_against(node)) is not None:
            yield node, item
        for region in node.regions:
            yield from deviations(region)


def check_normal_form(graph: Graph) -> None:
    """Raises IRError at the first node that isn't in normal form."""
    for node, item in deviations(graph):
        raise IRError(
            f"{node.op} is not in normal form: {item.name} writes it otherwise. At {node.loc}:\n"
            f"{excerpt(node.graph or graph, node)}"
        )
