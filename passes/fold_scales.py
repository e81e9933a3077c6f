"""fold-scales: what scales or shifts a linear or convolution goes into its weights.

Layer scale, a temperature per head, inference batch norm (Ioffe and Szegedy 2015), a vector added
after a product: through any layout ops between, as long as the factor differs by feature only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from attngraph.ir import Graph, Node, Remark, Value
from attngraph.ir.graph import fuse_locs
from attngraph.ir.ops import input_of
from attngraph.passes.affine import Affine, read_affine
from attngraph.passes.axes import Axes, Operand, climb, fresh_axes, resolve
from attngraph.passes.labels import reassociated
from attngraph.passes.manager import register
from attngraph.passes.matching import only_read_by, without_trailing
from attngraph.passes.weights import (
    Owners,
    WeightEvidence,
    agree,
    derived,
    discard,
    is_known,
    is_power_of_two,
    region_key,
    weight_bytes,
    wide,
)

_CONVOLUTIONS = frozenset(["aten.conv1d", "aten.conv2d", "aten.conv3d"])


@register
@dataclass(frozen=True)
class FoldScales:
    """Multiplies constant factors into the weights of the product before them, and adds offsets.

    Only where the weights have no other reader, and no more bytes are stored afterwards. Exact are
    powers of two, and an offset where there was no bias.
    """

    exact_only: bool = False

    name: ClassVar[str] = "fold-scales"
    exact: ClassVar[bool] = False

    def run(self, graph: Graph) -> list[Remark]:
        evidence = WeightEvidence(graph.dims)
        owners = Owners(graph)
        remarks = []
        for node in graph:
            affine = read_affine(node)
            found = None if affine is None else _product(graph, node, affine.source)
            if affine is None or found is None:
                continue
            plan = _plan(affine, *found, owners)
            if plan is None or (self.exact_only and not plan.is_exact):
                continue
            if _apply(graph, evidence, node, affine, plan) and not plan.is_exact:
                what = "A constant factor or offset is folded into the weights before it."
                remarks.append(reassociated(plan.product, what))
        return remarks


@dataclass(frozen=True, slots=True)
class _Plan:
    """The product, and its new weight (None: as it is) and bias in float64."""

    product: Node
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    is_exact: bool


def _product(graph: Graph, node: Node, value: Value) -> tuple[Operand, Axes] | None:
    """The product that the value is laid out from, named in the axes of the value.

    None where somebody else reads anything on the way.
    """
    axes = fresh_axes(value.shape)
    operand, reader = Operand(value, axes), node
    while only_read_by(graph, operand.value, reader):
        producer = operand.value.producer
        if producer is None:
            return None
        if producer.op == "aten.linear" or producer.op in _CONVOLUTIONS:
            return operand, axes
        above = climb(operand)
        if above is None:
            return None
        operand, reader = above, producer
    return None


def _plan(affine: Affine, operand: Operand, axes: Axes, owners: Owners) -> _Plan | None:
    product = operand.value.producer
    assert product is not None
    weight, bias = input_of(product, "weight"), input_of(product, "bias")
    if weight is None or weight.dtype != operand.value.dtype:
        return None
    if affine.scale is not None and not (is_known(weight) and owners.is_sole(weight)):
        return None
    if bias is not None and (not is_known(bias) or bias.dtype != weight.dtype):
        return None
    has_bias = affine.shift is not None or bias is not None
    freed = owners.freed([bias, *affine.constants])
    if has_bias and weight_bytes(weight.dtype, weight.shape[:1]) > freed:
        return None
    axis = len(operand.value.shape) - (1 if product.op == "aten.linear" else len(weight.shape) - 1)
    scale = _by_feature(affine.scale, 1.0, operand, axes, axis)
    shift = _by_feature(affine.shift, 0.0, operand, axes, axis)
    if scale is None or shift is None:
        return None
    new_bias = (shift if bias is None else wide(bias) * scale + shift) if has_bias else None
    keeps_sum = affine.shift is None or bias is None
    if affine.scale is None:
        return _Plan(product, None, new_bias, keeps_sum)
    new_weight = wide(weight) * scale.reshape(-1, *[1] * (len(weight.shape) - 1))
    is_lossless = bool((new_weight.to(weight.dtype).double() == new_weight).all())
    return _Plan(
        product, new_weight, new_bias, keeps_sum and is_lossless and is_power_of_two(scale)
    )


def _by_feature(
    numbers: torch.Tensor | None,
    neutral: float,
    operand: Operand,
    axes: Axes,
    axis: int,
) -> torch.Tensor | None:
    """What meets each feature of the product: `numbers` there, `neutral` where it reads none."""
    features = operand.dims[axis]
    sizes = [atom.size for atom in features]
    if not all(isinstance(size, int) for size in sizes):
        return None
    result = torch.full([int(size) for size in sizes], neutral, dtype=torch.float64)
    if numbers is None:
        return torch.full_like(result, neutral).reshape(-1)
    outer = axes[len(axes) - numbers.dim() :]
    own = [
        () if size == 1 else resolve(index)
        for index, size in zip(outer, numbers.shape, strict=True)
    ]
    atoms = [atom for dim in own for atom in dim]
    free = [atom for atom in features if atom.const is None]
    if not set(atoms) <= set(free):
        return None
    laid = numbers.reshape([int(atom.size) for atom in atoms])
    order = sorted(range(len(atoms)), key=lambda index: free.index(atoms[index]))
    laid = laid.permute(order)
    laid = laid.reshape([int(atom.size) if atom in atoms else 1 for atom in free])
    place = tuple(slice(None) if atom.const is None else atom.const for atom in features)
    result[place] = laid
    return result.reshape(-1)


def _apply(graph: Graph, evidence: WeightEvidence, node: Node, affine: Affine, plan: _Plan) -> bool:
    """Gives the product its new weights, unless they turn out to compute something else."""
    product, output = plan.product, node.outputs[0]
    source = product.inputs[0]
    weight, bias = input_of(product, "weight"), input_of(product, "bias")
    assert source is not None
    known = evidence.is_known(region_key(output, source))
    before = {} if known else evidence.results(output, source)
    old = product.inputs
    exact: dict[Value, torch.Tensor] = {}
    new_weight, new_bias = weight, None
    if plan.weight is not None:
        data = plan.weight.to(weight.dtype)
        new_weight = graph.add_constant(derived(weight, ".scaled"), data)
        exact[new_weight] = plan.weight
    if plan.bias is not None:
        name = derived(weight if bias is None else bias, ".shifted")
        new_bias = graph.add_constant(name, plan.bias.to(weight.dtype))
        exact[new_bias] = plan.bias
    graph.set_inputs(product, without_trailing(source, new_weight, new_bias))
    if not known and not agree(before, evidence.results(affine.source, source, exact)):
        graph.set_inputs(product, old)
        discard(graph, exact)
        return False
    product.loc = fuse_locs([product, node], product)
    graph.replace_uses(output, affine.source)
    graph.erase(node)
    discard(graph, [weight, bias, *affine.constants])
    return True
