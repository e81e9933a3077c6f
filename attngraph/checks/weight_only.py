"""Weights in int8 or int4: the error of the kernels and that of the codes.

Two errors are kept apart. What kernels make of the stored weights is a matter of rounding, so the
usual error budget holds, with the same graph on the dequantised weights, in float64, for y. What
quantisation itself makes of the model has no budget: it is measured and reported.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from attngraph.export.formats import Precision
from attngraph.export.parity.reference import Reference, ReferenceOutputs
from attngraph.export.precision.quantize import OutputError
from attngraph.ir import Graph, interpret

Case = tuple[ReferenceOutputs, Sequence[torch.Tensor]]
"""Outputs of the original model and of the quantised one, both without padding."""


class Evaluated(torch.nn.Module):
    """A graph as a module: it takes the graph's inputs, and has its constants for parameters."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        held = {name: value.data for name, value in graph.constants.items()}
        self.names = [name for name, data in held.items() if data is not None]
        self.held = torch.nn.ParameterList(
            torch.nn.Parameter(data, requires_grad=False)
            for data in held.values()
            if data is not None
        )

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        constants = dict(zip(self.names, self.held, strict=True))
        return interpret(self.graph, tensors, constants=constants)


def reference_of(graph: Graph, precision: Precision) -> Reference:
    """What a quantised graph gives, in its own precision and in float64."""
    return Reference(Evaluated(graph).eval(), precision=precision)


def errors_of(cases: Sequence[Case]) -> list[OutputError]:
    """What quantisation costs each float output, over all cases. What isn't finite is left out."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
    for reference, outputs in cases:
        each = zip(reference.names, reference.eager, reference.exact, outputs, strict=True)
        for name, eager, exact, found in each:
            if not eager.is_floating_point():
                continue
            target = (eager if exact is None else exact).detach().cpu().double()
            wide = found.detach().cpu().double()
            usual = target.isfinite() & wide.isfinite()
            figures = sums[name]
            figures[0] += float(torch.where(usual, wide - target, 0.0).square().sum())
            figures[1] += float(torch.where(usual, target, 0.0).square().sum())
            if target.dim() > 1 and target.shape[-1] > 1 and target.numel():
                same = wide.argmax(-1) == target.argmax(-1)
                figures[2] += int(same.sum())
                figures[3] += same.numel()
    return [
        OutputError(
            name,
            math.sqrt(lost / norm) if norm else float(lost > 0),
            same / rows if rows else None,
        )
        for name, (lost, norm, same, rows) in sums.items()
    ]
