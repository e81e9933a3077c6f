"""fold-norms: the scale and bias of a norm go into the weights of the linears behind it.

W (γ ⊙ x̂ + β) + b is (W · diag γ) x̂ + (W β + b), with x̂ the normalised rows. What is left is a norm
without weights: γ and β are no longer stored, and where a norm is computed by single operators, or
its kernel skips an absent bias, a pass over the rows is saved for each.

Nothing folds where that would cost something elsewhere: a linear without a bias would need one for
β, another reader of the norm (a residual) would need γ and β for itself, and a tied weight would be
stored twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from attngraph.analysis.layout.axes import Operand, climb, fresh_axes
from attngraph.analysis.values.affine import Affine
from attngraph.analysis.values.matching import without_trailing
from attngraph.analysis.values.weights import Owners, is_known, weight_bytes, weights_of, wide
from attngraph.ir import Graph, Node, Remark, Value
from attngraph.ir.ops import attribute, input_of, named_inputs
from attngraph.ir.traits import FEATURE_NORM
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import GraphPass
from attngraph.passes.weights.folding import Plan, behind, checked_weights, fold, grows, is_exact

_PARTS = {"weight": "scale", "bias": "bias"}
_MOST_ELEMENTS = 1 << 24  # of the weights; the products are then far more work than their norm


class FoldNorms(GraphPass, name="fold-norms", exact=False):
    """Takes a norm's weights into all linears that read it, through any change of rows only.

    Weights of more than 2²⁴ elements together stay as they are stored, which may be in a mapped
    file. Exact are powers of two without a bias.
    """

    exact_only: bool = False
    stored_in: torch.dtype | None = None

    def run(self, graph: Graph) -> list[Remark]:
        checked = checked_weights(graph, self.name, self.stored_in, exact_only=self.exact_only)
        owners = Owners(graph)
        for node in graph:
            weights = _weights(node) if node.op in FEATURE_NORM else {}
            readers = _readers(graph, node.outputs[0]) if weights else None
            plan = None if readers is None else _plan(node, weights, readers, owners)
            if readers is not None and plan is not None:
                _apply(checked, node, weights, readers, plan)
        return checked.remarks


def _weights(norm: Node) -> dict[str, Value]:
    """The norm's weight and bias (H,), where it has them and all of them are known."""
    parts = weights_of(norm) or {}
    found = {name: value for name, value in parts.items() if value is not None}
    dtype = norm.outputs[0].dtype
    known = all(is_known(value) and value.dtype == dtype for value in found.values())
    return found if known else {}


def _readers(graph: Graph, value: Value) -> list[Node] | None:
    """The linears that read the features of a value, and what moves rows on the way to them.

    None where anything else reads it.
    """
    found: list[Node] = []
    if not value.uses or value in graph.outputs:
        return None
    for user, index in value.uses:
        if index != 0:
            return None
        if user.op == "aten.linear":
            found.append(user)
            continue
        behind = _readers(graph, user.outputs[0]) if _moves_rows(user) else None
        if behind is None:
            return None
        found += [user, *behind]
    return found


def _moves_rows(node: Node) -> bool:
    """Whether the node lays out whole rows anew, each with its features in their order."""
    if len(node.outputs) != 1 or not node.output.shape:
        return False
    rank = len(node.output.shape)
    if node.op == "aten.roll":
        dims = attribute(node, "dims")
        return bool(dims) and all(dim % rank != rank - 1 for dim in dims)
    axes = fresh_axes(node.output.shape)
    above = climb(Operand(node.output, axes))
    if above is None or above.value is not node.inputs[0] or not above.dims:
        return False
    return bool(above.dims[-1]) and above.dims[-1] == Operand(node.output, axes).dims[-1]


def _plan(
    norm: Node, weights: Mapping[str, Value], readers: Sequence[Node], owners: Owners
) -> Plan | None:
    linears = [node for node in readers if node.op == "aten.linear"]
    scale = _unless(1.0, weights.get("weight"))
    shift = _unless(0.0, weights.get("bias"))
    if shift is not None and any(input_of(linear, "bias") is None for linear in linears):
        return None
    sizes = [int(input_of(linear, "weight").tensor_type.numel) for linear in linears]
    if scale is not None and sum(sizes) > _MOST_ELEMENTS:
        return None
    plan = behind(linears, Affine(scale, shift), owners)
    # Kernels that ask for a scale get ones.
    ones = weight_bytes(norm.outputs[0].dtype, norm.outputs[0].shape[-1:])
    beside = ones if "weight" in weights else 0
    return None if plan is None or grows(plan, owners, weights.values(), beside) else plan


def _unless(neutral: float, value: Value | None) -> torch.Tensor | None:
    """A constant's numbers, where one of them isn't neutral."""
    found = None if value is None else wide(value)
    return None if found is None or bool((found == neutral).all()) else found


def _apply(
    checked: Checked,
    norm: Node,
    weights: Mapping[str, Value],
    readers: Sequence[Node],
    plan: Plan,
) -> None:
    """A norm without weights, and linears with new ones."""
    parts = " and ".join(_PARTS[name] for name in weights)
    where = f"{len(plan)} linears" if len(plan) > 1 else "the linear"
    what = "" if is_exact(plan) else f"A norm's {parts} went into {where} behind it."
    if not checked.allows(what):
        return
    inputs = named_inputs(norm)
    kept = without_trailing(*(None if name in weights else v for name, v in inputs.items()))
    bare = checked.graph.twin(norm, kept)
    made = fold(
        checked,
        plan,
        readers,
        dict(zip(norm.outputs, bare.outputs, strict=True)),
        constants=weights.values(),
        reassociates=what,
    )
    if made:
        checked.graph.take_place(bare, norm)
