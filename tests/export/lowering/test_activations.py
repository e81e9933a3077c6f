"""Activations of the `attn` dialect run on onnxruntime's own operators and give the same."""

from __future__ import annotations

import pytest
import torch

from attngraph.export.lowering.lower import lower
from tests.export.lowered import check, graph_of, op_types


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("shape", ["seq, 24", "batch, seq, 24", "batch, 2, seq, 24"])
def test_bias_gelu(dtype: str, shape: str) -> None:
    model = check(f"""
  input %x : {dtype}[{shape}]
  input %b : {dtype}[24]
  %y = attn.bias_gelu(%x, %b)
  return %y""")
    assert op_types(model) == ["BiasGelu"]


def test_bias_gelu_in_double_precision() -> None:
    """onnxruntime has no such kernel, and on CPU no Erf either: only the form is checked."""
    graph = graph_of("""
  input %x : f64[batch, 24]
  input %b : f64[24]
  %y = attn.bias_gelu(%x, %b)
  return %y""")
    assert op_types(lower(graph)) == ["Add", "Gelu"]


@pytest.mark.parametrize("dtype", ["f32", "f16", "f64"])
@pytest.mark.parametrize("alpha", [1.702, 0.3, -2.0])
def test_quick_gelu(dtype: str, alpha: float) -> None:
    model = check(f"""
  input %x : {dtype}[batch, seq, 24]
  %y = attn.quick_gelu(%x) {{alpha = {alpha}}}
  return %y""")
    assert op_types(model) == (["Mul", "Sigmoid", "Mul"] if dtype == "f64" else ["QuickGelu"])


def test_quick_gelu_far_out() -> None:
    x = torch.tensor([-1e4, -100.0, -0.0, 0.0, 100.0, 1e4])
    check("  input %x : f32[6]\n  %y = attn.quick_gelu(%x)\n  return %y", inputs=[x])
