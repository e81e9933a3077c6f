"""`attn.attention`: scaled dot-product attention over packed heads."""

from __future__ import annotations

import functools
import math

import torch

from attngraph.ir.ops import op
from attngraph.ir.traits import ATTENTION, SOFTMAX


@op("attn.sink_softmax", [SOFTMAX])
def sink_softmax(x: torch.Tensor, sink: torch.Tensor, *, dim: int) -> torch.Tensor:
    """softmax over x and one more logit, `sink`, whose probability is dropped.

    sink broadcasts to x with size 1 along `dim`; 0 is softmax-plus-one (Miller 2023). Returns a
    tensor of x's shape whose sums along `dim` are below 1.
    """
    shape = list(x.shape)
    shape[dim] = 1
    logits = torch.cat([x, sink.to(x.dtype).expand(shape)], dim)
    return torch.softmax(logits, dim).narrow(dim, 0, x.shape[dim])


@op("attn.attention", [ATTENTION], outputs=None)
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    past_key: torch.Tensor | None = None,
    past_value: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    *,
    heads: int,
    kv_heads: int,
    scale: float,
    causal: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    masked_rows: str = "zero",
    weights: bool = False,
) -> tuple[torch.Tensor, ...]:
    """softmax(softcap(scale · Q Kᵀ) + bias, where masked −∞) V, per head (Vaswani et al. 2017).

    query (B, S, H·D), key (B, T, G·D), value (B, T, G·E), with H = `heads` a multiple of
    G = `kv_heads` (query head h reads key head h // (H / G)). bias and mask broadcast to
    (B, H, S, T); mask is bool, True where a query may attend. `causal` allows key j for query i
    iff j ≤ i, a `window` w > 0 only if j > i − w (with a past of P keys, i + P stands for i), and
    lengths (B,) only if j < lengths[b]. `softcap` c > 0 replaces logits x by c·tanh(x / c).

    `masked_rows` is the result of a query that may attend to nothing: "zero" (as torch's SDPA gives
    for a bool mask), "mean" (of all T values, as a large finite fill) or "nan" (as −inf).

    sinks (H,) are logits of one more key per head, which has no value (Xiao et al. 2023), or per
    query where they broadcast to (B, H, S, 1); with them a row that may attend to nothing gives
    zero, whatever `masked_rows` says.

    past_key (B, G, P, D) and past_value (B, G, P, E) come before the keys and values: T is then
    P + the length of `key`, and `causal` allows j ≤ i + P, as ONNX's Attention-24 has it.

    Returns the context (B, S, H·E); then, if `weights`, the probabilities (B, H, S, T); then, with
    a past, all keys (B, G, T, D) and all values (B, G, T, E).
    """
    batch, length, width = query.shape
    q = query.reshape(batch, length, heads, width // heads).transpose(1, 2)
    split = (batch, key.shape[1], kv_heads)
    k = key.reshape(*split, key.shape[2] // kv_heads).transpose(1, 2)
    v = value.reshape(*split, value.shape[2] // kv_heads).transpose(1, 2)
    offset, presents = 0, tuple[torch.Tensor, ...]()
    if past_key is not None and past_value is not None:
        offset = past_key.shape[2]
        presents = k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    if heads != kv_heads:
        k = k.repeat_interleave(heads // kv_heads, 1)
        v = v.repeat_interleave(heads // kv_heads, 1)
    logits = torch.matmul(q, k.transpose(-1, -2)) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    places = torch.arange(length, device=query.device)[:, None] + offset
    logits = _masked(logits, bias, mask, lengths, places, causal, window, masked_rows)
    if sinks is None:
        probabilities = _normalised(logits, masked_rows, -math.inf)
    else:
        probabilities = sink_softmax(
            logits, sinks.view(-1, 1, 1) if sinks.dim() == 1 else sinks, dim=-1
        )
    context = torch.matmul(probabilities, v).transpose(1, 2).flatten(-2)
    return (context, probabilities, *presents) if weights else (context, *presents)


@op("attn.masked_softmax", [SOFTMAX])
def masked_softmax(
    logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    *,
    queries: int,
    past: int = 0,
    causal: bool = False,
    window: int = 0,
    masked_rows: str = "zero",
    hidden: float = -math.inf,
) -> torch.Tensor:
    """The probabilities (B, H, R, T) that `attention` makes of logits under what masks them.

    logits broadcast to (B, H, R, T): R of its `queries`, evenly spread, with all T keys; the other
    arguments are those of `attention`. A row whose logits are all at most `hidden` is one that may
    attend to nothing.
    """
    rows = torch.linspace(0, queries - 1, logits.shape[-2], dtype=torch.float64).long()

    def of_rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None or tensor.dim() < 2 or tensor.shape[-2] == 1:
            return tensor
        return tensor[..., rows, :]

    given = of_rows(bias), of_rows(mask), lengths
    places = rows[:, None] + past
    logits = _masked(logits, *given, places, causal, window, masked_rows)
    return _normalised(logits, masked_rows, hidden)


def _masked(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    lengths: torch.Tensor | None,
    places: torch.Tensor,
    causal: bool,
    window: int,
    masked_rows: str,
) -> torch.Tensor:
    """logits (B, H, R, T) of queries at `places` (R, 1) among the keys, biased and filled."""
    if bias is not None:
        logits = logits + bias
    columns = torch.arange(logits.shape[-1], device=logits.device)
    rules = [] if mask is None else [mask]
    if causal:
        rules.append(columns <= places)
    if window:
        rules.append(columns > places - window)
    if lengths is not None:
        rules.append(columns < lengths.view(-1, 1, 1, 1))
    if not rules:
        return logits
    fill = torch.finfo(logits.dtype).min if masked_rows == "mean" else -torch.inf
    return logits.masked_fill(~functools.reduce(torch.logical_and, rules), fill)


def _normalised(logits: torch.Tensor, masked_rows: str, hidden: float) -> torch.Tensor:
    probabilities = torch.softmax(logits, -1)
    if masked_rows == "zero":
        dead = (logits <= hidden).all(-1, keepdim=True)
        probabilities = probabilities.masked_fill(dead, 0.0)
    return probabilities


@op("attn.packed_attention", [ATTENTION])
def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kept: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    scale: float,
) -> torch.Tensor:
    """`attention` of a batch whose padding was left out: each row sees those of its own element.

    query (1, N, H·D), key (1, N, G·D) and value (1, N, G·E) hold the N rows (b, t) at which `kept`,
    bool (B, T), is True, in that order. Each element of the batch has one at least. Returns the
    context (1, N, H·E).
    """
    ends = kept.sum(1).cumsum(0)
    rows = torch.arange(query.shape[1], device=query.device)
    element = torch.searchsorted(ends, rows, right=True)
    mask = element[:, None] == element[None, :]
    context: torch.Tensor
    (context,) = attention(
        query, key, value, None, mask, heads=heads, kv_heads=kv_heads, scale=scale
    )
    return context
