"""canonicalize: one way to write each thing, so that analyses meet one form of it."""

from __future__ import annotations

from attngraph.ir import Graph, Remark
from attngraph.passes.canonical.identities import IDENTITIES
from attngraph.passes.canonical.normal_form import FORMS
from attngraph.passes.canonical.runtime_sizes import resolve_sizes
from attngraph.passes.canonical.scatters import SCATTER_RULES
from attngraph.passes.canonical.slices import SLICE_RULES
from attngraph.passes.rewriting.manager import GraphPass
from attngraph.passes.rewriting.rewriter import Rewriter


class Canonicalize(GraphPass, name="canonicalize", exact=True, bitwise=True):
    """Applies the local rules until none fires. Every rule is exact, to the sign of a zero.

    The rules of normal_form.py leave one spelling of each thing: docs/normal-form.md lists them.
    The others take away what changes nothing, such as x · 1 or −(−x), and write an expression for
    every size that `.item()` reads from a tensor made of sizes.
    """

    def run(self, graph: Graph) -> list[Remark]:
        rules = FORMS + IDENTITIES + SLICE_RULES + SCATTER_RULES
        Rewriter(graph, rules).run()
        if resolve_sizes(graph):
            Rewriter(graph, rules).run()
        return []
