"""Scales and offsets: nodes that compute scale · x + shift element by element, with constants.

A `Scaling` is an `Affine` map wherever its numbers differ by feature only. Whether they do is read
by following the axes of its constants through the layout ops between it and a product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attngraph.analysis.layout.axes import resolve
from attngraph.analysis.values.affine import Affine, LaidOut
from attngraph.analysis.values.matching import same_type
from attngraph.analysis.values.scalars import number, uniform
from attngraph.analysis.values.weights import is_known, wide
from attngraph.ir import Node, Value
from attngraph.ir.ops import attribute, inputs_of
from attngraph.ir.traits import ADDITIVE, BATCH_NORM, MULTIPLICATION, NEGATION, SHIFT

_MOST_ELEMENTS = 1 << 16  # of a factor per feature; a table of positions is none
_SCALING = ADDITIVE | SHIFT | MULTIPLICATION
_MINUS_ONE = torch.tensor(-1.0, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Scaling:
    """scale · source + shift in float64; each broadcasts to the shape of `source`, None is 1 or 0.

    `constants` are what they were read from.
    """

    source: Value
    scale: torch.Tensor | None
    shift: torch.Tensor | None
    constants: tuple[Value, ...] = ()

    def of_last_dim(self) -> Affine | None:
        """As a map of the last dim's features; None where its numbers differ along others."""
        width, given = self.source.shape[-1], (self.scale, self.shift)
        outer = [size for n in given if n is not None for size in n.shape[:-1]]
        if not isinstance(width, int) or any(size != 1 for size in outer):
            return None
        scale, shift = (None if n is None else n.reshape(-1).expand(width) for n in given)
        return Affine(scale, shift)

    def of_product(self, laid: LaidOut) -> Affine | None:
        """As a map of the features of a product that the source is laid out from.

        Features that the layout leaves out, as a slice does, are kept as they are. None where the
        numbers differ along anything else.
        """
        factor = None if self.scale is None else _by_feature(self.scale, 1.0, laid)
        shift = None if self.shift is None else _by_feature(self.shift, 0.0, laid)
        missing = (factor is None) != (self.scale is None) or (shift is None) != (
            self.shift is None
        )
        return None if missing else Affine(factor, shift)


def read_scaling(node: Node) -> Scaling | None:
    """The node as an affine map of its one input that is no constant; None if it is none."""
    found = _batch_norm(node) if node.op in BATCH_NORM else _arithmetic(node)
    if found is None or not same_type(found.source, node.outputs[0]):
        return None
    if not found.source.dtype.is_floating_point or found.source.is_constant:
        return None
    numbers = [tensor for tensor in (found.scale, found.shift) if tensor is not None]
    return found if all(bool(tensor.isfinite().all()) for tensor in numbers) else None


def _arithmetic(node: Node) -> Scaling | None:
    op = node.op.removeprefix("aten.").partition(".")[0]
    if node.op in NEGATION and node.inputs[0] is not None:
        return Scaling(node.inputs[0], _MINUS_ONE, None)
    if node.op not in _SCALING:
        return None
    for index, source in enumerate(node.inputs):
        other = _constant(node, 1 - index)
        read = None if other is None else _applied(node, op, other[0], index)
        if source is not None and other is not None and read is not None:
            return Scaling(source, *read, other[1])
    return None


def _constant(node: Node, index: int) -> tuple[torch.Tensor, tuple[Value, ...]] | None:
    """An operand that is constant, in float64, and the constant it was read from."""
    value = node.inputs[index] if index < len(node.inputs) else None
    if is_known(value):
        few = value.tensor_type.numel <= _MOST_ELEMENTS
        return (wide(value), (value,)) if few else None
    found = number(attribute(node, "other")) if index == len(node.inputs) else uniform(value)
    return None if found is None else (torch.tensor(found, dtype=torch.float64), ())


def _applied(
    node: Node, op: str, other: torch.Tensor, index: int
) -> tuple[torch.Tensor | None, torch.Tensor | None] | None:
    """(scale, shift) of the operand at an index, where the other one is constant."""
    if op == "mul":
        return other, None
    if op == "div":
        return (1 / other, None) if index == 0 else None
    alpha = number(attribute(node, "alpha"))
    if alpha is None or (index == 1 and alpha != 1):
        return None
    if op == "add":
        return None, alpha * other
    return (None, -alpha * other) if index == 0 else (_MINUS_ONE, other)


def _batch_norm(node: Node) -> Scaling | None:
    """γ (x − μ) / √(σ² + ε) + β per channel, with the statistics of the training."""
    if node.op == "aten.batch_norm" and attribute(node, "training"):
        return None
    if any(output.uses for output in node.outputs[1:]):
        return None
    source, weight, bias, mean, variance = inputs_of(
        node, "input", "weight", "bias", "running_mean", "running_var"
    )
    given = [value for value in (weight, bias, mean, variance) if value is not None]
    if source is None or mean is None or variance is None or not all(map(is_known, given)):
        return None
    scale = (wide(variance) + float(attribute(node, "eps"))).rsqrt()
    if weight is not None:
        scale = scale * wide(weight)
    shift = -wide(mean) * scale
    if bias is not None:
        shift = shift + wide(bias)
    shape = [-1] + [1] * (len(source.shape) - 2)
    return Scaling(source, scale.reshape(shape), shift.reshape(shape), tuple(given))


def _by_feature(numbers: torch.Tensor, neutral: float, laid: LaidOut) -> torch.Tensor | None:
    """What meets each feature of the product: `numbers` there, `neutral` where it reads none."""
    features = laid.features
    sizes = [atom.size for atom in features]
    if not all(isinstance(size, int) for size in sizes):
        return None
    result = torch.full([int(size) for size in sizes], neutral, dtype=torch.float64)
    outer = laid.axes[len(laid.axes) - numbers.dim() :]
    # The atoms along which the numbers differ, in the order of their dims: all must be features.
    atoms = [
        atom
        for index, size in zip(outer, numbers.shape, strict=True)
        if size != 1
        for atom in resolve(index)
    ]
    free = [atom for atom in features if atom.const is None]
    if not set(atoms) <= set(free):
        return None
    spread = numbers.reshape([int(atom.size) for atom in atoms])
    spread = spread.permute(sorted(range(len(atoms)), key=lambda index: free.index(atoms[index])))
    spread = spread.reshape([int(atom.size) if atom in atoms else 1 for atom in free])
    # Of a feature with a constant index the layout reads a single element.
    result[tuple(slice(None) if atom.const is None else atom.const for atom in features)] = spread
    return result.reshape(-1)
