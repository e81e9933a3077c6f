"""Calls of products, convolutions, recurrent layers, attention and the fused operators."""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from attngraph.dialect.experts import ACTIVATIONS, GATED
from attngraph.export.kernels import Choice
from attngraph.export.kernels.table import ATTENTION, GROUPED, MULTI_HEAD, PRIMITIVE
from attngraph.export.runtime.saturation import saturates
from tests.kernels.layouts import Make, on
from tests.kernels.runner import Call, Calls, Case
from tests.kernels.values import FLOATS, NUMBERS, edges, moderate, ordinary, rows

F32 = (torch.float32,)
NEAR: dict[str, Any] = {"ulps": 64, "scale": 8.0}
EPS = "{eps = 0.0009765625}"
KEPT = torch.tensor([[True] * 5, [True, True, False, False, False]])[:, None, None]
BODY = """graph @body {
  input %h : f32[2]
  input %x : f32[2]
  %n = aten.tanh(%h) : f32[2]
  %m = aten.add.Tensor(%n, %x) : f32[2]
  return %m, %n
}"""


def some(*shape: int, seed: int = 0) -> Make:
    return lambda dtype: ordinary(dtype, *shape, seed=seed)


def special(dtype: torch.dtype) -> torch.Tensor:
    """(3, 4), with an infinity in the first row and a NaN in the second, or the limits."""
    table = ordinary(dtype, 3, 4)
    first, second = torch.inf, torch.nan
    if not dtype.is_floating_point:
        first, second = torch.iinfo(dtype).max, torch.iinfo(dtype).min
    table[0, 0], table[1, 1] = first, second
    return table


def attention(attrs: str = "", operands: str = "", *more: Make, results: int = 1) -> Calls:
    text = f"attn.attention(%0, %1, %2{operands}) {{heads = 2, kv_heads = 2, scale = 0.5{attrs}}}"
    qkv = (some(2, 3, 8), some(2, 5, 8, seed=1), some(2, 5, 8, seed=2))
    return on(text, *qkv, *more, results=results)


def _matmul(dtype: torch.dtype) -> list[Call]:
    table, right = special(dtype), ordinary(dtype, 4, 2)
    shapes = [(table, right), (table[:, :0], right[:0]), (table[:0], right), (table[None], right)]
    return [Call("aten.matmul(%0, %1)", operands) for operands in shapes]


def _linear(dtype: torch.dtype) -> list[Call]:
    weight, bias = ordinary(dtype, 2, 4), ordinary(dtype, 2)
    table = special(dtype)
    return [Call("aten.linear(%0, %1, %2)", (x, weight, bias)) for x in (table, table[None])]


def _addmm(dtype: torch.dtype) -> list[Call]:
    operands = (edges(dtype)[:2], special(dtype), ordinary(dtype, 4, 2))
    texts = [f"aten.addmm(%0, %1, %2) {{beta = {beta}}}" for beta in (1, 0, 2)]
    return [Call(text, operands) for text in texts]


def _sdpa(dtype: torch.dtype) -> list[Call]:
    op, query, key = (
        "aten.scaled_dot_product_attention",
        ordinary(dtype, 2, 2, 3, 4),
        ordinary(dtype, 2, 2, 5, 4),
    )
    return [
        Call(f"{op}(%0, %1, %1)", (query, key)),
        Call(f"{op}(%0, %0, %0) {{is_causal = true}}", (query,)),
        Call(f"{op}(%0, %1, %1, %2)", (query, key, KEPT.expand(2, 1, 3, 5))),
    ]


def _recurrent(cell: str, gates: int) -> Case:
    memory = "%1" if cell == "lstm" else "none"
    text = f'attn.recurrent(%0, %1, {memory}, %2, %3, %4) {{cell = "{cell}"}}'
    operands = (
        some(3, 2, 4),
        some(1, 2, 4),
        some(1, 4 * gates, 4),
        some(1, 4 * gates, 4, seed=1),
        some(1, 8 * gates),
    )
    return Case(cell, on(text, *operands, results=3 if cell == "lstm" else 2), F32, **NEAR)


def _quantized(bits: int) -> Calls:
    """Of constant codes, of 2 blocks in each of 8 rows."""

    def calls(dtype: torch.dtype) -> list[Call]:
        codes = (torch.arange(8 * 2 * 4 * bits) * 37).to(torch.uint8).reshape(8, 2, 4 * bits)
        operands = (ordinary(dtype, 3, 64), codes, ordinary(dtype, 8, 2).abs())
        text = f"attn.quantized_linear(%0, %1, %2) {{bits = {bits}}}"
        return [Call(text, operands, modes=("mixed",))]

    return calls


def _coded_experts(dtype: torch.dtype) -> list[Call]:
    """Of two experts of three, whose matrices are codes of 4 bits in blocks of 32."""

    def codes(*shape: int) -> torch.Tensor:
        return (torch.arange(math.prod(shape)) * 37 % 256).to(torch.uint8).reshape(shape)

    steps = (ordinary(dtype, 3, 128, 1).abs() / 16, ordinary(dtype, 3, 32, 2).abs() / 16)
    operands = (ordinary(dtype, 5, 32), ordinary(dtype, 5, 3), codes(3, 128, 16), codes(3, 32, 32))
    text = (
        "attn.routed_moe(%0, %1, %2, %3, none, none, %4, %5) "
        '{activation = "swiglu", count = 2, normalized = false}'
    )
    return [Call(text, (*operands, *steps), modes=("mixed",))]


def _rounded(dtype: torch.dtype) -> list[Call]:
    """Rows of zeros, with an infinity, with a NaN, and none at all.

    Codes are as large as those of a file that is compiled on this CPU.
    """
    most = 63 if saturates() else 127
    codes = (torch.arange(8 * 64) * 37 % (2 * most + 1) - most).to(torch.int8).reshape(8, 64)
    x = ordinary(dtype, 4, 64)
    x[1] = 0
    x[2, 7], x[3, 9] = torch.inf, torch.nan
    constants = codes, ordinary(dtype, 8).abs(), ordinary(dtype, 8, seed=1)
    return [
        Call(f"attn.int8_linear(%0, %1, %2, %3){attrs}", (rows, *constants), modes=("mixed",))
        for attrs in ("", " {one_sided = true}", " {fine = true}")
        for rows in (x[:2], x[None], x[:0], x[None, :0], x[:1].relu())
    ]


def _in_form(name: str, choice: Choice, calls: Calls, dtypes: tuple[torch.dtype, ...]) -> Case:
    return Case(f"attention-as-{name}", calls, dtypes, choice=choice, **NEAR)


HALF = (torch.float32, torch.float16)
SELF = on("attn.attention(%0, %0, %0) {heads = 2, kv_heads = 2, scale = 0.5}", some(2, 5, 16))
CAUSAL = on(
    "attn.attention(%0, %0, %0) {heads = 2, kv_heads = 2, scale = 0.5, causal = true}",
    some(2, 5, 16),
)
BRANCHES = {"form": ATTENTION, "kernel": "any", "below": PRIMITIVE}
RESIDUAL = (some(2, 3, 8), some(2, 3, 8, seed=1), some(8), some(8, seed=1))

CASES = [
    Case("matmul", _matmul, NUMBERS, **NEAR),
    Case("linear", _linear, FLOATS, **NEAR),
    Case("addmm", _addmm, FLOATS, **NEAR),
    Case(
        "baddbmm",
        on("aten.baddbmm(%0, %1, %2) {alpha = 2}", some(2, 3, 2), some(2, 3, 4), some(2, 4, 2)),
        FLOATS,
        **NEAR,
    ),
    Case(
        "einsum",
        on('aten.einsum(%0, %1) {equation = "bij,bjk->bik"}', some(2, 3, 4), some(2, 4, 2)),
        NUMBERS,
        **NEAR,
    ),
    Case(
        "einsum-sum",
        on('aten.einsum(%0) {equation = "ij->i"}', special),
        (torch.float32, torch.int64),
        **NEAR,
    ),
    *[
        Case(
            f"conv{axes}d",
            on(
                f"aten.conv{axes}d(%0, %1, %2) {{padding = [{', '.join('1' * axes)}]}}",
                some(1, 2, *[5] * axes),
                some(3, 2, *[3] * axes),
                some(3),
            ),
            FLOATS,
            **NEAR,
        )
        for axes in (1, 2, 3)
    ],
    Case(
        "conv_transpose",
        on(
            "aten.conv_transpose2d.input(%0, %1, %2) {stride = [2, 2]}",
            some(1, 2, 4, 4),
            some(2, 3, 3, 3),
            some(3),
        ),
        FLOATS,
        **NEAR,
    ),
    Case(
        "grouped_mm",
        on(
            "aten._grouped_mm(%0, %1, %2)",
            some(6, 16),
            some(2, 16, 16),
            torch.tensor([2, 6], dtype=torch.int32),
        ),
        (torch.float32, torch.bfloat16),
        ulps=64,
        scale=16.0,
    ),
    *[
        Case(
            f"moe-{kind}",
            on(
                f'attn.routed_moe(%0, %1, %2, %3) {{activation = "{kind}", count = 2, '
                "normalized = true}",
                *(
                    some(6, 16),
                    some(6, 4),
                    some(4, 32, 16),
                    some(4, 16, 16 if kind == GATED else 32),
                ),
            ),
            F32,
            **NEAR,
        )
        for kind in ACTIVATIONS
    ],
    Case("moe-codes", _coded_experts, F32, **NEAR),
    Case("det", on("aten.linalg_det(%0)", some(3, 3)), FLOATS, **NEAR),
    Case("attention", attention(), FLOATS, **NEAR),
    Case("attention-causal", attention(", causal = true"), FLOATS, **NEAR),
    *[
        Case(
            f"attention-masked-{policy}",
            attention(f', masked_rows = "{policy}"', ", none, %3", kept),
            FLOATS,
            **NEAR,
        )
        for policy in ("zero", "nan", "mean")
        for kept in (KEPT & torch.tensor([False, True])[:, None, None, None],)
    ],
    Case("attention-bias", attention("", ", %3", some(2, 3, 5)), FLOATS, **NEAR),
    Case(
        "attention-infinite-bias",
        attention("", ", %3", lambda dtype: torch.where(KEPT, 0.0, -torch.inf).to(dtype)),
        FLOATS,
        **NEAR,
    ),
    Case("attention-weights", attention(", weights = true", results=2), FLOATS, **NEAR),
    Case("attention-softcap", attention(", softcap = 2.0"), FLOATS, **NEAR),
    Case(
        "attention-lengths",
        attention("", ", none, none, none, none, none, %3", torch.tensor([2, 2**31 + 5])),
        FLOATS,
        **NEAR,
    ),
    Case("attention-sinks", attention("", ", none, none, %3", some(2)), FLOATS, **NEAR),
    Case(
        "attention-past",
        attention(
            ", causal = true",
            ", none, none, none, %3, %4",
            some(2, 2, 4, 4, seed=3),
            some(2, 2, 4, 4, seed=4),
            results=3,
        ),
        FLOATS,
        **NEAR,
    ),
    Case(
        "attention-groups",
        on(
            "attn.attention(%0, %1, %1) {heads = 2, kv_heads = 1, scale = 0.5}",
            some(2, 3, 8),
            some(2, 5, 4, seed=1),
        ),
        FLOATS,
        **NEAR,
    ),
    _in_form("grouped", Choice(GROUPED, "any"), CAUSAL, HALF),
    _in_form("multi-head", Choice(MULTI_HEAD, "any"), SELF, F32),
    _in_form("primitives", Choice(PRIMITIVE, "any"), CAUSAL, FLOATS),
    _in_form("the-long-branch", Choice(**BRANCHES, start=5), CAUSAL, HALF),
    _in_form("the-short-branch", Choice(**BRANCHES, start=6), CAUSAL, HALF),
    Case("sdpa", _sdpa, FLOATS, **NEAR),
    Case(
        "packed_attention",
        on(
            "attn.packed_attention(%0, %0, %0, %1) {heads = 2, kv_heads = 2, scale = 0.5}",
            some(1, 5, 8),
            torch.tensor([[True] * 3, [True, True, False]]),
        ),
        HALF,
        **NEAR,
    ),
    Case(
        "rotary",
        on("attn.rotary(%0, %1, %2) {heads = 2}", some(2, 3, 8), some(2, 3, 2), some(2, 3, 2)),
        FLOATS,
        **NEAR,
    ),
    Case("bias_gelu", on("attn.bias_gelu(%0, %1)", some(5, 4), some(4)), FLOATS, **NEAR),
    Case("quick_gelu", on("attn.quick_gelu(%0) {alpha = 1.702}", moderate), FLOATS, **NEAR),
    Case("attn.rms_norm", on(f"attn.rms_norm(%0, %1) {EPS}", *RESIDUAL[1:3]), FLOATS, **NEAR),
    Case(
        "skip_layer_norm",
        on(f"attn.skip_layer_norm(%0, %1, %2, %3, %2) {EPS}", *RESIDUAL, results=2),
        FLOATS,
        **NEAR,
    ),
    Case(
        "skip_layer_norm-alone",
        on(f"attn.skip_layer_norm(%0, %1, %2, %3) {EPS}", *RESIDUAL, results=2, compared=1),
        FLOATS,
        **NEAR,
    ),
    Case(
        "skip_rms_norm",
        on(f"attn.skip_rms_norm(%0, %1, %2) {EPS}", *RESIDUAL[:3], results=2),
        FLOATS,
        **NEAR,
    ),
    Case(
        "sink_softmax",
        on("attn.sink_softmax(%0, %1) {dim = -1}", lambda dtype: rows(moderate(dtype)), some(1)),
        FLOATS,
        **NEAR,
    ),
    _recurrent("rnn_tanh", 1),
    _recurrent("rnn_relu", 1),
    _recurrent("gru", 3),
    _recurrent("gru_reset_first", 3),
    _recurrent("lstm", 4),
    Case(
        "scan",
        on(
            f"attn.scan(%0, %1) {{body = {json.dumps(BODY)}, carried = 1, scanned = 1}}",
            some(2),
            some(3, 2),
            results=2,
        ),
        F32,
        **NEAR,
    ),
    Case("int8_linear", _rounded, F32, ulps=512, scale=8192.0),
    Case("quantized_linear-4", _quantized(4), HALF, ulps=512, scale=256.0),
    Case("quantized_linear-8", _quantized(8), HALF, ulps=512, scale=8192.0),
]
