"""What is lowered otherwise for CUDA, because a GPU showed its kernels wrong or missing.

The files run on the CPU provider here, whose kernels are right for both forms.
"""

from __future__ import annotations

import math

import onnx_ir as ir
import pytest
import torch

from attngraph.export.lowering.lower import lower
from attngraph.ir import Graph, interpret
from tests.export.lowered import graph_of, run, session_of

CUDA = "cuda:sm90"


def _operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph.all_nodes()]


def _is_as_torch(graph: Graph, feeds: list[torch.Tensor], **near: float) -> None:
    found = run(session_of(lower(graph, target=CUDA)), feeds)
    for output, expected in zip(found, interpret(graph, feeds), strict=True):
        close = {"rtol": 0, "atol": 0, **near}
        torch.testing.assert_close(output, expected, equal_nan=True, **close)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_row_without_keys_has_a_fill_that_cuda_adds(dtype: str) -> None:
    """Its kernel gives 0 for a row of −1e30 or less."""
    graph = graph_of(
        f"""
        input %q : {dtype}[batch, seq, 8]
        input %mask : bool[batch, 1, seq, keys]
        input %k : {dtype}[batch, keys, 8]
        %y = attn.attention(%q, %k, %k, none, %mask) \
{{heads = 1, kv_heads = 1, scale = 0.5, masked_rows = "mean"}}
        return %y as "y"
        """
    )
    constants = lower(graph, target=CUDA).graph.initializers.values()
    numbers = [value.const_value.numpy().astype("float64") for value in constants]
    lowest = min(float(number.min()) for number in numbers if number.size)
    assert -1e30 < lowest < -1e28


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_topk_takes_infinities_from_the_axis(dtype: torch.dtype, largest: bool) -> None:
    """The kernel fills the axis up with the lowest number, and −inf comes after it."""
    kind = {torch.float32: "f32", torch.float64: "f64"}[dtype]
    graph = graph_of(
        f"""
        input %x : {kind}[2, 5]
        %v, %i = aten.topk(%x) {{k = 3, dim = -1, largest = {str(largest).lower()}, sorted = true}}
        return %v as "v", %i as "i"
        """
    )
    empty = -math.inf if largest else math.inf
    x = torch.tensor([[empty] * 5, [1.0, empty, 2.0, empty, 3.0]], dtype=dtype)
    x[0, 3] = 0.0
    model = lower(graph, target=CUDA)
    (top,) = (node for node in model.graph if node.op_type == "TopK")
    bound = top.inputs[0].producer() if top.inputs[0] is not None else None
    assert bound is not None
    assert bound.op_type == ("Max" if largest else "Min")
    values, places = run(session_of(model), [x])
    expected, _ = x.topk(3, largest=largest)
    torch.testing.assert_close(values, expected, rtol=0, atol=0)
    assert (places < 5).all()
    torch.testing.assert_close(x.gather(-1, places), expected, rtol=0, atol=0)


@pytest.mark.parametrize("down", ["true", "false"])
def test_an_infinity_is_sorted_beyond_the_lowest_number(down: str) -> None:
    """As where one mask fills with finfo.min and another one with −inf."""
    graph = graph_of(
        f"""
        input %x : f32[2, 6]
        %v, %i = aten.sort.stable(%x) {{stable = true, dim = -1, descending = {down}}}
        return %v as "v", %i as "i"
        """
    )
    least = torch.finfo(torch.float32).min
    fills = [-math.inf, least, -math.inf, least, -least, math.inf]
    _is_as_torch(graph, [torch.tensor([fills, [3.0, 1.0, math.nan, 1.0, 0.0, -0.0]])])


def test_powers_of_integers_are_rounded() -> None:
    graph = graph_of(
        """
        input %x : i64[5]
        input %n : i64[5]
        %y = aten.pow.Tensor_Tensor(%x, %n)
        return %y as "y"
        """
    )
    assert "Round" in _operators(lower(graph, target=CUDA))
    _is_as_torch(graph, [torch.tensor([3, -3, 7, 2, 0]), torch.tensor([1, 3, 11, 40, 0])])


@pytest.mark.parametrize("op", ["silu", "sigmoid"])
def test_a_bfloat16_gate_isnt_one_minus_a_rounding_of_one(op: str) -> None:
    graph = graph_of(
        f"""
        input %x : bf16[8]
        input %up : bf16[8]
        %gate = aten.{op}(%x)
        %y = aten.mul.Tensor(%gate, %up)
        return %y as "y"
        """
    )
    assert "Sigmoid" not in _operators(lower(graph, target=CUDA))
    assert "Sigmoid" in _operators(lower(graph, target="cpu"))


@pytest.mark.parametrize("ord", [3.0, 4.0])
def test_a_norm_of_halves_holds_its_powers(ord: float) -> None:
    graph = graph_of(
        f"""
        input %x : f16[2, 5]
        %y = aten.linalg_vector_norm(%x) {{ord = {ord}, dim = [-1]}}
        return %y as "y"
        """
    )
    powers = [node for node in lower(graph, target=CUDA).graph.all_nodes() if "Pow" in node.op_type]
    dtypes = [node.inputs[0].dtype for node in powers if node.inputs[0] is not None]
    assert dtypes
    assert ir.DataType.FLOAT16 not in dtypes
    _is_as_torch(graph, [torch.full((2, 5), 60.0, dtype=torch.float16)], rtol=2e-3)


def test_an_operator_without_a_bfloat16_kernel_is_computed_in_float32() -> None:
    graph = graph_of(
        """
        input %x : bf16[2, 5]
        %low = aten.clamp(%x) {min = -1.0, max = 1.0}
        %log = aten.log(%low)
        %sum = aten.add.Tensor(%log, %x)
        return %sum as "y"
        """
    )
    nodes = list(lower(graph, target=CUDA).graph.all_nodes())
    dtypes = {node.op_type: node.inputs[0].dtype for node in nodes if node.inputs[0] is not None}
    assert dtypes["Log"] == ir.DataType.FLOAT
    assert dtypes["Add"] == ir.DataType.BFLOAT16  # which has one
