"""Every ONNX operator that a lowering can emit computes what PyTorch computes, on edge values."""

from __future__ import annotations

import functools

import onnx
import onnx_ir as ir
import pytest
import torch

from attngraph.export.lowering.fallback.torchlib import _CHANGED
from attngraph.export.lowering.lower import lower
from attngraph.ir import interpret
from tests.export.lowered import run, session_of
from tests.kernels.emitted import composed, of_torchlib, own
from tests.kernels.runner import Call, emitted, graph_of, observe
from tests.kernels.table import CASES

pytestmark = pytest.mark.machine

ELSEWHERE = {
    "Constant": "becomes an initializer",
    "PackedMultiHeadAttention": "has a CUDA kernel alone: tests/gpu",
    "TensorScatter": "writes into a static cache: below",
    "Celu": "celu has a formula",
    "HammingWindow": "hamming_window has a formula",
    "SoftmaxCrossEntropyLoss": "cross_entropy_loss has a formula",
    "ConstantOfShape": "diagonals, scatters and signs have formulas",
    "Size": "embedding_bag and batch norms have formulas",
    "ConcatFromSequence": "embedding_bag has a formula",
    "SequenceEmpty": "embedding_bag has a formula",
    "SequenceInsert": "embedding_bag has a formula",
    "SequenceAt": "the IR has no sequences",
    "SequenceMap": "the IR has no sequences",
    "SplitToSequence": "splits have a lowering of ours",
    "STFT": "its result is complex",
}
"""Operators without a case, and why."""


@functools.cache
def _emitted() -> frozenset[tuple[str, str]]:
    return frozenset().union(*map(emitted, CASES.values()))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_it_is_as_torch_computes_it_or_as_documented(name: str) -> None:
    found = [observe(CASES[name], dtype) for dtype in CASES[name].dtypes]
    assert not [str(one) for one in found if not one.is_as_known and one.kind != "refused"]
    assert any(one.kind in ("same", "differs") for one in found), list(map(str, found))


def test_every_operator_has_a_case() -> None:
    ran = {operator for operator, _ in _emitted()}
    assert not composed(), "an operator's name is put together, so it isn't found"
    known = own() | of_torchlib().keys()
    assert sorted(known - ran - ELSEWHERE.keys() - _CHANGED) == []
    assert sorted(ELSEWHERE.keys() & ran) == [], "these have a case"
    assert sorted(ELSEWHERE.keys() - known) == [], "nothing emits these"


def test_no_kernel_that_is_wrong_for_integers_is_emitted() -> None:
    wrong = {"Max", "Min", "Clip", "Relu", "Sign", "ReduceMax", "ReduceMin"}
    assert not {operator for operator, dtype in _emitted() if dtype == "INT64"} & wrong


@pytest.mark.parametrize(
    "call",
    [
        'div.Tensor_mode(%0, %1) {rounding_mode = "trunc"}',
        "floor_divide(%0, %1)",
        "remainder.Tensor(%0, %1)",
        "fmod.Tensor(%0, %1)",
    ],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_division_by_zero_is_an_error_in_both(call: str, dtype: torch.dtype) -> None:
    operands = torch.tensor([7, 8], dtype=dtype), torch.tensor([2, 0], dtype=dtype)
    graph, feeds = graph_of([(Call(f"aten.{call}", operands), "computed")])
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        interpret(graph, feeds)
    with pytest.raises(Exception, match="by zero"):
        run(session_of(lower(graph)), feeds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("start", [0, 3])
def test_tensor_scatter_writes_where_it_is_told(dtype: torch.dtype, start: int) -> None:
    kind = int(ir.tensor_adapters.from_torch_dtype(dtype))
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("TensorScatter", ["past", "new", "at"], ["all"], axis=2)],
        "cache",
        [
            value("past", kind, [2, 1, 5, 3]),
            value("new", kind, [2, 1, 2, 3]),
            value("at", onnx.TensorProto.INT64, [2]),
        ],
        [value("all", kind, [2, 1, 5, 3])],
    )
    opset = [onnx.helper.make_opsetid("", 24)]
    model = onnx.helper.make_model(graph, opset_imports=opset, ir_version=10)
    past = torch.full((2, 1, 5, 3), torch.nan, dtype=dtype)
    new = torch.tensor([torch.inf, -0.0, 1.0], dtype=dtype).expand(2, 1, 2, 3).contiguous()
    at = torch.full([2], start)
    feeds = {"past": past.numpy(), "new": new.numpy(), "at": at.numpy()}
    (found,) = session_of(ir.from_proto(model)).run(None, feeds)
    expected = past.clone()
    expected[:, :, start : start + 2] = new
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=0, equal_nan=True)
