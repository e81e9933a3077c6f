"""What the ONNX model promises: names, sizes, source lines, the same bytes, clear refusals."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir
import pytest
import torch

from attngraph.errors import LoweringError
from attngraph.export.lowering.emission import registry
from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.export.lowering.emission.registry import register_lowering
from attngraph.export.lowering.lower import lower, value_names
from attngraph.ir import Node
from tests.export.lowered import check, graph_of, op_types, run, session_of

LAYER = """
  input %x : f32[batch, seq, 8]
  parameter %w : f32[8, 8]
  %h = aten.linear(%x, %w) @ "model.py":12 "layers.0"
  %y = aten.relu(%h) @ "model.py":13 "layers.0"
  return %y as "logits"
"""
WEIGHTS = {"w": torch.randn(8, 8)}


def test_names_dims_and_source_lines_are_the_users() -> None:
    model = lower(graph_of(LAYER, WEIGHTS), name="mine")
    graph = model.graph
    assert graph.name == "mine"
    assert [value.name for value in graph.inputs] == ["x"]
    assert [value.name for value in graph.outputs] == ["logits"]
    assert str(graph.inputs[0].shape) == "[batch,seq,8]"
    assert str(graph.outputs[0].shape) == "[batch,seq,8]"
    matmul, relu = graph
    assert matmul.outputs[0].name == "h"
    assert matmul.metadata_props["attngraph.loc"] == "model.py:12 (layers.0)"
    assert relu.metadata_props["attngraph.loc"] == "model.py:13 (layers.0)"
    assert graph.opset_imports == {"": 24}


def test_every_ir_value_has_its_own_onnx_name() -> None:
    graph = graph_of(
        "  input %x : f32[seq]\n  %out = aten.neg(%x)\n  %y = aten.exp(%out)\n"
        '  return %y as "out", %y as "again", %x as "same"'
    )
    names = value_names(graph)
    assert len({*names.values()}) == len(names)
    model = lower(graph)
    assert [value.name for value in model.graph.outputs] == ["out", "again", "same"]
    x = torch.randn(5)
    for actual, expected in zip(run(session_of(model), [x]), [(-x).exp()] * 2 + [x], strict=True):
        torch.testing.assert_close(actual, expected)


def test_an_output_that_has_an_inputs_name_gets_a_suffix() -> None:
    body = '  input %x : f32[seq]\n  %y = aten.exp(%x)\n  return %x as "x", %y as "x", %y as "y"'
    model = lower(graph_of(body))
    assert [value.name for value in model.graph.outputs] == ["x", "x.1", "y"]
    x = torch.randn(5)
    for actual, expected in zip(run(session_of(model), [x]), [x, x.exp(), x.exp()], strict=True):
        torch.testing.assert_close(actual, expected)


def test_the_same_graph_gives_the_same_bytes() -> None:
    body = LAYER.replace("return", "%z = aten.softplus(%y)\n  return %z, ")
    first, second = (
        ir.to_proto(lower(graph_of(body, WEIGHTS))).SerializeToString(deterministic=True)
        for _ in range(2)
    )
    assert first == second


def test_a_weight_is_stored_once_and_shared_with_the_graph() -> None:
    body = """
  input %i : i64[batch, seq]
  parameter %e : f32[16, 8]
  parameter %head : f32[16, 8]
  %h = aten.embedding(%e, %i)
  %y = aten.linear(%h, %head)
  return %y
"""
    weight = torch.randn(16, 8)
    model = check(body, {"e": weight, "head": weight})
    assert [*model.graph.initializers] == ["e"]
    tensor = model.graph.initializers["e"].const_value
    assert isinstance(tensor, ir.Tensor)
    assert tensor.raw.data_ptr() == weight.data_ptr()
    apart = check(body, {"e": weight, "head": weight.clone()})
    assert [*apart.graph.initializers] == ["e", "head.T"]


def test_what_nobody_reads_is_not_written() -> None:
    model = check(
        "  input %x : f32[seq, 8]\n  %a, %b = aten.chunk(%x) {chunks = 2, dim = 1}\n"
        "  %c = aten.arange() {end = seq}\n  return %a"
    )
    assert op_types(model) == ["Split"]


@pytest.mark.parametrize(
    ("body", "ops"),
    [
        ("%r = aten.reshape(%x) {shape = [batch, seq, 2, 4]}", ["Reshape"]),
        ("%r = aten.reshape(%x) {shape = [batch * seq, 8]}", ["Reshape"]),
        ("%r = aten.reshape(%x) {shape = [batch, 8 * seq]}", ["Reshape"]),
        ("%r = aten.reshape(%x) {shape = [batch, 2, seq, 4]}", ["Reshape"]),
        ("%r = aten.reshape(%x) {shape = [batch, seq, 8]}", ["Identity"]),
        (
            "%r = aten.reshape(%x) {shape = [2, batch, 2, seq, 2]} : f32[2, batch, 2, seq, 2]",
            ["Shape", "Concat", "Reshape"],
        ),
    ],
)
def test_reshapes_compute_no_size_they_can_do_without(body: str, ops: list[str]) -> None:
    model = check(f"  input %x : f32[batch, seq, 8]\n  {body}\n  return %r")
    assert op_types(model) == ops


def test_a_size_is_computed_once() -> None:
    body = "  input %x : f32[batch, seq]\n"
    for index in range(3):
        body += f"  %a{index} = aten.arange.start() {{start = {index}, end = 2 * seq + {index}}}\n"
        body += f"  %z{index} = aten.zeros() {{size = [seq, batch, {index + 1}]}}\n"
    model = check(f"{body}  return %a0, %a1, %a2, %z0, %z1, %z2")
    assert op_types(model).count("Shape") == 2
    assert op_types(model).count("Mul") == 1


@pytest.fixture(scope="module")  # the op table keeps what it has read of an op
def custom_op() -> Iterator[str]:
    library = torch.library.Library("attngraph_lowering_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    library.impl("twice", lambda x: x * 2, "Meta")
    yield "attngraph_lowering_test.twice"
    registry._LOWERINGS.pop("attngraph_lowering_test.twice", None)
    library._destroy()


def test_an_op_without_a_lowering_names_its_line_and_the_way_out(custom_op: str) -> None:
    body = f'  input %x : f32[seq]\n  %y = {custom_op}(%x) : f32[seq] @ "net.py":7 "block.2"\n'
    with pytest.raises(LoweringError) as caught:
        lower(graph_of(f"{body}  return %y"))
    for part in (custom_op, "net.py:7", "block.2", "register_lowering"):
        assert part in str(caught.value)


def test_a_user_can_register_a_lowering(custom_op: str) -> None:
    @register_lowering(custom_op)
    def lower_twice(ctx: LoweringContext, node: Node) -> ir.Value:
        x = ctx.args(node)["x"]
        return ctx.op("Add", x, x)

    model = check(f"  input %x : f32[seq]\n  %y = {custom_op}(%x) : f32[seq]\n  return %y")
    assert op_types(model) == ["Add"]


def test_training_mode_is_refused() -> None:
    body = "  input %x : f32[seq]\n  %y = aten.dropout(%x) {p = 0.5, train = true}\n  return %y"
    with pytest.raises(LoweringError, match=r"training=self\.training.*eval"):
        lower(graph_of(body))
