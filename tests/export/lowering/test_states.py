"""Short convolutions run on the operator that is fastest for their number of places."""

from __future__ import annotations

import pytest

from attngraph.errors import LoweringError
from attngraph.export.lowering.lower import lower
from tests.export.lowered import check, graph_of, op_types

_SIZES = [{"batch": 2, "seq": seq, "keys": 1} for seq in (1, 2, 8, 9, 20)]


def _conv(length: str, past: bool, attrs: str = "") -> list[str]:
    operands = ", none, %s" if past else ""
    state = "\n  input %s : f32[batch, 8, 3]" if past else ""
    model = check(
        f"""
  input %x : f32[batch, 8, {length}]
  input %w : f32[8, 1, 4]{state}
  %y, %next = attn.causal_conv(%x, %w{operands}) {{activation = "silu"{attrs}}}
  return %y, %next""",
        sizes=_SIZES,
    )
    return op_types(model)


def test_few_places_are_one_operator() -> None:
    assert _conv("1", True) == ["CausalConvWithState"]
    assert _conv("8", False) == ["CausalConvWithState"]


def test_many_places_are_a_convolution_with_zeros_before_it() -> None:
    found = _conv("9", False)
    assert "CausalConvWithState" not in found
    assert "Conv" in found


@pytest.mark.parametrize("past", [False, True])
def test_a_dynamic_number_of_places(past: bool) -> None:
    """Without a state it is a prompt; with one it may be a step, and a run decides."""
    assert ("If" in _conv("seq", past)) == past


@pytest.mark.parametrize(
    ("operands", "rule"),
    [
        ("", "linear"),
        (", %s, %g", "gated"),
        (", none, none, %b", "delta"),
        (", %s, %g, %b", "gated_delta"),
    ],
)
def test_linear_attention_of_any_length(operands: str, rule: str) -> None:
    model = check(f"""
  input %q : f32[batch, seq, 8]
  input %k : f32[batch, seq, 8]
  input %v : f32[batch, seq, 12]
  input %s : f32[batch, 2, 4, 6]
  input %x : f32[batch, seq, 2]
  %g = aten.log_sigmoid(%x)
  %b = aten.sigmoid(%x)
  %y, %next = attn.linear_attention(%q, %k, %v{operands}) {{heads = 2, kv_heads = 2, scale = 0.5}}
  return %y, %next, %g, %b, %s""")
    (node,) = [node for node in model.graph if node.op_type == "LinearAttention"]
    assert node.attributes["update_rule"].as_string() == rule


def test_linear_attention_without_a_kernel_says_so() -> None:
    graph = graph_of("""
  input %q : f64[batch, seq, 8]
  %y, %next = attn.linear_attention(%q, %q, %q) {heads = 2, kv_heads = 2, scale = 0.5}
  return %y""")
    with pytest.raises(LoweringError, match="not in f64 on cpu"):
        lower(graph)


@pytest.mark.parametrize("queries", [1, 4, 64])
@pytest.mark.parametrize("decays", ["none", "each", "head"])
@pytest.mark.parametrize("past", ["none", "%s"])
def test_many_channels_with_a_state_each_are_a_scan(queries: int, decays: str, past: str) -> None:
    """The operator goes through them one by one, and takes about twice as long."""
    width = {"none": 64, "each": 64 * 16, "head": 64}[decays]
    operands = f"{past}, {'none' if decays == 'none' else '%g'}"
    attrs = f"{{heads = {queries}, kv_heads = 64, scale = 0.5}}"
    model = check(f"""
  input %q : f32[batch, seq, {queries * 16}]
  input %k : f32[batch, seq, 1024]
  input %v : f32[batch, seq, 64]
  input %s : f32[batch, 64, 16, 1]
  input %x : f32[batch, seq, {width}]
  %g = aten.log_sigmoid(%x)
  %y, %next = attn.linear_attention(%q, %k, %v, {operands}) {attrs}
  return %y, %next, %g, %s""")
    assert "Scan" in op_types(model)
    assert "LinearAttention" not in op_types(model)


@pytest.mark.parametrize(("gate", "is_kept"), [("sigmoid", False), ("tanh", True)])
def test_a_decay_whose_logarithm_is_given_is_taken_as_it_is(gate: str, is_kept: bool) -> None:
    """But where it may be below 0, of which the logarithm is NaN."""
    model = check(f"""
  input %q : f32[batch, seq, 16]
  input %k : f32[batch, seq, 1024]
  input %v : f32[batch, seq, 64]
  input %x : f32[batch, seq, 1024]
  %a = aten.{gate}(%x)
  %g = aten.log(%a)
  %y, %next = attn.linear_attention(%q, %k, %v, none, %g) {{heads = 1, kv_heads = 64, scale = 1.0}}
  return %y""")
    assert ("Log" in op_types(model)) == is_kept


@pytest.mark.parametrize(
    ("keys", "features", "rate"), [(4, 1, "none"), (16, 2, "none"), (16, 1, "%b")]
)
def test_few_or_wide_channels_are_the_operators(keys: int, features: int, rate: str) -> None:
    attrs = "{heads = 1, kv_heads = 64, scale = 1.0}"
    model = check(f"""
  input %q : f32[batch, seq, {keys}]
  input %x : f32[batch, seq, {keys * 64}]
  input %v : f32[batch, seq, {features * 64}]
  input %c : f32[batch, seq, 64]
  %b = aten.sigmoid(%c)
  %k = aten.mul.Scalar(%x) {{other = 0.1}}
  %y, %next = attn.linear_attention(%q, %k, %v, none, none, {rate}) {attrs}
  return %y, %b""")
    assert "LinearAttention" in op_types(model)
    assert "Scan" not in op_types(model)


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("length", ["1", "16", "40", "seq"])
@pytest.mark.parametrize("heads", ["heads = 2, kv_heads = 2", "heads = 4, kv_heads = 2"])
def test_values_are_filled_up_to_what_the_kernel_takes_at_a_time(
    heads: str, length: str, past: bool
) -> None:
    """Of few tokens, for which that takes longer, they aren't."""
    width = 8 if "heads = 2," in heads else 16
    operands = f"{'%s' if past else 'none'}, %g, %b"
    model = check(
        f"""
  input %q : f32[batch, {length}, {width}]
  input %k : f32[batch, {length}, 8]
  input %v : f32[batch, {length}, 48]
  input %s : f32[batch, 2, 4, 24]
  input %x : f32[batch, {length}, 2]
  %b = aten.sigmoid(%x)
  %g = aten.log_sigmoid(%x)
  %y, %z = attn.linear_attention(%q, %k, %v, {operands}) {{{heads}, scale = 0.5}}
  return %y, %z, %s""",
        sizes=[{"batch": 2, "seq": seq, "keys": 1} for seq in (1, 16, 17, 40)],
    )
    found = op_types(model)
    assert ("Pad" in found) == (length == "40")
    assert ("If" in found) == (length == "seq")


def test_what_the_kernel_takes_at_once_stays_one_operator() -> None:
    model = check("""
  input %q : f32[batch, seq, 8]
  input %v : f32[batch, seq, 64]
  %y, %z = attn.linear_attention(%q, %q, %v) {heads = 2, kv_heads = 2, scale = 0.5}
  return %y, %z""")
    assert op_types(model) == ["LinearAttention"]
