"""fold-input-scales: what scales or shifts the input of linears goes into their weights.

W (γ ⊙ x + β) + b is (W · diag γ) x + (W β + b). The scale and bias of norms are fold-norms' part.
"""

from __future__ import annotations

import torch

from attngraph.analysis.values.elementwise import Scaling, read_scaling
from attngraph.analysis.values.weights import Owners
from attngraph.ir import Graph, Node, Remark
from attngraph.passes.rewriting.manager import GraphPass
from attngraph.passes.weights.folding import Plan, behind, checked_weights, fold, grows, is_exact

_WHAT = "A constant factor or offset is folded into the weights behind it."


class FoldInputScales(GraphPass, name="fold-input-scales", exact=False):
    """Takes a factor or offset per feature into the linears behind it, where it has no other user.

    Each weight must have one reader, and no more bytes may be stored afterwards. Exact are powers
    of two without an offset.
    """

    exact_only: bool = False
    stored_in: torch.dtype | None = None

    def run(self, graph: Graph) -> list[Remark]:
        checked = checked_weights(graph, self.name, self.stored_in, exact_only=self.exact_only)
        owners = Owners(graph)
        for node in reversed(graph):
            scaling = read_scaling(node)
            plan = None if scaling is None else _plan(graph, node, scaling, owners)
            if scaling is None or plan is None:
                continue
            fold(
                checked,
                plan,
                list(plan),
                {node.output: scaling.source},
                constants=scaling.constants,
                reassociates="" if is_exact(plan) else _WHAT,
            )
        return checked.remarks[::-1]


def _plan(graph: Graph, node: Node, scaling: Scaling, owners: Owners) -> Plan | None:
    """New weights for every reader of the node; None where a reader is no linear."""
    value = node.outputs[0]
    if value in graph.outputs or not value.uses or not value.shape:
        return None
    if any(user.op != "aten.linear" or index != 0 for user, index in value.uses):
        return None
    features = scaling.of_last_dim()
    plan = None if features is None else behind(value.users, features, owners)
    return None if plan is None or grows(plan, owners, scaling.constants) else plan
