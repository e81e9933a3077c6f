"""A rewrite that is broken on purpose, one or more for each pass, is caught and taken back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from attngraph.errors import IRError
from attngraph.ir import Builder, Graph, format_graph, verify
from attngraph.passes import run
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.weights import merge_projections
from attngraph.reports.report import defects_of
from tests.passes.fixtures import load

Change = Callable[[list[Any], dict[str, Any]], None]

SPELLED = """
  input %x : f32[batch, seq, seq]
  %e = aten.exp(%x)
  %s = aten.sum.dim_IntList(%e) {dim = [-1], keepdim = true}
  %y = aten.div.Tensor(%e, %s)
  return %y"""
SINK = """
  input %x : f32[batch, 2, seq, seq]
  input %sink : f32[batch, 2, seq, 1]
  %c = aten.cat(%x, %sink) {dim = -1}
  %p = aten.softmax.int(%c) {dim = -1}
  %y = aten.slice.Tensor(%p) {dim = -1, start = 0, end = seq}
  return %y"""
DIFFERENCE = """
  input %x : f32[batch, seq, seq]
  input %z : f32[batch, seq, seq]
  input %v : f32[batch, seq, 8]
  %p = aten.softmax.int(%x) {dim = -1}
  %q = aten.softmax.int(%z) {dim = -1}
  %d = aten.sub.Tensor(%p, %q)
  %y = aten.matmul(%d, %v)
  return %y"""
CONV1D = """
  input %x : f32[batch, 8]
  parameter %w : f32[8, 8]
  parameter %b : f32[8]
  %y = aten.addmm(%b, %x, %w)
  return %y"""
ROWS = """
  input %x : f32[batch, 4, 4, 8]
  parameter %w : f32[6, 8]
  %p = aten.permute(%x) {dims = [0, 2, 1, 3]}
  %y = aten.linear(%p, %w)
  return %y"""
CHAIN = """
  input %x : f32[batch, 4, 4, 4]
  %a = aten.permute(%x) {dims = [0, 2, 1, 3]}
  %b = aten.permute(%a) {dims = [0, 3, 1, 2]}
  %y = aten.neg(%b)
  return %y"""
SIBLINGS = """
  input %x : f32[batch, seq, 8]
  parameter %one : f32[8, 8]
  parameter %one.bias : f32[8]
  parameter %two : f32[8, 8]
  %a = aten.linear(%x, %one, %one.bias)
  %g = aten.silu(%a)
  %b = aten.linear(%x, %two)
  %y = aten.mul.Tensor(%g, %b)
  return %y"""
PACKED = """
  input %x : f32[batch, seq, 8]
  parameter %both : f32[16, 8]
  parameter %both.bias : f32[16]
  %y = aten.linear(%x, %both, %both.bias)
  %a, %b = aten.split_with_sizes(%y) {split_sizes = [8, 8], dim = 2}
  %z = aten.mul.Tensor(%a, %b)
  return %z"""
RMS = """
  input %x : f32[batch, seq, 8]
  %a = aten.pow.Tensor_Scalar(%x) {exponent = 2}
  %b = aten.mean.dim(%a) {dim = [-1], keepdim = true}
  %c = aten.add.Scalar(%b) {other = 1e-06}
  %d = aten.rsqrt(%c)
  %y = aten.mul.Tensor(%x, %d)
  return %y"""
RESIDUAL = """
  input %x : f32[batch, seq, 8]
  input %skip : f32[batch, seq, 8]
  parameter %w : f32[8, 8]
  parameter %b : f32[8]
  parameter %scale : f32[8]
  parameter %shift : f32[8]
  %l = aten.linear(%x, %w, %b)
  %t = aten.add.Tensor(%l, %skip)
  %y = aten.layer_norm(%t, %scale, %shift) {normalized_shape = [8], eps = 1e-05}
  return %y, %t"""
GELU = """
  input %x : f32[batch, seq, 8]
  %a = aten.mul.Scalar(%x) {other = 0.7071067811865476}
  %b = aten.erf(%a)
  %c = aten.add.Scalar(%b) {other = 1.0}
  %d = aten.mul.Tensor(%x, %c)
  %y = aten.mul.Scalar(%d) {other = 0.5}
  return %y"""
QUICK = """
  input %x : f32[batch, seq, 8]
  %a = aten.mul.Scalar(%x) {other = 1.702}
  %b = aten.sigmoid(%a)
  %y = aten.mul.Tensor(%x, %b)
  return %y"""
BIAS_GELU = """
  input %x : f32[batch, seq, 8]
  parameter %w : f32[8, 8]
  parameter %b : f32[8]
  %a = aten.linear(%x, %w, %b)
  %y = aten.gelu(%a)
  return %y"""
ROTARY = """
  input %x : f32[batch, seq, 8]
  input %angle : f32[seq, 4]
  %p = aten.reshape(%x) {shape = [batch, seq, 4, 2]}
  %z = aten.view_as_complex(%p)
  %one = aten.ones_like(%angle)
  %r = aten.polar(%one, %angle)
  %t = aten.mul.Tensor(%z, %r)
  %y = aten.view_as_real(%t)
  return %y"""

CACHED = """
  input %q : f32[batch, seq, 8]
  input %k : f32[batch, 1, seq, 8]
  input %v : f32[batch, 1, seq, 8]
  input %pk : f32[batch, 1, 3, 8]
  input %pv : f32[batch, 1, 3, 8]
  %keys = aten.cat(%pk, %k) {dim = 2}
  %values = aten.cat(%pv, %v) {dim = 2}
  %kp = aten.reshape(%keys) {shape = [batch, seq + 3, 8]}
  %vp = aten.reshape(%values) {shape = [batch, seq + 3, 8]}
  %y = attn.attention(%q, %kp, %vp) {heads = 1, kv_heads = 1, scale = 0.5}
  return %y, %keys, %values"""
HEADS = """
  input %x : f32[batch, seq, 8]
  parameter %q0 : f32[4, 8]
  parameter %q1 : f32[4, 8]
  %a = aten.linear(%x, %q0)
  %b = aten.linear(%x, %q1)
  %h0 = attn.attention(%a, %a, %a) {heads = 1, kv_heads = 1, scale = 0.5}
  %h1 = attn.attention(%b, %b, %b) {heads = 1, kv_heads = 1, scale = 0.5}
  %y = aten.cat(%h0, %h1) {dim = -1}
  return %y"""
LAYER_SCALE = """
  input %x : f32[batch, seq, 8]
  parameter %w : f32[6, 8]
  parameter %b : f32[6]
  parameter %gamma : f32[6]
  %l = aten.linear(%x, %w, %b)
  %y = aten.mul.Tensor(%l, %gamma)
  return %y"""
INPUT_SCALE = """
  input %x : f32[batch, seq, 8]
  parameter %gamma : f32[8]
  parameter %w : f32[6, 8]
  parameter %b : f32[6]
  %s = aten.mul.Tensor(%x, %gamma)
  %y = aten.linear(%s, %w, %b)
  return %y"""
NORM = """
  input %x : f32[batch, seq, 8]
  parameter %gamma : f32[8]
  parameter %beta : f32[8]
  parameter %w : f32[6, 8]
  parameter %b : f32[6]
  %n = aten.layer_norm(%x, %gamma, %beta) {normalized_shape = [8], eps = 1e-05}
  %y = aten.linear(%n, %w, %b)
  return %y"""
COMPOSED = """
  input %x : f32[batch, seq, 8]
  parameter %one : f32[8, 8]
  parameter %two : f32[8, 8]
  parameter %b : f32[8]
  %l = aten.linear(%x, %one)
  %y = aten.linear(%l, %two, %b)
  return %y"""
KEY_BIAS = """
  input %x : f32[batch, seq, 8]
  input %q : f32[batch, seq, 8]
  parameter %k : f32[8, 8]
  parameter %b : f32[8]
  %l = aten.linear(%x, %k, %b)
  %y = attn.attention(%q, %l, %q) {heads = 2, kv_heads = 2, scale = 0.5, causal = true}
  return %y"""
RECURRENCE = """
  input %x : f32[batch, 3, 2]
  input %h : f32[batch, 4]
  parameter %w : f32[4, 6]
  %x0, %x1, %x2 = aten.unbind.int(%x) {dim = 1}
  %c0 = aten.cat(%x0, %h) {dim = 1}
  %l0 = aten.linear(%c0, %w)
  %h0 = aten.tanh(%l0)
  %c1 = aten.cat(%x1, %h0) {dim = 1}
  %l1 = aten.linear(%c1, %w)
  %h1 = aten.tanh(%l1)
  %c2 = aten.cat(%x2, %h1) {dim = 1}
  %l2 = aten.linear(%c2, %w)
  %h2 = aten.tanh(%l2)
  %y = aten.stack(%h0, %h1, %h2) {dim = 1}
  return %y"""


def graph_of(body: str) -> Graph:
    return load(f"graph @main {{\n  dim batch = 3 in 1..\n  dim seq = 5 in 1..64{body}\n}}\n")


def _set(**changed: Any) -> Change:
    return lambda inputs, attrs: attrs.update(changed)


def _swap(first: int, second: int) -> Change:
    def change(inputs: list[Any], attrs: dict[str, Any]) -> None:
        inputs[first], inputs[second] = inputs[second], inputs[first]

    return change


def _keep(count: int) -> Change:
    def change(inputs: list[Any], attrs: dict[str, Any]) -> None:
        del inputs[count:]

    return change


BREAKS: dict[str, tuple[str, str, str, Change]] = {
    "softmax over the wrong axis": ("raise-softmax", SPELLED, "aten.softmax.int", _set(dim=-2)),
    "sink along the wrong axis": ("raise-softmax", SINK, "attn.sink_softmax", _set(dim=2)),
    "difference scaled": ("distribute", DIFFERENCE, "aten.sub.Tensor", _set(alpha=2)),
    "difference swapped": ("distribute", DIFFERENCE, "aten.sub.Tensor", _swap(0, 1)),
    "bias dropped": ("linearize", CONV1D, "aten.linear", _keep(2)),
    "weight not transposed": ("linearize", CONV1D, "aten.permute", _set(dims=[0, 1])),
    "rows permuted wrongly": ("defer-layout", ROWS, "aten.permute", _set(dims=[0, 1, 2, 3])),
    "layout composed wrongly": ("simplify-layout", CHAIN, "aten.permute", _set(dims=[0, 1, 3, 2])),
    "split along the wrong axis": (
        "merge-projections",
        SIBLINGS,
        "aten.split_with_sizes",
        _set(dim=1),
    ),
    "bias of a part dropped": ("split-projections", PACKED, "aten.linear", _keep(2)),
    "epsilon a tenth": ("fuse-norms", RMS, "attn.rms_norm", _set(eps=1e-7)),
    "epsilon of layer norm": ("fuse-norms", RESIDUAL, "attn.skip_layer_norm", _set(eps=1e-6)),
    "bias of the residual dropped": ("fuse-norms", RESIDUAL, "attn.skip_layer_norm", _keep(4)),
    "scale and shift swapped": ("fuse-norms", RESIDUAL, "attn.skip_layer_norm", _swap(2, 3)),
    "other approximation": ("fuse-activations", GELU, "aten.gelu", _set(approximate="tanh")),
    "gate of another slope": ("fuse-activations", QUICK, "attn.quick_gelu", _set(alpha=1.7)),
    "bias of GELU added twice": (
        "fuse-activations",
        BIAS_GELU,
        "aten.linear",
        lambda inputs, attrs: inputs.append(inputs[0].users[0].inputs[2]),
    ),
    "heads in turn": ("merge-heads", HEADS, "aten.cat", lambda inputs, attrs: inputs.reverse()),
    "heads of another scale": ("merge-heads", HEADS, "attn.attention", _set(scale=0.25)),
    "bias not scaled": ("fold-scales", LAYER_SCALE, "aten.linear", _keep(2)),
    "bias lost behind a scale": ("fold-input-scales", INPUT_SCALE, "aten.linear", _keep(2)),
    "epsilon of a bare norm": ("fold-norms", NORM, "aten.layer_norm", _set(eps=1e-6)),
    "shift of a norm dropped": ("fold-norms", NORM, "aten.linear", _keep(2)),
    "bias of the second linear dropped": ("compose-linears", COMPOSED, "aten.linear", _keep(2)),
    "keys not causal": ("drop-key-bias", KEY_BIAS, "attn.attention", _set(causal=False)),
    "another activation": ("raise-recurrence", RECURRENCE, "attn.recurrent", _set(cell="rnn_relu")),
    "steps in turn": ("raise-recurrence", RECURRENCE, "aten.permute", _set(dims=[0, 1, 2])),
    "pasts swapped": ("fuse-cache", CACHED, "attn.attention", _swap(6, 7)),
    "cache read causally": ("fuse-cache", CACHED, "attn.attention", _set(causal=True)),
    "product not conjugated": ("split-complex", ROTARY, "aten.sub.Tensor", _set(alpha=-1)),
    "sine and cosine in turn": ("split-complex", ROTARY, "aten.stack", _swap(0, 1)),
}


def _tamper(monkeypatch: pytest.MonkeyPatch, op: str, change: Change) -> list[str]:
    """Every node of this op that is made from now on is another one. Returns what was changed."""
    create, changed = Graph.create, []

    def broken(graph: Graph, name: str, inputs: Any, attrs: Any = None, **rest: Any) -> Any:
        inputs, attrs = list(inputs), dict(attrs or {})
        if name == op and rest.get("names") is None:  # a clone names its values
            change(inputs, attrs)
            changed.append(name)
        return create(graph, name, inputs, attrs, **rest)

    monkeypatch.setattr(Graph, "create", broken)
    return changed


@pytest.mark.defect
@pytest.mark.parametrize("name", list(BREAKS))
def test_a_broken_rewrite_is_taken_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    item, body, op, change = BREAKS[name]
    graph = graph_of(body)
    before = format_graph(graph)
    changed = _tamper(monkeypatch, op, change)
    (result,) = run(graph, item)
    monkeypatch.undo()
    verify(graph)
    assert changed
    assert format_graph(graph) == before
    (remark,) = result.remarks
    assert (remark.status, remark.code) == ("note", "unequal")
    assert f"defect of {item}" in remark.hint
    assert remark.blamed.startswith(("aten.", "attn."))
    assert len(defects_of([result])) == 1


@pytest.mark.parametrize("name", list(BREAKS))
def test_the_rewrite_itself_is_made(name: str) -> None:
    item, body, op, _ = BREAKS[name]
    graph = graph_of(body)
    (result,) = run(graph, item)
    verify(graph)
    assert op in {node.op for node in graph}
    assert result.changed
    assert not defects_of([result])


@pytest.mark.defect
@pytest.mark.parametrize("stop", [IRError, KeyError])
def test_a_pass_that_stops_is_left_out_and_the_others_run(
    stop: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, alone = graph_of(GELU), graph_of(GELU)
    create = Graph.create

    def stopping(self: Graph, op: str, *args: Any, **rest: Any) -> Any:
        node = create(self, op, *args, **rest)
        if op == "aten.gelu" and rest.get("names") is None:
            raise stop("the second half is missing")
        return node

    names = "canonicalize,fuse-activations,cse,dce"
    monkeypatch.setattr(Graph, "create", stopping)
    results = run(graph, names)
    monkeypatch.undo()
    verify(graph)
    run(alone, "canonicalize,cse,dce")
    assert format_graph(graph) == format_graph(alone)
    (said,) = defects_of(results)
    assert "fuse-activations stopped" in said
    assert "the second half is missing" in said


def _reversed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    stacked = merge_projections.stacked
    monkeypatch.setattr(
        merge_projections, "stacked", lambda c, weights, rows: stacked(c, weights[::-1], rows[::-1])
    )


def _no_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    stacked = merge_projections.stacked

    def weights_alone(checked: Checked, constants: Any, rows: Any) -> Any:
        are_biases = any(value is None or len(value.shape) == 1 for value in constants)
        return None if are_biases else stacked(checked, constants, rows)

    monkeypatch.setattr(merge_projections, "stacked", weights_alone)


@pytest.mark.defect
@pytest.mark.parametrize("plant", [_reversed_weights, _no_bias])
def test_weights_merged_wrongly_are_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = graph_of(SIBLINGS)
    before = format_graph(graph)
    plant(monkeypatch)
    (result,) = run(graph, "merge-projections")
    assert [remark.code for remark in result.remarks] == ["unequal"]
    assert format_graph(graph) == before
    assert all(value.data is not None for value in graph.constants.values())


def test_defects_fail_tests() -> None:
    graph = graph_of(GELU)
    (last,) = [node for node in graph if node.output.name == "y"]
    checked = Checked(graph, "some-pass")
    twice = Builder(graph)("aten.mul.Scalar", last.inputs[0], other=2.0)
    with pytest.raises(AssertionError, match="some-pass made something else of %y"):
        checked.replace([(last.output, twice)])
