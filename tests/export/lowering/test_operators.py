"""A file holds the operators that it was asked to hold: those of an opset, or standard ones only.

What a portable file computes is also what onnx's own evaluator does, which has none of
onnxruntime's operators and computes by the standard.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from attngraph.errors import LoweringError
from attngraph.export.lowering.emission import registry
from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.export.lowering.lower import lower
from attngraph.export.lowering.operators import with_branches
from attngraph.export.target import OLDEST_OPSET, OPSET, SINCE, Target
from attngraph.ir import Graph, Node, interpret
from tests.export.lowered import SIZES, assert_same, graph_of, random_inputs, run, session_of
from tests.export.lowering.test_attention import MASKS, SDPA, attentions, hostile

OPSETS = range(OLDEST_OPSET, OPSET + 1)
X = "  input %x : TYPE[batch, seq, 16]\n  input %w : TYPE[16]\n"
PLAIN = {
    "norms": f"""{X}  %a = attn.rms_norm(%x, %w) {{eps = 1e-05}}
  %b, %c = attn.skip_rms_norm(%x, %a, %w) {{eps = 1e-05}}
  %d, %e = attn.skip_layer_norm(%x, %b, %w, %w, %w) {{eps = 1e-05}}
  %f = aten.rms_norm(%d, %w) {{normalized_shape = [16]}} : TYPE[batch, seq, 16]
  return %a, %b, %c, %d, %e, %f""",
    "activations": f"""{X}  %a = attn.bias_gelu(%x, %w)
  %b = attn.quick_gelu(%x) {{alpha = 1.5}}
  return %a, %b""",
    "rotary": f"""{X}  input %c : TYPE[batch, seq, 3]
  input %s : TYPE[batch, seq, 3]
  %a = attn.rotary(%x, %c, %s) {{heads = 2}}
  %b = attn.rotary(%x, %s, %c) {{heads = 2, interleaved = true}}
  %c2 = aten.add.Tensor(%a, %w) : TYPE[batch, seq, 16]
  return %b, %c2""",
    "convolution": """
  input %x : TYPE[batch, 8, 4]
  input %w : TYPE[8, 1, 4]
  input %s : TYPE[batch, 8, 3]
  %y, %next = attn.causal_conv(%x, %w, none, %s) {activation = "silu"}
  return %y, %next""",
}
PAIRS = [(mask, bias) for mask in MASKS for bias in ("none", "full")]
ATTRS = "heads = 4, kv_heads = 2, scale = 0.5"
OUT = "f32[batch, keys, 16]"
BOUNDED = f"""
  input %q : f32[batch, keys, 16]
  input %k : f32[batch, keys, 8]
  input %v : f32[batch, keys, 8]
  input %n : i64[batch]
  input %s : f32[4]
  %a = attn.attention(%q, %k, %v, none, none, none, none, none, %n) {{{ATTRS}, softcap = 3}} : {OUT}
  %b = attn.attention(%q, %k, %v, none, none, %s) {{{ATTRS}, causal = true, window = 2}} : {OUT}
  return %a, %b
"""


def _operators(model: ir.Model) -> set[str]:
    return {node.domain for node in with_branches(model.graph)}


def _checked(graph: Graph, inputs: Sequence[Sequence[torch.Tensor]], target: Target) -> ir.Model:
    """The lowered graph, after onnxruntime gave what the graph does, and onnx's evaluator where it
    has all operators."""
    model = lower(graph, target=target)
    assert model.graph.opset_imports[""] == target.opset
    session = session_of(model)
    by_standard = ReferenceEvaluator(ir.to_proto(model)) if target.portable else None
    for given in inputs:
        expected = interpret(graph, given)
        for actual, wanted in zip(run(session, given), expected, strict=True):
            assert_same(actual, wanted)
        if by_standard is None:
            continue
        feeds = {v.name: t.numpy() for v, t in zip(graph.inputs, given, strict=True)}
        with numpy.errstate(invalid="ignore"):  # rows without keys, before they are repaired
            outputs = by_standard.run(None, feeds)
        for found, wanted in zip(outputs, expected, strict=True):
            assert_same(torch.from_numpy(found), wanted, "onnx")
    return model


TARGETS = [
    *(Target("cpu", opset=opset, portable=True) for opset in OPSETS),
    Target("cpu", opset=OLDEST_OPSET),
]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.operators)
@pytest.mark.parametrize("name", PLAIN)
def test_an_op_in_the_operators_that_there_may_be(name: str, target: Target) -> None:
    graph = graph_of(PLAIN[name].replace("TYPE", "f32"))
    inputs = [random_inputs(graph, size) for size in SIZES]
    model = _checked(graph, inputs, target)
    if target.portable:
        assert _operators(model) == {""}


def test_norms_of_halves_have_their_statistics_in_float32() -> None:
    """Whose squares a half can't hold."""
    graph = graph_of(PLAIN["norms"].replace("TYPE", "f16"))
    given = [tensor * 300 for tensor in random_inputs(graph, SIZES[0])]
    given[1] = given[1] / 300
    session = session_of(lower(graph, target=Target("cpu", opset=21, portable=True)))
    found, wanted = run(session, given)[0], interpret(graph, given)[0]
    torch.testing.assert_close(found, wanted, rtol=2**-9, atol=2**-9)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.operators)
@pytest.mark.parametrize("policy", ["zero", "mean", "nan"])
def test_rows_without_keys(policy: str, target: Target) -> None:
    """A row that a mask hides is what it is in the model, whatever a runtime's kernel gives."""
    pairs = PAIRS if target.portable else [("full", "none")]
    graph = graph_of(attentions(pairs, kv_heads=2, extra=f', masked_rows = "{policy}"'))
    inputs = [
        hostile(tensor) if value.name[0] in "mb" else tensor
        for value, tensor in zip(graph.inputs, random_inputs(graph, SIZES[0]), strict=True)
    ]
    model = _checked(graph, [inputs], target)
    if target.portable:
        assert _operators(model) == {""}


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.operators)
def test_lengths_windows_and_sinks(target: Target) -> None:
    graph = graph_of(BOUNDED)
    inputs = [random_inputs(graph, size) for size in SIZES]
    for given in inputs:
        given[3] = given[3].clamp(min=0, max=2)
    model = _checked(graph, inputs, target)
    if target.portable:
        assert _operators(model) == {""}


@pytest.mark.parametrize("kv", ["batch, 4, ", "batch, 2, ", "batch, 1, "])
@pytest.mark.parametrize("attrs", ["", "is_causal = true"])
def test_an_attention_that_no_pass_took_before_there_was_an_operator(kv: str, attrs: str) -> None:
    grouped = "" if kv == "batch, 1, " else "enable_gqa = true"
    body = SDPA.format(lead="batch, 4, ", lead_kv=kv)
    mask = "" if attrs else ", %m"
    body += "" if attrs else "  input %m : bool[seq, keys]\n"
    written = ", ".join(filter(None, (attrs, grouped)))
    call = f"aten.scaled_dot_product_attention(%q, %k, %v{mask}) {{{written}}}"
    graph = graph_of(f"{body}  %r = {call} : f32[batch, 4, seq, 6]\n  return %r")
    inputs = random_inputs(graph, SIZES[0])
    if mask:
        inputs[3] = hostile(inputs[3])
    model = _checked(graph, [inputs], Target("cpu", opset=21, portable=True))
    assert "Softmax" in [node.op_type for node in model.graph]


def test_what_the_oldest_opset_lacks_is_known() -> None:
    """`SINCE` is what the schemas of onnx say, of each operator that it names; the older ones have
    none of these."""
    for name, since in SINCE.items():
        assert onnx.defs.has(name, since)
        assert not onnx.defs.has(name, since - 1)
    assert min(SINCE.values()) > OLDEST_OPSET


def _lower_to_mine(ctx: LoweringContext, node: Node) -> ir.Value:
    return ctx.op("FastSine", ctx.args(node)["self"], domain="my.ops")


SIN = "  input %x : {0}[batch]\n  %y = aten.sin(%x)\n  return %y"


def test_an_authors_own_operator_is_no_part_of_a_portable_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(registry._LOWERINGS, "aten.sin", _lower_to_mine)
    graph = graph_of(SIN.format("f32"))
    lower(graph)
    with pytest.raises(LoweringError, match=r"my\.ops\.FastSine.*no domain.*--portable") as said:
        lower(graph, target=Target("cpu", portable=True))
    assert str(said.value).count(". ") == 0


def test_a_dtype_that_an_old_opset_lacks_is_named() -> None:
    graph = graph_of(SIN.format("bf16"))
    lower(graph, target=Target("cuda", opset=22))
    with pytest.raises(LoweringError, match=r"Sin.*opset 21.*bfloat16.*leave out --opset"):
        lower(graph, target=Target("cuda", opset=21))


SCATTERS = {
    "index_add": "aten.index_add(%t, %i, %x) {dim = 0}",
    "scatter_add": "aten.scatter_add(%t, %p, %x) {dim = 0}",
    "products": 'aten.scatter_reduce.two(%t, %p, %x) {dim = 0, reduce = "prod"}',
    "index_put": "aten.index_put(%t, %i, %x) {accumulate = true}",
}


@pytest.mark.parametrize("name", SCATTERS)
def test_a_half_is_written_where_another_lies_already(name: str) -> None:
    """The CPU provider adds and multiplies in float32 there: it has no kernel for float16."""
    graph = graph_of(
        "  input %t : f16[6, 4]\n  input %x : f16[6, 4]\n  input %i : i64[6]\n"
        f"  input %p : i64[6, 4]\n  %y = {SCATTERS[name]}\n  return %y"
    )
    index = torch.tensor([0, 1, 1, 3, 5, 5])
    whole = torch.arange(24).reshape(6, 4).half() % 7 - 3
    inputs = (whole, whole.flip(0), index, index[:, None].expand(6, 4).contiguous())
    (expected,) = interpret(graph, inputs)
    (found,) = run(session_of(lower(graph)), inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
