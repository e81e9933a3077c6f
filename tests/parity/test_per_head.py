"""Heads written one by one, in every way we know: one attention, and as many GEMMs as one has.

Each model is checked against eager at its own sizes and two others of its dynamic dims; then the
nodes of the ONNX graph are counted.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from attngraph.compiling.compiler import compile_model
from attngraph.frontend.model import Model
from attngraph.options import Options
from tests.parity.per_head import CASES
from tests.parity.per_head.kit import BATCH, MEMORY, SEQ, Case, M

pytestmark = pytest.mark.wide


def _example(case: Case) -> tuple[nn.Module, tuple[Tensor, ...], tuple[dict[int, Dim], ...]]:
    torch.manual_seed(0)
    padding = torch.ones(2, 7, dtype=torch.bool)
    padding[0, :2] = False
    padding[1, 4] = False
    args = {"x": torch.randn(2, 5, M), "memory": torch.randn(2, 7, M), "padding": padding}
    dims = {"x": {0: BATCH, 1: SEQ}, "memory": {0: BATCH, 1: MEMORY}}
    dims["padding"] = dims["memory"]
    shapes = tuple(dims[name] for name in case.inputs)
    return case.make().eval(), tuple(args[name] for name in case.inputs), shapes


def _attentions(counts: Counter[str]) -> int:
    """Attention, GroupQueryAttention, MultiHeadAttention or primitives: whichever is chosen."""
    return sum(number for op, number in counts.items() if op.endswith(("Attention", "Softmax")))


@pytest.mark.parametrize("name", CASES)
def test_heads_merge(name: str) -> None:
    case = CASES[name]
    module, args, shapes = _example(case)
    # With its products merged, as for a GPU or for decoding: the CPU has one for each part.
    optimized = compile_model(Model(module, None, args, {}, shapes), Options(decodes=True))
    parity = optimized.report.parity
    assert parity is not None
    assert parity.passed, str(parity)
    counts = Counter(node.op_type for node in optimized.model.graph)
    products = 2 * counts["Softmax"]  # an attention of primitives has two of its own
    found = _attentions(counts), counts["MatMul"] + counts["Gemm"] - products
    assert found == (case.attentions, case.gemms), counts
