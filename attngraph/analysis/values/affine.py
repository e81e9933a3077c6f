"""Reads a node as scale · x + shift, elementwise, with constants for scale and shift."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attngraph.analysis.values.matching import same_type
from attngraph.analysis.values.scalars import number, uniform
from attngraph.analysis.values.weights import is_known, wide
from attngraph.ir import Node, Value
from attngraph.ir.ops import attribute, input_of

_MOST_ELEMENTS = 1 << 16  # of a factor per feature; a table of positions is none
_BATCH_NORMS = frozenset(["aten.batch_norm", "aten._native_batch_norm_legit_no_training"])


@dataclass(frozen=True, slots=True)
class Affine:
    """scale · source + shift in float64; each broadcasts to the shape of `source`, None is 1 or 0.

    `constants` are what they were read from.
    """

    source: Value
    scale: torch.Tensor | None
    shift: torch.Tensor | None
    constants: tuple[Value, ...] = ()


def read_affine(node: Node) -> Affine | None:
    """The node as an affine map of its one input that is no constant; None if it is none."""
    found = _batch_norm(node) if node.op in _BATCH_NORMS else _arithmetic(node)
    if found is None or not same_type(found.source, node.outputs[0]):
        return None
    if not found.source.dtype.is_floating_point or found.source.is_constant:
        return None
    numbers = [tensor for tensor in (found.scale, found.shift) if tensor is not None]
    return found if all(bool(tensor.isfinite().all()) for tensor in numbers) else None


def _arithmetic(node: Node) -> Affine | None:
    op, _, overload = node.op.removeprefix("aten.").partition(".")
    if not node.op.startswith("aten.") or len(node.outputs) != 1:
        return None
    if op == "neg" and node.inputs[0] is not None:
        return Affine(node.inputs[0], -torch.ones((), dtype=torch.float64), None)
    if op not in ("mul", "div", "add", "sub") or overload not in ("Tensor", "Scalar"):
        return None
    sides = [(node.inputs[0], 0)]
    if overload == "Tensor":
        sides.append((node.inputs[1], 1))
    for source, index in sides:
        constant = _other(node, 1 - index)
        if source is None or constant is None:
            continue
        numbers, value = constant
        affine = _applied(node, op, source, numbers, index)
        if affine is not None:
            scale, shift = affine
            return Affine(source, scale, shift, () if value is None else (value,))
    return None


def _other(node: Node, index: int) -> tuple[torch.Tensor, Value | None] | None:
    """The operand that is constant, in float64, and the constant it was read from."""
    if len(node.inputs) <= index:
        found = number(attribute(node, "other"))
        return None if found is None else (torch.tensor(found, dtype=torch.float64), None)
    value = node.inputs[index]
    if value is not None and is_known(value) and value.data is not None:
        return (wide(value), value) if value.data.numel() <= _MOST_ELEMENTS else None
    found = uniform(value)
    return None if found is None else (torch.tensor(found, dtype=torch.float64), None)


def _applied(
    node: Node, op: str, source: Value, other: torch.Tensor, index: int
) -> tuple[torch.Tensor | None, torch.Tensor | None] | None:
    """(scale, shift) where input `index` is the source and the other one a constant."""
    if op == "mul":
        return other, None
    if op == "div":
        return (1 / other, None) if index == 0 else None
    alpha = number(attribute(node, "alpha"))
    if alpha is None:
        return None
    if op == "add":
        return (None, alpha * other) if index == 0 or alpha == 1 else None
    if index == 0:
        return None, -alpha * other
    return (-torch.ones((), dtype=torch.float64), other) if alpha == 1 else None


def _batch_norm(node: Node) -> Affine | None:
    """γ (x − μ) / √(σ² + ε) + β per channel, with the statistics of the training."""
    if node.op == "aten.batch_norm" and attribute(node, "training"):
        return None
    if any(output.uses for output in node.outputs[1:]):
        return None
    source, weight, bias, mean, variance = (
        input_of(node, name) for name in ("input", "weight", "bias", "running_mean", "running_var")
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
    return Affine(source, scale.reshape(shape), shift.reshape(shape), tuple(given))
