"""fold-norms: the scale and bias of a norm go into the weights of the linears behind it.

W (γ ⊙ x̂ + β) + b is (W · diag γ) x̂ + (W β + b), with x̂ the normalised rows. What is left is a norm
without weights: γ and β are no longer stored, and where a norm is computed by single operators, or
its kernel skips an absent bias, a pass over the rows is saved for each.

Nothing folds where that would cost something elsewhere: a linear without a bias would need one for
β, another reader of the norm (a residual) would need γ and β for itself, and a tied weight would be
stored twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from attngraph.analysis.layout.axes import Operand, climb, fresh_axes
from attngraph.analysis.values.matching import without_trailing
from attngraph.analysis.values.weights import Owners, is_known, weight_bytes, wide
from attngraph.ir import Graph, Node, Remark, Value
from attngraph.ir.ops import attribute, input_of
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import register
from attngraph.passes.rewriting.trials import LINEAR
from attngraph.passes.weights.folding import Folded, behind_input, fold, grows

_NORMS = {  # op → where its scale and its bias stand among the inputs
    "aten.layer_norm": (1, 2),
    "attn.skip_layer_norm": (2, 3),
    "attn.rms_norm": (1,),
    "attn.skip_rms_norm": (2,),
}
_MOST_ELEMENTS = 1 << 24  # of a weight; the product is then far more work than its norm


@register
@dataclass(frozen=True)
class FoldNorms:
    """Takes a norm's weights into all linears that read it, through any change of rows only.

    Weights of more than 2²⁴ elements stay as they are stored, which may be in a mapped file. Exact
    are powers of two without a bias.
    """

    exact_only: bool = False

    name: ClassVar[str] = "fold-norms"
    exact: ClassVar[bool] = False

    def run(self, graph: Graph) -> list[Remark]:
        checked = Checked(graph, self.name, LINEAR, depth=None, exact_only=self.exact_only)
        owners = Owners(graph)
        for node in graph:
            norm = _read(node) if node.op in _NORMS else None
            readers = None if norm is None else _readers(graph, node.outputs[0])
            if norm is None or readers is None:
                continue
            folded = _folded(norm, readers, owners)
            if folded is not None:
                _apply(checked, norm, readers, folded)
        return checked.remarks


@dataclass(frozen=True, slots=True)
class _Norm:
    """A norm over the last axis, with its scale and bias (H,), None where it has none."""

    node: Node
    weight: Value | None
    bias: Value | None

    @property
    def parts(self) -> list[str]:
        named = (("scale", self.weight), ("bias", self.bias))
        return [name for name, value in named if value is not None]


def _read(node: Node) -> _Norm | None:
    """The norm, where it has known weights."""
    if node.op == "aten.layer_norm" and len(attribute(node, "normalized_shape")) != 1:
        return None
    weight, bias = (_input(node, place) for place in (*_NORMS[node.op], None)[:2])
    given = [value for value in (weight, bias) if value is not None]
    dtype = node.outputs[0].dtype
    known = all(is_known(value) and value.dtype == dtype for value in given)
    return _Norm(node, weight, bias) if given and known else None


def _input(node: Node, place: int | None) -> Value | None:
    return node.inputs[place] if place is not None and place < len(node.inputs) else None


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


def _folded(norm: _Norm, readers: Sequence[Node], owners: Owners) -> list[Folded] | None:
    linears = [node for node in readers if node.op == "aten.linear"]
    scale = None if norm.weight is None else wide(norm.weight)
    shift = None if norm.bias is None else wide(norm.bias)
    scale = None if scale is None or bool((scale == 1).all()) else scale
    shift = None if shift is None or bool((shift == 0).all()) else shift
    if shift is not None and any(input_of(linear, "bias") is None for linear in linears):
        return None
    weights = [input_of(linear, "weight") for linear in linears]
    if scale is not None and any(_elements(weight) > _MOST_ELEMENTS for weight in weights):
        return None
    folded = behind_input(linears, scale, shift, owners)
    width = norm.node.outputs[0].shape[-1:]
    ones = 0 if norm.weight is None else weight_bytes(norm.weight.dtype, width)
    if folded is None or grows(folded, owners, [norm.weight, norm.bias], ones):
        return None  # kernels that ask for a scale get ones
    return folded


def _elements(weight: Value) -> int:
    return int(torch.Size([int(size) for size in weight.shape]).numel())


def _apply(
    checked: Checked, norm: _Norm, readers: Sequence[Node], folded: Sequence[Folded]
) -> None:
    """A norm without weights, and linears with new ones."""
    parts = " and ".join(norm.parts)
    where = f"{len(folded)} linears" if len(folded) > 1 else "the linear"
    what = f"A norm's {parts} went into {where} behind it."
    if all(item.is_exact for item in folded):
        what = ""
    if not checked.allows(what):
        return
    node, places = norm.node, _NORMS[norm.node.op]
    kept = [None if place in places else value for place, value in enumerate(node.inputs)]
    bare = checked.graph.create(
        node.op,
        without_trailing(*kept),
        node.attrs,
        types=[value.type for value in node.outputs],
        loc=node.loc,
        before=node,
    )
    made = fold(
        checked,
        folded,
        readers,
        list(zip(node.outputs[1:], bare.outputs[1:], strict=True)),
        renamed={node.outputs[0]: bare.outputs[0]},
        absorbed=node,
        constants=[norm.weight, norm.bias],
        reassociates=what,
    )
    if made:
        checked.graph.take_place(bare, node)
