"""Activations of the `attn` dialect run on onnxruntime's own operators and give the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import attngraph
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


class Rough(nn.Module):
    """½ x (1 + erf(x / root))."""

    def __init__(self, root: float) -> None:
        super().__init__()
        self.root = root

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.erf(x / self.root))


@pytest.mark.parametrize("root", [1.4142, 1.41421, 1.41422, 1.5])
def test_a_root_that_is_nearly_that_of_2_is_kept(root: float) -> None:
    """onnxruntime takes x / 1.4142 for x / √2, off by 3e-6 of the result, where it can tell."""
    module, x = Rough(root).eval(), torch.linspace(-4, 4, 99).reshape(3, 33)
    made = attngraph.optimize(module, (x,))
    assert "Gelu" not in op_types(made.model)
    torch.testing.assert_close(made(x), module(x), rtol=3e-7, atol=3e-7)


def test_the_root_of_2_makes_a_gelu() -> None:
    made = attngraph.optimize(Rough(math.sqrt(2)).eval(), (torch.randn(3, 33),))
    assert "Gelu" in op_types(made.model)
