"""The one mask input of ONNX `Attention`: what torch's mask, bias and causality come to.

onnxruntime's kernel gives 0 for a row whose mask is −inf, or exactly the lowest float, on every
key; on CUDA, where it is −1e30 or less. torch gives the mean of the values for the latter. A fill
of −1e29 behaves like a finite fill everywhere, so finite lows are lifted to it, or next to it in
their order: a caller's (1 − mask) · finfo.min takes the key of the largest mask where none is 1.
Each prepared mask is made once and shared by all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir
import sympy
import torch

from attngraph.analysis.masks.masking import Masking
from attngraph.analysis.masks.reach import is_bounded
from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.ir import Value
from attngraph.ir.dims import Dim, as_dim, same

LOW = -1e29
_LOW_HALF = -65472.0  # one step above the lowest


@dataclass(frozen=True)
class Wanted:
    """What one attention asks of its mask: a masking of scores (B, H, `queries`, `keys`).

    `fused` says that one operator computes the attention, `additive` that it wants all of it as a
    bias.
    """

    masking: Masking
    queries: Dim
    keys: Dim
    dtype: torch.dtype
    fused: bool = True
    additive: bool = False


@dataclass(frozen=True)
class Prepared:
    """`attn_mask` for the op, whether it is causal besides, and the rows to be repaired.

    `dead` (B|1, H|1, S, 1) is True in rows whose result the kernel gets wrong, and `repair` says
    what it is: "zero", "mean" or "nan".
    """

    attn_mask: ir.Value | None
    causal: bool
    dead: ir.Value | None = None
    repair: str = ""


def prepare(ctx: LoweringContext, wanted: Wanted) -> Prepared:
    """The mask in the form the kernel takes, keeping the meaning of every row."""
    return ctx.once(("mask", wanted), lambda: _prepare(ctx, wanted))


def _prepare(ctx: LoweringContext, wanted: Wanted) -> Prepared:
    masking = wanted.masking
    bias, policy = masking.bias, masking.masked_rows
    bounded = bias is None or is_bounded(bias)
    if wanted.additive:
        rules = [*_rules(ctx, wanted), *([_lower(ctx, wanted)] if masking.causal else [])]
        return Prepared(_additive(ctx, wanted, *_joint(ctx, rules), bounded, -torch.inf), False)
    if masking.is_open and bounded:  # no row is empty: a causal one holds at least its first key
        return Prepared(_full_bias(ctx, wanted, bounded), masking.causal)
    kernel = wanted.fused and _has_kernel(ctx, wanted.dtype)
    finite = policy == "mean" and wanted.dtype != torch.float16
    repair = _repair(policy, bounded, kernel, finite)
    if policy == "nan" and not wanted.fused:
        repair = ""  # a softmax of −inf alone is NaN by itself
    causal = masking.causal
    rules = _rules(ctx, wanted)
    if causal and (repair or finite):
        rules.insert(0, _lower(ctx, wanted))
        causal = False
    allowed, shape = _joint(ctx, rules)
    if bias is None and not finite:
        assert allowed is not None
        ready = _spread(ctx, allowed, shape, wanted)
    else:
        fill = -torch.inf
        if finite:
            fill = LOW if bounded else _lowest(wanted.dtype)
        ready = _additive(ctx, wanted, allowed, shape, bounded, fill)
    dead = None
    if repair == "mean":
        assert allowed is not None
        dead = _empty_rows(ctx, _spread(ctx, allowed, shape, wanted))
    elif repair:
        dead = _empty_rows(ctx, ready)
    return Prepared(ready, causal, dead, repair)


_Rule = tuple[ir.Value, list[Dim]]
"""A bool tensor and its shape."""


def _rules(ctx: LoweringContext, wanted: Wanted) -> list[_Rule]:
    """What a query may attend to, but for causality; each broadcasts to (B, H, S, T)."""
    rules: list[_Rule] = []
    masking = wanted.masking
    if masking.mask is not None:
        rules.append((ctx.cast(ctx.value(masking.mask), torch.bool), list(masking.mask.shape)))
    if masking.window:
        end = as_dim(sympy.sympify(wanted.queries) + masking.past)
        near = window_mask(ctx, masking.past, end, wanted.keys, masking.window)
        rules.append((near, [wanted.queries, wanted.keys]))
    if masking.lengths is not None:
        there = _before(ctx, masking.lengths, wanted.keys)
        rules.append((there, [masking.lengths.shape[0], 1, 1, wanted.keys]))
    return rules


def _before(ctx: LoweringContext, lengths: Value, keys: Dim) -> ir.Value:
    """(B, 1, 1, T): the keys of each element that come before its length."""

    def make() -> ir.Value:
        ends = ctx.op("Unsqueeze", whole(ctx, lengths), ctx.constant([1, 2, 3]))
        return ctx.op("Less", _positions(ctx, 0, keys), ends)

    return ctx.once(("before", lengths, keys), make)


def _lower(ctx: LoweringContext, wanted: Wanted) -> _Rule:
    past = wanted.masking.past
    end = as_dim(sympy.sympify(wanted.queries) + past)
    return causal_mask(ctx, past, end, wanted.keys), [wanted.queries, wanted.keys]


def _joint(ctx: LoweringContext, rules: Sequence[_Rule]) -> tuple[ir.Value | None, list[Dim]]:
    """Where all of them hold."""
    allowed: ir.Value | None = None
    shape: list[Dim] = []
    for rule, its_shape in rules:
        allowed = rule if allowed is None else ctx.op("And", allowed, rule)
        shape = _joined(shape, its_shape)
    return allowed, shape


def _repair(policy: str, bounded: bool, kernel: bool, finite: bool) -> str:
    """What must be put into empty rows, "" where the kernel does that by itself."""
    if policy == "zero":
        return "" if kernel else "zero"
    if policy == "nan":
        return "nan"
    if not finite:
        return "mean"
    return "" if bounded else "nan"


def _has_kernel(ctx: LoweringContext, dtype: torch.dtype) -> bool:
    """Whether the op runs as one kernel of onnxruntime; its expansion gives NaN for empty rows, and
    what other runtimes give is unknown."""
    if ctx.target.portable:
        return False
    if ctx.target.provider == "cuda":
        return dtype in (torch.float32, torch.float16, torch.bfloat16)
    return dtype in (torch.float32, torch.float16)


def _additive(
    ctx: LoweringContext,
    wanted: Wanted,
    allowed: ir.Value | None,
    shape: Sequence[Dim],
    bounded: bool,
    fill: float,
) -> ir.Value:
    dtype, bias = wanted.dtype, wanted.masking.bias
    value, total = ctx.constant(0.0, dtype), list(shape)
    if bias is not None:
        value = _guarded(ctx, bias, dtype, bounded)
        total = _joined(shape, bias.shape)
    if allowed is not None:
        value = ctx.op("Where", allowed, value, ctx.constant(fill, dtype))
    return _spread(ctx, value, total, wanted)


def _full_bias(ctx: LoweringContext, wanted: Wanted, bounded: bool) -> ir.Value | None:
    bias = wanted.masking.bias
    if bias is None:
        return None
    return _spread(ctx, _guarded(ctx, bias, wanted.dtype, bounded), bias.shape, wanted)


def _guarded(ctx: LoweringContext, bias: Value, dtype: torch.dtype, bounded: bool) -> ir.Value:
    """The bias with −inf kept and every other low number lifted to where the kernel adds it.

    Numbers below `LOW` lie between that and twice that afterwards, in their order.
    """
    value = ctx.cast(ctx.value(bias), dtype)
    if bounded:
        return value
    if dtype != torch.float16:
        share = ctx.constant(_share(dtype), dtype)
        lows = ctx.op("Add", ctx.op("Mul", value, share), ctx.constant(LOW, dtype))
        return ctx.op("Max", value, lows)
    infinity = ctx.constant(-torch.inf, dtype)
    lifted = ctx.op("Max", value, ctx.constant(_LOW_HALF, dtype))
    return ctx.op("Where", ctx.op("Equal", value, infinity), infinity, lifted)


def _share(dtype: torch.dtype) -> float:
    return LOW / torch.finfo(dtype).min


def _lowest(dtype: torch.dtype) -> float:
    """What the lowest number is lifted to, to the last bit: what ties with it ties afterwards."""
    lowest, share, low = torch.tensor([torch.finfo(dtype).min, _share(dtype), LOW], dtype=dtype)
    return float(lowest * share + low)


def causal_mask(ctx: LoweringContext, first: Dim, end: Dim, keys: Dim) -> ir.Value:
    """bool (S, T), for the queries from `first` on and before `end`: True for the keys up to the
    query's own position."""

    def make() -> ir.Value:
        rows = ctx.op("Unsqueeze", _positions(ctx, first, end), ctx.constant([1]))
        return ctx.op("LessOrEqual", _positions(ctx, 0, keys), rows)

    return ctx.once(("causal", first, end, keys), make)


def window_mask(ctx: LoweringContext, first: Dim, end: Dim, keys: Dim, window: int) -> ir.Value:
    """As `causal_mask`: True for the keys less than `window` before the query's own position."""

    def make() -> ir.Value:
        start, stop = (as_dim(sympy.sympify(place) - window) for place in (first, end))
        rows = ctx.op("Unsqueeze", _positions(ctx, start, stop), ctx.constant([1]))
        return ctx.op("Greater", _positions(ctx, 0, keys), rows)

    return ctx.once(("window", first, end, keys, window), make)


def whole(ctx: LoweringContext, lengths: Value) -> ir.Value:
    """Lengths as int64."""
    return ctx.once(("lengths", lengths), lambda: ctx.cast(ctx.value(lengths), torch.int64))


def _positions(ctx: LoweringContext, first: Dim, end: Dim) -> ir.Value:
    bounds = ctx.dim(first), ctx.dim(end), ctx.constant(1)
    return ctx.once(("positions", first, end), lambda: ctx.op("Range", *bounds))


def _empty_rows(ctx: LoweringContext, mask: ir.Value) -> ir.Value:
    """Rows in which no key is allowed, the key axis kept as 1."""
    if mask.dtype == ir.DataType.BOOL:
        number = ctx.cast(mask, torch.int32)
        found = ctx.op("ReduceMax", number, ctx.constant([-1]), keepdims=1)
        return ctx.op("Equal", found, ctx.constant(0, torch.int32))
    found = ctx.op("ReduceMax", mask, ctx.constant([-1]), keepdims=1)
    dtype = ir.tensor_adapters.to_torch_dtype(mask.dtype or ir.DataType.FLOAT)
    return ctx.op("Equal", found, ctx.constant(-torch.inf, dtype))


def _spread(
    ctx: LoweringContext, value: ir.Value, shape: Sequence[Dim], wanted: Wanted
) -> ir.Value:
    """(B|1, H|1, S, T): the kernel broadcasts the first two axes and rejects 1 in the others."""
    full = [1] * (4 - len(shape)) + list(shape)
    if not (same(full[2], wanted.queries) and same(full[3], wanted.keys)):
        goal = [*full[:2], wanted.queries, wanted.keys]
        return ctx.expand(value, shape, goal)
    if len(shape) < 4:
        return ctx.op("Unsqueeze", value, ctx.constant(list(range(4 - len(shape)))))
    return value


def _joined(a: Sequence[Dim], b: Sequence[Dim]) -> list[Dim]:
    rank = max(len(a), len(b))
    left, right = [1] * (rank - len(a)) + list(a), [1] * (rank - len(b)) + list(b)
    return [y if same(x, 1) else x for x, y in zip(left, right, strict=True)]
