"""fold-scales: what scales or shifts a linear or convolution goes into its weights.

Layer scale, a temperature per head, inference batch norm (Ioffe and Szegedy 2015), a vector added
after a product: through any layout ops between, as long as the factor differs by feature only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from attngraph.analysis.layout.axes import Axes, Operand, climb, fresh_axes, resolve
from attngraph.analysis.values.affine import Affine, read_affine
from attngraph.analysis.values.matching import only_read_by
from attngraph.analysis.values.weights import Owners, is_known, weight_bytes, wide
from attngraph.ir import Graph, Node, Remark, Value
from attngraph.ir.ops import input_of
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import register
from attngraph.passes.rewriting.trials import LINEAR
from attngraph.passes.weights.folding import Folded, fold, scaled_exactly

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
        checked = Checked(graph, self.name, LINEAR, depth=None, exact_only=self.exact_only)
        owners = Owners(graph)
        for node in graph:
            affine = read_affine(node)
            found = None if affine is None else _product(graph, node, affine.source)
            if affine is None or found is None:
                continue
            operand, axes, path = found
            plan = _plan(affine, operand, axes, owners)
            if plan is None:
                continue
            what = "A constant factor or offset is folded into the weights before it."
            fold(
                checked,
                [plan],
                path,
                [(node.output, affine.source)],
                absorbed=node,
                constants=affine.constants,
                reassociates="" if plan.is_exact else what,
            )
        return checked.remarks


def _product(graph: Graph, node: Node, value: Value) -> tuple[Operand, Axes, list[Node]] | None:
    """The product that the value is laid out from, named in the axes of the value, and the way.

    None where somebody else reads anything on the way, which are the nodes from the product on.
    """
    axes = fresh_axes(value.shape)
    operand, reader = Operand(value, axes), node
    path: list[Node] = []
    while only_read_by(graph, operand.value, reader):
        producer = operand.value.producer
        if producer is None:
            return None
        path.insert(0, producer)
        if producer.op == "aten.linear" or producer.op in _CONVOLUTIONS:
            return operand, axes, path
        above = climb(operand)
        if above is None:
            return None
        operand, reader = above, producer
    return None


def _plan(affine: Affine, operand: Operand, axes: Axes, owners: Owners) -> Folded | None:
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
        return Folded(product, None, new_bias, keeps_sum)
    new_weight = wide(weight) * scale.reshape(-1, *[1] * (len(weight.shape) - 1))
    is_exact = keeps_sum and scaled_exactly(weight, new_weight, scale)
    return Folded(product, new_weight, new_bias, is_exact)


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
