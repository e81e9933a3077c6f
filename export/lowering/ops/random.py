"""Random numbers: refused, with what to do instead."""

from __future__ import annotations

import onnx_ir as ir

from attngraph.errors import LoweringError
from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.export.lowering.emission.registry import register_lowering
from attngraph.ir import Node


@register_lowering(
    "aten.bernoulli", "aten.bernoulli.p", "aten.bernoulli.Tensor", "aten.binomial", "aten.cauchy",
    "aten.exponential", "aten.geometric", "aten.log_normal", "aten.multinomial",
    "aten.normal_functional", "aten.poisson", "aten.random", "aten.random.from", "aten.random.to",
    "aten.uniform",
    "aten.normal.float_float", "aten.normal.float_Tensor", "aten.normal.Tensor_float",
    "aten.normal.Tensor_Tensor",
    "aten.rand", "aten.rand_like", "aten.randint", "aten.randint.low", "aten.randint_like",
    "aten.randint_like.low_dtype", "aten.randn", "aten.randn_like", "aten.randperm",
)  # fmt: skip
def refuse_random(ctx: LoweringContext, node: Node) -> ir.Value:
    """A result that differs from run to run can't be checked against the model's."""
    raise LoweringError(
        "it draws random numbers, so no two runs agree and no result can be checked; make them an "
        "input of the model"
    )
