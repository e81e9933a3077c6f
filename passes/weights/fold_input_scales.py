"""fold-input-scales: what scales or shifts the input of linears goes into their weights.

W (γ ⊙ x + β) + b is (W · diag γ) x + (W β + b). The scale and bias of norms are fold-norms' part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attngraph.analysis.values.affine import Affine, read_affine
from attngraph.analysis.values.weights import Owners
from attngraph.ir import Graph, Node, Remark
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import register
from attngraph.passes.rewriting.trials import LINEAR
from attngraph.passes.weights.folding import Folded, behind_input, fold, grows


@register
@dataclass(frozen=True)
class FoldInputScales:
    """Takes a factor or offset per feature into the linears behind it, where it has no other user.

    Each weight must have one reader, and no more bytes may be stored afterwards. Exact are powers
    of two without an offset.
    """

    exact_only: bool = False

    name: ClassVar[str] = "fold-input-scales"
    exact: ClassVar[bool] = False

    def run(self, graph: Graph) -> list[Remark]:
        checked = Checked(graph, self.name, LINEAR, depth=None, exact_only=self.exact_only)
        owners = Owners(graph)
        for node in reversed(graph):
            affine = read_affine(node)
            folded = None if affine is None else _folded(graph, node, affine, owners)
            if affine is None or folded is None:
                continue
            is_exact = all(item.is_exact for item in folded)
            what = "A constant factor or offset is folded into the weights behind it."
            fold(
                checked,
                folded,
                [item.product for item in folded],
                renamed={node.output: affine.source},
                absorbed=node,
                constants=affine.constants,
                reassociates="" if is_exact else what,
            )
        return checked.remarks[::-1]


def _folded(graph: Graph, node: Node, affine: Affine, owners: Owners) -> list[Folded] | None:
    """New weights for every reader of the node; None where a reader is no linear."""
    value = node.outputs[0]
    if value in graph.outputs or not value.uses or not value.shape:
        return None
    if any(user.op != "aten.linear" or index != 0 for user, index in value.uses):
        return None
    width, numbers = value.shape[-1], (affine.scale, affine.shift)
    outer = [size for item in numbers if item is not None for size in item.shape[:-1]]
    if not isinstance(width, int) or any(size != 1 for size in outer):
        return None
    scale, shift = (None if item is None else item.reshape(-1).expand(width) for item in numbers)
    folded = behind_input(value.users, scale, shift, owners)
    return None if folded is None or grows(folded, owners, affine.constants) else folded
