"""Lowered attention means what the reference means, row by row, whatever the mask holds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from attngraph.export.files.save import to_session
from attngraph.export.lowering.lower import lower
from attngraph.export.target import Target
from attngraph.ir import interpret, parse
from tests.export.lowered import (
    SIZES,
    assert_same,
    check,
    graph_of,
    op_types,
    random_inputs,
    run,
    session_of,
)

LOWEST = torch.finfo(torch.float32).min
QKV = """
  input %q : {dtype}[batch, seq, 16]
  input %k : {dtype}[batch, keys, {kv}]
  input %v : {dtype}[batch, keys, {kv}]
"""
MASKS = {
    "none": "",
    "padding": "batch, 1, 1, keys",
    "per-query": "seq, keys",
    "full": "batch, 4, seq, keys",
    "per-key": "keys",
    "per-head": "4, seq, keys",
    "rows": "seq, 1",
}


def attentions(
    pairs: Sequence[tuple[str, str]],
    *,
    dtype: str = "f32",
    kv_heads: int = 4,
    scale: str = "0.5",
    extra: str = "",
    weights: bool = False,
) -> str:
    """One graph with an attention for each (mask, bias) of `MASKS`."""
    body = QKV.format(dtype=dtype, kv=4 * kv_heads)
    for prefix, kind, used in (
        ("m", "bool", {mask for mask, _ in pairs}),
        ("b", dtype, {bias for _, bias in pairs}),
    ):
        for name in sorted(used - {"none"}):
            body += f"  input %{prefix}.{name} : {kind}[{MASKS[name]}]\n"
    flag = ", weights = true" if weights else ""
    attrs = f"heads = 4, kv_heads = {kv_heads}, scale = {scale}{extra}{flag}"
    results = []
    for index, (mask, bias) in enumerate(pairs):
        operands = f"%q, %k, %v, {'none' if bias == 'none' else f'%b.{bias}'}"
        operands += f", {'none' if mask == 'none' else f'%m.{mask}'}"
        made = [f"%r{index}", f"%w{index}"] if weights else [f"%r{index}"]
        types = [f"{dtype}[batch, seq, 16]", f"{dtype}[batch, 4, seq, keys]"][: len(made)]
        body += f"  {', '.join(made)} = attn.attention({operands}) {{{attrs}}}"
        body += f" : {', '.join(types)}\n"
        results += made
    return f"{body}  return {', '.join(results)}"


def hostile(value: torch.Tensor) -> torch.Tensor:
    """Empty rows in a mask; −inf, the lowest float and −1e9 in a bias, in whole rows and alone."""
    value = value.clone()
    rows = value.reshape(-1, value.shape[-1])
    if value.dtype == torch.bool:
        rows[0] = False
        rows[-1, 0] = True
        return value
    lowest = torch.finfo(value.dtype).min
    for row, fill in enumerate((lowest, -torch.inf, max(-1e9, lowest), 0.0)):
        if row < len(rows):
            rows[row] = fill
    rows[:, -1:] = torch.where(rows[:, -1:] > 0.5, lowest, rows[:, -1:])
    rows[:, :1] = torch.where(rows[:, :1] < -0.5, -torch.inf, rows[:, :1])
    return value


def check_hostile(body: str) -> None:
    graph = graph_of(body)
    session = session_of(lower(graph))
    for number, size in enumerate(SIZES):
        inputs = [
            hostile(tensor) if value.name[0] in "mb" else tensor
            for value, tensor in zip(graph.inputs, random_inputs(graph, size, number), strict=True)
        ]
        names = [argument.name for argument in session.get_inputs()]
        assert names == [value.name for value in graph.inputs]
        expected = interpret(graph, inputs)
        for actual, wanted in zip(run(session, inputs), expected, strict=True):
            assert_same(actual, wanted, str(size))


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("policy", ["zero", "mean", "nan"])
@pytest.mark.parametrize("causal", ["", ", causal = true"])
def test_masked_rows(policy: str, causal: str, weights: bool) -> None:
    pairs = list(itertools.product(MASKS, ("none", "per-query", "full", "padding")))
    extra = f', masked_rows = "{policy}"{causal}'
    check_hostile(attentions(pairs, extra=extra, weights=weights))


@pytest.mark.parametrize("policy", ["zero", "mean", "nan"])
@pytest.mark.parametrize("causal", ["", ", causal = true"])
@pytest.mark.parametrize("dtype", ["f16", "f64"])
def test_masked_rows_in_other_dtypes(dtype: str, causal: str, policy: str) -> None:
    pairs = [(mask, "none") for mask in MASKS]
    extra = f', masked_rows = "{policy}"{causal}'
    check_hostile(attentions(pairs, dtype=dtype, kv_heads=2, extra=extra, weights=True))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["f32", "f16", "f64"])
def test_heads_and_dtypes(kv_heads: int, dtype: str) -> None:
    pairs = [("none", "none"), ("padding", "full")]
    for extra in (", causal = true", ", softcap = 2.0"):
        check(attentions(pairs, kv_heads=kv_heads, extra=extra, dtype=dtype))


@pytest.mark.parametrize("scale", ["0.0", "-0.5", "1.0"])
def test_any_scale(scale: str) -> None:
    check(attentions([("padding", "none")], scale=scale))


def test_layers_share_one_prepared_mask() -> None:
    body = QKV.format(dtype="f32", kv=16) + "  input %m : bool[batch, 1, 1, keys]\n"
    attrs = "{heads = 4, kv_heads = 4, scale = 0.5}"
    for layer in range(3):
        query = f"%r{layer - 1}" if layer else "%q"
        body += f"  %r{layer} = attn.attention({query}, %k, %v, none, %m) {attrs}"
        body += " : f32[batch, seq, 16]\n"
    model = check(f"{body}  return %r2")
    assert op_types(model) == ["Shape", "Concat", "Expand", *["Attention"] * 3]


def test_a_bias_made_of_weights_needs_no_guard() -> None:
    body = QKV.format(dtype="f32", kv=16)
    model = check(
        f"{body}  parameter %t : f32[32, 4]\n  input %i : i64[seq, keys]\n"
        "  %e = aten.embedding(%t, %i)\n  %p = aten.permute(%e) {dims = [2, 0, 1]}\n"
        "  %r = attn.attention(%q, %k, %v, %p) {heads = 4, kv_heads = 4, scale = 1.0}\n  return %r",
        {"t": torch.randn(32, 4)},
    )
    assert op_types(model) == ["Gather", "Transpose", "Unsqueeze", "Attention"]


def test_a_bias_of_low_fills_is_guarded() -> None:
    body = QKV.format(dtype="f32", kv=16) + "  input %m : bool[batch, 1, seq, keys]\n"
    body += f"  constant %zero = 0.0 : f32[]\n  constant %low = {LOWEST!r} : f32[]\n"
    body += "  %b = aten.where.self(%m, %zero, %low)\n"
    attrs = "{heads = 4, kv_heads = 4, scale = 0.5}"
    check_hostile(f"{body}  %r = attn.attention(%q, %k, %v, %b) {attrs}\n  return %r")


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("mask", ["", "mean", "zero"])
def test_low_numbers_of_a_caller_keep_their_order(mask: str, dtype: str) -> None:
    """(1 − mask) · finfo.min, with a mask that is 0.3 or 0.7, takes the keys of 0.7."""
    kind = torch.float32 if dtype == "f32" else torch.float64
    low = torch.finfo(kind).min
    body = "  input %q : {0}[1, 4, 8]\n  input %k : {0}[1, 4, 8]\n  input %b : {0}[1, 1, 4, 4]\n"
    body = body.format(dtype) + "  input %m : bool[1, 1, 4, 4]\n" * bool(mask)
    attrs = "heads = 2, kv_heads = 2, scale = 1.0" + f', masked_rows = "{mask}"' * bool(mask)
    call = f"attn.attention(%q, %k, %k, %b{', %m' * bool(mask)}) {{{attrs}}} : {dtype}[1, 4, 8]"
    bias = torch.tensor(
        [
            [0.3, 0.7, 1.0, 0.3],
            [1.0, 1.0, 1.0, 1.0],
            [torch.inf, 0.9, torch.inf, 1e-5],
            [0.2, 0.4, 0.4, 1e-9],
        ],
        dtype=kind,
    )
    allowed = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 0], [1, 1, 1, 0], [0, 0, 0, 0]]).bool()
    rows = torch.randn(2, 1, 4, 8, dtype=kind)
    inputs = [*rows, (bias * low)[None, None], *([allowed[None, None]] if mask else [])]
    check(f"{body}  %r = {call}\n  return %r", inputs=inputs)


SDPA = """
  input %q : f32[{lead}seq, 8]
  input %k : f32[{lead_kv}keys, 8]
  input %v : f32[{lead_kv}keys, 6]
"""


@pytest.mark.parametrize(
    ("lead", "lead_kv", "mask"),
    [
        ("batch, 4, ", "batch, 4, ", "batch, 1, 1, keys"),
        ("batch, 4, ", "batch, 4, ", "seq, keys"),
        ("batch, 4, ", "batch, 2, ", "batch, 4, seq, keys"),
        ("batch, ", "batch, ", "batch, seq, keys"),
        ("", "", "seq, keys"),
    ],
)
@pytest.mark.parametrize("kind", ["bool", "f32"])
def test_sdpa(lead: str, lead_kv: str, mask: str, kind: str) -> None:
    body = SDPA.format(lead=lead, lead_kv=lead_kv)
    gqa = {"enable_gqa": "true"} if lead != lead_kv else {}
    name = "aten.scaled_dot_product_attention"
    output = f" : f32[{lead}seq, 6]"
    for attrs in ({}, {"is_causal": "true"}, {"scale": "0.3"}):
        written = ", ".join(f"{key} = {value}" for key, value in (gqa | attrs).items())
        plain = body if lead else f"{body}  input %b : f32[batch]\n"
        check(f"{plain}  %r = {name}(%q, %k, %v) {{{written}}}{output}\n  return %r")
        if "is_causal" not in attrs:
            masked = f"{body}  input %m : {kind}[{mask}]\n"
            call = f"{name}(%q, %k, %v, %m) {{{written}}}{output}"
            check_hostile(f"{masked}  %r = {call}\n  return %r")


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_sdpa_over_features_has_the_scale_of_their_number(dtype: str) -> None:
    """The tokens are the features of an attention between channels."""
    inputs = "".join(f"  input %{name} : {dtype}[batch, 2, 5, seq]\n" for name in "qkv")
    call = f"aten.scaled_dot_product_attention(%q, %k, %v) : {dtype}[batch, 2, 5, seq]"
    check(f"{inputs}  %r = {call}\n  return %r")


@pytest.mark.parametrize("dtype", ["f32", "f16", "f64"])
def test_attention_over_packed_rows(dtype: str) -> None:
    """Where there is no kernel for it: the padded layout, restored. Grouped heads, any padding."""
    attrs = "heads = 2, kv_heads = 1, scale = 0.5"
    graph = parse(
        f"""graph @main {{
  dim batch = 3 in 1..64
  dim seq = 5 in 1..64
  dim rows = 8 in 1..
  input %q : {dtype}[1, rows, 16]
  input %k : {dtype}[1, rows, 8]
  input %v : {dtype}[1, rows, 4]
  input %kept : bool[batch, seq]
  %y = attn.packed_attention(%q, %k, %v, %kept) {{{attrs}}} : {dtype}[1, rows, 8]
  return %y
}}"""
    )
    target, generator = Target("cpu"), torch.Generator().manual_seed(0)
    with to_session(lower(graph, target=target), target) as session:
        for batch, length in ((4, 7), (1, 1), (2, 30)):
            kept = torch.rand(batch, length, generator=generator) < 0.5
            kept[:, 0] |= ~kept.any(1)
            count, kind = int(kept.sum()), graph.inputs[0].dtype
            rows = [
                torch.randn(1, count, width, generator=generator).to(kind) for width in (16, 8, 4)
            ]
            (found,) = session.run([*rows, kept])
            (expected,) = interpret(graph, [*rows, kept])
            eps = torch.finfo(expected.dtype).eps
            assert found.shape == expected.shape
            assert float((found - expected).abs().max()) <= 8 * eps * float(expected.abs().max())
