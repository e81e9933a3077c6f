"""canonicalize: one way to write each thing, so that analyses meet one form of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attngraph.ir import Graph, Remark
from attngraph.passes.canonical.identities import IDENTITIES
from attngraph.passes.canonical.normal_form import FORMS
from attngraph.passes.canonical.runtime_sizes import resolve_sizes
from attngraph.passes.canonical.scatters import SCATTER_RULES
from attngraph.passes.canonical.slices import SLICE_RULES
from attngraph.passes.rewriting.manager import register
from attngraph.passes.rewriting.rewriter import Rewriter


@register
@dataclass(frozen=True)
class Canonicalize:
    """Applies the local rules until none fires. Every rule is exact, to the sign of a zero.

    - `aten.reshape` with its whole shape written out, for every change of shape only;
    - `aten.permute` for every change of the order of axes;
    - `aten.expand` for every broadcast, `aten.full` for every tensor of one number;
    - `aten._to_copy` for every change of dtype;
    - `aten.split_with_sizes` for every cut along an axis;
    - the ε of `aten.rms_norm`, where its default is meant;
    - an expression for every size that `.item()` reads from a tensor made of sizes;
    - and nothing for what changes nothing: copies, dropout that is off, x · 1, −(−x), …
    """

    name: ClassVar[str] = "canonicalize"
    exact: ClassVar[bool] = True
    bitwise: ClassVar[bool] = True

    def run(self, graph: Graph) -> list[Remark]:
        rules = FORMS + IDENTITIES + SLICE_RULES + SCATTER_RULES
        Rewriter(graph, rules).run()
        if resolve_sizes(graph):
            Rewriter(graph, rules).run()
        return []
