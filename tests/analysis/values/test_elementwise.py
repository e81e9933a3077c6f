"""Scalings, read and applied as torch applies them."""

from __future__ import annotations

import pytest
import torch

from attngraph.analysis.values.affine import numbers, product_above
from attngraph.analysis.values.elementwise import Scaling, read_scaling
from attngraph.ir import Graph, Node, parse
from attngraph.ir.ops import evaluate

FORMS = {
    "neg": "aten.neg(%x)",
    "times": "aten.mul.Tensor(%x, %f)",
    "times, the other way": "aten.mul.Tensor(%f, %x)",
    "over": "aten.div.Tensor(%x, %f)",
    "over a number": "aten.div.Scalar(%x) {other = 4.0}",
    "plus": "aten.add.Tensor(%x, %f)",
    "plus twice": "aten.add.Tensor(%x, %f) {alpha = 2}",
    "plus, the other way": "aten.add.Tensor(%f, %x)",
    "minus": "aten.sub.Tensor(%x, %f)",
    "minus thrice": "aten.sub.Tensor(%x, %f) {alpha = 3}",
    "from": "aten.sub.Tensor(%f, %x)",
}
NONE = {
    "a quotient": "aten.div.Tensor(%f, %x)",
    "twice the other": "aten.add.Tensor(%f, %x) {alpha = 2}",
    "thrice the other": "aten.sub.Tensor(%f, %x) {alpha = 3}",
    "a broadcast": "aten.mul.Tensor(%x, %wide)",
    "itself": "aten.mul.Tensor(%x, %x)",
    "zeros below": "aten.div.Tensor(%x, %zeros)",
    "another dtype": "aten.mul.Tensor(%x, %precise)",
}


def graph_of(form: str) -> tuple[Graph, Node]:
    graph = parse(f"""graph @main {{
  input %x : f32[2, 3, 4]
  parameter %f : f32[3, 1]
  parameter %wide : f32[5, 1, 1, 1]
  parameter %precise : f64[4]
  constant %zeros = [0.0] : f32[1]
  %y = {form}
  return %y
}}
""")
    data = {"f": torch.randn(3, 1), "wide": torch.randn(5, 1, 1, 1), "precise": torch.randn(4)}
    for name, item in data.items():
        constant = graph.constants[name]
        constant.data = item.to(constant.dtype)
    return graph, next(iter(graph))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_scaling_computes_what_its_node_does(form: str) -> None:
    _, node = graph_of(form)
    found = read_scaling(node)
    assert found is not None
    x = torch.randn(2, 3, 4)
    given = [x if value is found.source else value and value.data for value in node.inputs]
    (expected,) = evaluate(node, given, {})
    scale = 1.0 if found.scale is None else found.scale
    shift = 0.0 if found.shift is None else found.shift
    torch.testing.assert_close((scale * x.double() + shift).float(), expected)


@pytest.mark.parametrize("form", NONE.values(), ids=NONE)
def test_what_is_no_map_of_one_input_of_its_type_is_none(form: str) -> None:
    assert read_scaling(graph_of(form)[1]) is None


@pytest.mark.parametrize("bare", [False, True])
def test_batch_norm_is_read_with_the_statistics_of_the_training(bare: bool) -> None:
    norm = torch.nn.BatchNorm2d(4, affine=not bare).eval()
    for item in norm.state_dict().values():
        item.copy_(torch.rand(item.shape) + 0.5)
    weights = dict(norm.state_dict())
    named = "none, none" if bare else "%weight, %bias"
    lines = [f"  parameter %{name} : f32[4]" for name in weights if name[0] in "wbr"]
    graph = parse(
        "graph @main {\n  input %x : f32[2, 4, 3, 3]\n" + "\n".join(lines) + f"\n"
        f"  %y = aten.batch_norm(%x, {named}, %running_mean, %running_var) "
        "{training = false, momentum = 0.1, eps = 1e-05, cudnn_enabled = true}\n  return %y\n}\n",
        {name: item for name, item in weights.items() if item.dim()},
    )
    found = read_scaling(next(iter(graph)))
    assert found is not None
    assert found.scale is not None
    assert found.shift is not None
    x = torch.randn(2, 4, 3, 3)
    torch.testing.assert_close((found.scale * x + found.shift).float(), norm(x))


LAID = """graph @main {
  dim batch = 3 in 1..
  input %x : f32[batch, 5, 6]
  parameter %w : f32[8, 6]
  %y = aten.linear(%x, %w)
  %h = aten.reshape(%y) {shape = [batch, 5, 2, 4]}
  %p = aten.permute(%h) {dims = [0, 2, 1, 3]}
  %s = aten.neg(%p)
  return %s
}
"""


def features(shape: tuple[int, ...], text: str = LAID) -> torch.Tensor | None:
    """A scale of 1, 2, 3, … of a shape, as the product's features see it."""
    graph = parse(text)
    node = next(node for node in graph if node.op == "aten.neg")
    source = node.inputs[0]
    assert source is not None
    laid = product_above(graph, source, node)
    assert laid is not None
    scale = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape).double()
    found = Scaling(source, scale, None).of_product(laid)
    assert found is None or found.shift is None
    return None if found is None or found.factor is None else numbers(found.factor)


def test_a_scale_of_heads_and_dims_is_one_of_features() -> None:
    heads, dims = features((2, 1, 1)), features((4,))
    assert heads is not None
    assert dims is not None
    assert heads.tolist() == [1, 1, 1, 1, 2, 2, 2, 2]
    assert dims.tolist() == [1, 2, 3, 4, 1, 2, 3, 4]
    both = features((2, 1, 4))
    assert both is not None
    assert both.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_scale_of_rows_is_none_of_features() -> None:
    assert features((5, 1)) is None
    assert features((2, 5, 4)) is None


def test_features_that_the_layout_leaves_out_keep_theirs() -> None:
    text = LAID.replace(
        "aten.permute(%h) {dims = [0, 2, 1, 3]}", "aten.select.int(%h) {dim = 2, index = 1}"
    )
    found = features((4,), text)
    assert found is not None
    assert found.tolist() == [1, 1, 1, 1, 1, 2, 3, 4]


def test_of_the_last_dim_only_what_differs_along_it_alone() -> None:
    source = parse(LAID).inputs[0]
    scale = Scaling(source, torch.randn(1, 6).double(), torch.tensor(2.0).double()).of_last_dim()
    assert scale is not None
    assert scale.shift is not None
    assert numbers(scale.shift).tolist() == [2.0] * 6
    assert Scaling(source, torch.randn(5, 1).double(), None).of_last_dim() is None
