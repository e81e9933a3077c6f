"""A region in float64: its tensors, its dtypes, and the bodies of its loops."""

from __future__ import annotations

import json

import pytest
import torch

from attngraph.analysis.values.widening import wide_node, widened
from attngraph.ir import Graph, parse
from attngraph.ir.ops import evaluate


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.float16, torch.float64),
        (torch.bfloat16, torch.float64),
        (torch.float32, torch.float64),
        (torch.float64, torch.float64),
        (torch.complex64, torch.complex128),
        (torch.int64, torch.int64),
        (torch.bool, torch.bool),
    ],
)
def test_only_floats_are_widened(dtype: torch.dtype, wide: torch.dtype) -> None:
    assert widened(torch.ones(3, dtype=dtype)).dtype == wide


def test_what_is_no_tensor_stays() -> None:
    assert widened(3) == 3
    assert widened(None) is None


def test_a_cast_to_half_precision_keeps_all_digits() -> None:
    graph = parse(
        "graph @main {\n  input %x : f32[1]\n  %y = aten._to_copy(%x) {dtype = f16}\n  return %y\n}"
    )
    node = graph.outputs[0].producer
    assert node is not None
    x = torch.tensor([1 / 3], dtype=torch.float64)
    (y,) = evaluate(wide_node(node), [x], {})
    assert y.equal(x)
    assert node.attrs["dtype"] == torch.float16  # the graph's own node is as it was


def test_a_node_without_dtypes_is_itself() -> None:
    graph = parse("graph @main {\n  input %x : f32[1]\n  %y = aten.neg(%x)\n  return %y\n}")
    node = graph.outputs[0].producer
    assert wide_node(node) is node


def test_the_body_of_a_loop_is_widened_with_it() -> None:
    step = """graph @step {
  input %a : f32[2]
  input %b : f32[2]
  %third = aten.full() {size = [], fill_value = 0.3333333333333333, dtype = f32}
  %c = aten.mul.Tensor(%b, %third)
  %d = aten.add.Tensor(%a, %c)
  return %d, %d
}
"""
    loop = f"%y, %all = attn.scan(%s, %x) {{body = {json.dumps(step)}, carried = 1, scanned = 1}}"
    inputs = "  input %s : f32[2]\n  input %x : f32[3, 2]\n"
    graph = parse(f"graph @main {{\n{inputs}  {loop}\n  return %y, %all\n}}")
    node = graph.outputs[0].producer
    assert node is not None
    wide = wide_node(node)
    assert isinstance(wide.attrs["body"], Graph)
    s, x = torch.zeros(2, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64)
    y, _ = evaluate(wide, [s, x], {})
    assert y.dtype == torch.float64
    torch.testing.assert_close(y, torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-15)
