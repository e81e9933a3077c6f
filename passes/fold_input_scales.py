"""fold-input-scales: what scales or shifts the input of linears goes into their weights.

W (γ ⊙ x + β) + b is (W · diag γ) x + (W β + b). The scale and bias of a norm stay: its operator has
them as inputs, so they cost no node, and folding them would save nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from attngraph.ir import Graph, Node, Remark, Value
from attngraph.ir.graph import fuse_locs
from attngraph.ir.ops import input_of
from attngraph.passes.affine import Affine, read_affine
from attngraph.passes.labels import reassociated
from attngraph.passes.manager import register
from attngraph.passes.matching import without_trailing
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
        evidence = WeightEvidence(graph.dims)
        owners = Owners(graph)
        remarks = []
        for node in reversed(graph):
            affine = read_affine(node)
            plans = None if affine is None else _plans(graph, node, affine, owners)
            if affine is None or plans is None:
                continue
            is_exact = affine.shift is None and all(plan.is_exact for plan in plans)
            if self.exact_only and not is_exact:
                continue
            if _apply(graph, evidence, node, affine, plans) and not is_exact:
                what = "A constant factor or offset is folded into the weights behind it."
                remarks.append(reassociated(plans[0].linear, what))
        return remarks[::-1]


@dataclass(frozen=True, slots=True)
class _Plan:
    """A linear, and its new weight and bias in float64."""

    linear: Node
    weight: torch.Tensor
    bias: torch.Tensor | None
    is_exact: bool


def _plans(graph: Graph, node: Node, affine: Affine, owners: Owners) -> list[_Plan] | None:
    """New weights for every reader of the node; None where a reader is no linear."""
    value = node.outputs[0]
    if value in graph.outputs or not value.uses or not value.shape:
        return None
    if any(user.op != "aten.linear" or index != 0 for user, index in value.uses):
        return None
    width = value.shape[-1]
    scale, shift = _row(affine.scale, 1.0, width), _row(affine.shift, 0.0, width)
    if scale is None or shift is None:
        return None
    plans, biases, stored = [], [], 0
    for linear in value.users:
        weight, bias = input_of(linear, "weight"), input_of(linear, "bias")
        if not is_known(weight) or not owners.is_sole(weight) or weight.dtype != value.dtype:
            return None
        if bias is not None and (not is_known(bias) or bias.dtype != weight.dtype):
            return None
        new_weight = wide(weight) * scale
        exactly = bool((new_weight.to(weight.dtype).double() == new_weight).all())
        new_bias = None
        if affine.shift is not None:
            new_bias = wide(weight) @ shift + (0.0 if bias is None else wide(bias))
            stored += weight_bytes(weight.dtype, [weight.shape[0]])
            biases.append(bias)
        plans.append(_Plan(linear, new_weight, new_bias, exactly and is_power_of_two(scale)))
    return plans if stored <= owners.freed([*biases, *affine.constants]) else None


def _row(numbers: torch.Tensor | None, neutral: float, width: object) -> torch.Tensor | None:
    """One number per feature, the last axis; None where they differ along another one."""
    if not isinstance(width, int):
        return None
    if numbers is None:
        return torch.full((width,), neutral, dtype=torch.float64)
    if any(size != 1 for size in numbers.shape[:-1]):
        return None
    return numbers.reshape(-1).expand(width)


def _apply(
    graph: Graph,
    evidence: WeightEvidence,
    node: Node,
    affine: Affine,
    plans: Sequence[_Plan],
) -> bool:
    """Gives the linears their new weights, unless one turns out to compute something else."""
    source, old = affine.source, [plan.linear.inputs for plan in plans]
    outputs = [plan.linear.output for plan in plans]
    unknown = [out for out in outputs if not evidence.is_known(region_key(out, source))]
    before = [evidence.results(output, source) for output in unknown]
    exact: dict[Value, torch.Tensor] = {}
    for plan in plans:
        _, weight, *rest = plan.linear.inputs
        assert weight is not None
        inputs = [
            graph.add_constant(derived(weight, ".scaled"), plan.weight.to(weight.dtype)),
            *rest,
        ]
        assert inputs[0] is not None
        exact[inputs[0]] = plan.weight
        if plan.bias is not None:
            named = next((bias for bias in rest if bias is not None), weight)
            data = plan.bias.to(weight.dtype)
            inputs[1:] = [graph.add_constant(derived(named, ".shifted"), data)]
            assert inputs[1] is not None
            exact[inputs[1]] = plan.bias
        graph.set_inputs(plan.linear, without_trailing(source, *inputs))
    after = [evidence.results(output, source, exact) for output in unknown]
    if not all(agree(a, b) for a, b in zip(before, after, strict=True)):
        for plan, inputs_before in zip(plans, old, strict=True):
            graph.set_inputs(plan.linear, inputs_before)
        discard(graph, exact)
        return False
    for plan in plans:
        plan.linear.loc = fuse_locs([plan.linear, node], plan.linear)
    graph.erase(node)
    replaced = [value for inputs in old for value in inputs[1:]]
    discard(graph, [*replaced, *affine.constants])
    return True
