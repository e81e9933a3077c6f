"""Attention over a static cache: what the reference gives, and the new tokens behind the old."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy
import onnxruntime
import pytest
import torch

from attngraph.errors import UsageError
from attngraph.export.lowering.emission.buffers import Buffers, part_joined, require_in_place
from attngraph.export.lowering.lower import lower
from attngraph.export.target import Target
from attngraph.ir import Graph, interpret
from tests.export.lowered import assert_same, graph_of, op_types, random_inputs, session_of
from tests.export.lowering.test_cache import SIZES, cached

CPU = Target("cpu")
GROUPED, GENERAL = "GroupQueryAttention", "TensorScatter"


def buffers_of(graph: Graph) -> Buffers:
    """The last two outputs are the presents."""
    keys, values = graph.output_names[-2:]
    axes = {
        v.name: [str(d) for d in v.shape].index("keys") for v in graph.inputs if v.name[0] == "p"
    }
    rows = {value.name: 0 for value in graph.inputs if len(value.shape) > 1}
    return Buffers({"pk": keys, "pv": values}, "keys", "q", axes, rows, length="past_length")


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("mask", ["none", "padding", "per-query", "bias"])
def test_causal_sites_are_grouped_query_attention(mask: str, groups: int) -> None:
    _agrees(cached(mask, groups=groups), GROUPED, batched=mask != "bias")


@pytest.mark.parametrize("rows", ["zero", "nan"])
def test_rows_without_keys(rows: str) -> None:
    _agrees(cached("padding", groups=2, rows=rows), GROUPED)


@pytest.mark.parametrize(
    "body",
    [
        cached("padding", causal=False),
        cached("per-query", groups=2, rows="mean"),
        cached("padding", weights=True),
        cached("padding", groups=2, rows="mean", causal=False),
    ],
)
def test_other_sites_scatter_and_attend_to_a_slice(body: str) -> None:
    _agrees(body, GENERAL)


@pytest.mark.parametrize("body", [cached("padding", groups=2), cached("padding", causal=False)])
def test_a_bound_buffer_is_written_where_it_lies(body: str) -> None:
    graph = graph_of(body)
    buffers = buffers_of(graph)
    session = session_of(lower(graph, buffers=buffers))
    feeds = dict(zip([v.name for v in graph.inputs], random_inputs(graph, SIZES[1]), strict=True))
    past, room = SIZES[1]["keys"], 4
    grown = interpret(graph, tuple(feeds.values()))
    binding = session.io_binding()
    held = {}
    for name, tensor in feeds.items():
        if name in buffers.presents:
            tensor = torch.nn.functional.pad(tensor, (0, 0, 0, room), value=7.0)
        value = onnxruntime.OrtValue.ortvalue_from_numpy(tensor.numpy())
        binding.bind_ortvalue_input(name, value)
        if name in buffers.presents:
            held[name] = value
            binding.bind_ortvalue_output(buffers.presents[name], value)
    length = onnxruntime.OrtValue.ortvalue_from_numpy(numpy.array([past]))
    binding.bind_ortvalue_input(buffers.length, length)
    binding.bind_output(graph.output_names[0])
    session.run_with_iobinding(binding)
    assert_same(torch.from_numpy(binding.get_outputs()[-1].numpy()), grown[0])
    for value, wanted in zip(held.values(), grown[1:], strict=True):
        found = torch.from_numpy(value.numpy())
        assert torch.equal(found[:, :, : past + 1], wanted)
        assert bool((found[:, :, past + 1 :] == 7.0).all())


JOINED = """
  input %q : f32[batch, seq, 32]
  input %k : f32[batch, seq, 4, 8]
  input %v : f32[batch, 4, 8, seq]
  input %pk : f32[batch, keys, 4, 8]
  input %pv : f32[batch, 4, 8, keys]
  %keys = aten.cat(%pk, %k) {dim = 1} : f32[batch, keys + seq, 4, 8]
  %values = aten.cat(%pv, %v) {dim = -1} : f32[batch, 4, 8, keys + seq]
  %kp = aten.reshape(%keys) {shape = [batch, keys + seq, 32]} : f32[batch, keys + seq, 32]
  %vt = aten.permute(%values) {dims = [0, 3, 1, 2]} : f32[batch, keys + seq, 4, 8]
  %vp = aten.reshape(%vt) {shape = [batch, keys + seq, 32]} : f32[batch, keys + seq, 32]
  %y = attn.attention(%q, %kp, %vp) {heads = 4, kv_heads = 4, scale = 0.3} : f32[batch, seq, 32]
  return %y, %keys, %values
"""


def test_a_past_of_any_layout_that_is_joined_outside_of_the_op_is_a_buffer() -> None:
    _agrees(JOINED, GENERAL)


def test_a_past_whose_rows_are_not_the_batch_has_no_place() -> None:
    body = JOINED.replace("[batch, keys, 4, 8]", "[4, keys, batch, 8]")
    body = body.replace("%k : f32[batch, seq, 4, 8]", "%k : f32[4, seq, batch, 8]")
    body = body.replace(
        "f32[batch, keys + seq, 4, 8]\n  %val", "f32[4, keys + seq, batch, 8]\n  %val"
    )
    graph = graph_of(body)
    with pytest.raises(UsageError, match=r"pk is not just the past .* growing cache"):
        require_in_place(graph, buffers_of(graph), "the test")


def test_a_past_that_something_else_reads_has_no_place() -> None:
    body = cached("none")
    shared = body.replace(
        "return", "%more = aten.neg(%pk) : f32[batch, 4, keys, 8]\n  return %more,"
    )
    graph = graph_of(shared)
    with pytest.raises(UsageError, match=r"pk is not just the past .* growing cache"):
        require_in_place(graph, buffers_of(graph), "the test")
    graph = graph_of(body)
    require_in_place(graph, buffers_of(graph), "the test")
    keys, values = graph.output_names[-2:]
    swapped = Buffers({"pk": values, "pv": keys}, "keys", "q", {"pk": 2, "pv": 2}, {})
    with pytest.raises(UsageError, match="no one place to write to"):
        require_in_place(graph, swapped, "the test")


@pytest.mark.parametrize("body", [cached("padding", groups=2), cached("none"), JOINED])
@pytest.mark.parametrize("opset", [21, 23])
def test_before_there_was_an_operator_for_it_places_are_written_by_index(
    body: str, opset: int
) -> None:
    _agrees(body, "ScatterElements", target=Target("cpu", opset=opset, portable=True))


def _agrees(body: str, op: str, *, batched: bool = True, target: Target = CPU) -> None:
    graph = graph_of(body)
    buffers = buffers_of(graph)
    require_in_place(graph, buffers, "the test")
    part_joined(graph, buffers)
    model = lower(graph, buffers=buffers, target=target)
    assert op in op_types(model)
    session = session_of(model)
    names = [value.name for value in graph.inputs]

    def run(feeds: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor]:
        given = {name: tensor.numpy() for name, tensor in feeds.items()}
        return [torch.from_numpy(array) for array in session.run(None, given)]

    for size in SIZES:
        chosen = size if batched else {**size, "batch": 1}
        inputs = random_inputs(graph, chosen)
        if len(inputs) > 5 and not inputs[5].dtype.is_floating_point:
            inputs[5][0] = False
        found = buffers.evaluate(run, dict(zip(names, inputs, strict=True)), graph.output_names)
        for tensor, wanted in zip(found, interpret(graph, inputs), strict=True):
            assert_same(tensor, wanted, str(chosen))
