"""How people hide keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parity.formulations.kit import BUFFER, K, Q, V, formulation

SQUARE = "b h s d", "b h s d", "b h s e"
LOWEST = torch.finfo(torch.float32).min


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * 0.4


@formulation(*SQUARE, dynamic="b s")
class CausalBuffer(nn.Module):
    """nanoGPT: a tril buffer, cut to size, == 0."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.tril(torch.ones(BUFFER, BUFFER))[None, None])

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[2]
        scores = _scores(q, k).masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
        return scores.softmax(-1) @ v


@formulation("b h s d", "b h t d", "b h t e")
class CausalBufferOffset(nn.Module):
    """GPT-2: a bool buffer cut from T - S, where() with finfo.min."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        square = torch.tril(torch.ones((BUFFER, BUFFER), dtype=torch.bool))
        self.register_buffer("bias", square.view(1, 1, BUFFER, BUFFER), persistent=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, columns = q.size(-2), k.size(-2)
        mask = self.bias[:, :, columns - rows : columns, :columns]
        scores = _scores(q, k)
        fill = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype)
        return torch.where(mask, scores, fill).softmax(-1) @ v


@formulation(*SQUARE, dynamic="b s")
def causal_triu_infinite(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """triu of a tensor full of -inf, added."""
    mask = torch.triu(torch.full((q.shape[2], q.shape[2]), float("-inf")), diagonal=1)
    return (_scores(q, k) + mask).softmax(-1) @ v


@formulation(*SQUARE)
def causal_triu_bool(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """triu of ones as bool, masked_fill."""
    length = q.shape[2]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    return _scores(q, k).masked_fill(hidden, float("-inf")).softmax(-1) @ v


@formulation(*SQUARE, dynamic="s")
def causal_iota(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Comparison of positions."""
    position = torch.arange(q.shape[2])
    hidden = position[None, :] > position[:, None]
    return _scores(q, k).masked_fill(hidden, LOWEST).softmax(-1) @ v


@formulation(*SQUARE, dynamic="b s")
def causal_tril_at_run_time(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch.ones().tril(), where."""
    scores = _scores(q, k)
    keep = torch.ones(q.shape[2], k.shape[2]).tril().bool()
    return torch.where(keep, scores, torch.tensor(float("-inf"))).softmax(-1) @ v


@formulation(*SQUARE, dynamic="b s")
def causal_multiplicative(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """GPT-1: w · b − 1e4 · (1 − b)."""
    b = torch.tril(torch.ones(q.shape[2], q.shape[2]))
    scores = _scores(q, k) * b + -1e4 * (1 - b)
    return scores.softmax(-1) @ v


@formulation(*SQUARE, dynamic="b s")
class causal_multiplicative_table(nn.Module):
    """The same of a part of a larger table, as GPT-1's model keeps it."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(BUFFER, BUFFER).tril()[None, None])

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = _scores(q, k)
        b = self.table[:, :, : scores.shape[-2], : scores.shape[-1]]
        return (scores * b + -1e4 * (1 - b)).softmax(-1) @ v


@formulation(Q, K, V, dynamic="s t")
def causal_sdpa_rectangular(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """is_causal with S ≠ T: aligned at the upper left."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@formulation(Q, K, V)
def causal_lower_right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Aligned at the lower right, as with a past."""
    keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)


@formulation(*SQUARE)
def causal_strict(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Strictly causal: the first row sees nothing, and is zero."""
    keep = torch.ones(q.shape[2], q.shape[2]).tril(-1).bool()
    return _scores(q, k).masked_fill(~keep, float("-inf")).softmax(-1).nan_to_num(0.0) @ v


@formulation(*SQUARE)
def anti_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Only the future."""
    keep = torch.ones(q.shape[2], q.shape[2]).triu().bool()
    return _scores(q, k).masked_fill(~keep, float("-inf")).softmax(-1) @ v


@formulation(*SQUARE, "b s:padding", dynamic="b s")
def causal_and_padding(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """Two masks joined by and; left padding makes rows without keys."""
    length = q.shape[2]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    keep = causal & padding[:, None, None, :]
    return _scores(q, k).masked_fill(~keep, LOWEST).softmax(-1) @ v


@formulation(*SQUARE, "b s:int_padding", dynamic="b s")
def causal_and_padding_summed(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """Two additive masks: overflowing finfo.min twice gives -inf."""
    length = q.shape[2]
    causal = torch.triu(torch.full((length, length), LOWEST), diagonal=1)
    extended = (1.0 - padding[:, None, None, :].to(q.dtype)) * LOWEST
    return (_scores(q, k) + causal + extended).softmax(-1) @ v


@formulation(*SQUARE, "b s:padding")
def causal_then_padding(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """Two masks with two fills, one after the other."""
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    scores = _scores(q, k).masked_fill(hidden, float("-inf"))
    return scores.masked_fill(~padding[:, None, None], -1e9).softmax(-1) @ v


@formulation(Q, K, V, "b t:padding", dynamic="b s t")
def padding_bool(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """(B, T) bool, -inf."""
    scores = _scores(q, k).masked_fill(~padding[:, None, None, :], float("-inf"))
    return scores.softmax(-1) @ v


@formulation(Q, K, V, "b t:padding", dynamic="b t")
def padding_bool_sdpa(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """(B, T) bool expanded for SDPA."""
    mask = padding.view(q.shape[0], 1, 1, -1).expand(-1, 3, q.shape[2], -1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@formulation(Q, K, V, "b t:float_padding", dynamic="b s t")
def padding_extended(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """BERT: (1 − m) · finfo.min, added."""
    extended = (1.0 - padding[:, None, None, :]) * LOWEST
    return (_scores(q, k) + extended).softmax(-1) @ v


@formulation(Q, K, V, "b t:int_padding")
def padding_minus_1e4(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """(1 − m) · −1e4, added."""
    extended = (1.0 - padding[:, None, None, :].float()) * -10000.0
    return (_scores(q, k) + extended).softmax(-1) @ v


@formulation(Q, K, V, "b t:int_padding")
def padding_fill_1e9(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """The annotated transformer: masked_fill(mask == 0, −1e9)."""
    mask = padding.unsqueeze(1).unsqueeze(1)
    return _scores(q, k).masked_fill(mask == 0, -1e9).softmax(-1) @ v


@formulation(Q, K, V, "b t:int_padding")
def padding_where_not(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """logical_not of an integer mask, torch.where with a number."""
    hidden = torch.logical_not(padding)[:, None, None]
    return torch.where(hidden, -1e9, _scores(q, k)).softmax(-1) @ v


@formulation(Q, K, V, "b t:padding")
def padding_bool_added(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """A bool mask that is added: it adds one, and hides nothing."""
    return (_scores(q, k) + padding[:, None, None, :]).softmax(-1) @ v


@formulation(Q, K, V, "b t:padding")
def padding_bool_subtracted(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """The inverse as a number, times 1e9, subtracted."""
    return (_scores(q, k) - 1e9 * (~padding[:, None, None, :]).float()).softmax(-1) @ v


@formulation(Q, K, V, "b t:padding")
def padding_log(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """log of the mask as a number: −inf where hidden."""
    return (_scores(q, k) + torch.log(padding.float())[:, None, None, :]).softmax(-1) @ v


@formulation(Q, K, V, "b:lengths", dynamic="b s t")
def padding_lengths(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Right padding from lengths."""
    keep = torch.arange(k.shape[2])[None, :] < lengths[:, None]
    return _scores(q, k).masked_fill(~keep[:, None, None], float("-inf")).softmax(-1) @ v


@formulation(*SQUARE, "b s:padding")
def padding_outer(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """Outer product of a padding mask: hidden queries see nothing (−1e9)."""
    keep = padding[:, None, :, None] & padding[:, None, None, :]
    return _scores(q, k).masked_fill(~keep, -1e9).softmax(-1) @ v


@formulation(Q, K, V, "b t:padding")
def padding_repeated_for_heads(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """Repeated over heads and joined with the batch, as for bmm."""
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    mask = padding[:, None].repeat(1, 3, 1).flatten(0, 1)[:, None]
    return (_scores(q, k).masked_fill(~mask, float("-inf")).softmax(-1) @ v).unflatten(0, (2, 3))


@formulation(Q, K, V, "b t:padding", dynamic="b t")
def padding_fairseq(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """Scores viewed as (B, H, S, T) for the mask, and back to (B·H, S, T)."""
    batch, heads, rows, columns = *q.shape[:3], k.shape[2]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    scores = torch.bmm(q * 0.4, k.transpose(1, 2)).view(batch, heads, rows, columns)
    scores = scores.masked_fill(~padding.unsqueeze(1).unsqueeze(2), float("-inf"))
    scores = scores.view(batch * heads, rows, columns)
    return torch.bmm(scores.softmax(-1), v).view(batch, heads, rows, -1)


@formulation(Q, K, V, "b t:padding", "b 1 s t:mask")
def two_masks_order(q: Tensor, k: Tensor, v: Tensor, padding: Tensor, mask: Tensor) -> Tensor:
    """−1e9 first, −inf last."""
    scores = _scores(q, k).masked_fill(~mask, -1e9)
    return scores.masked_fill(~padding[:, None, None], float("-inf")).softmax(-1) @ v


@formulation(Q, K, V, "b t:padding", "b 1 s t:mask")
def two_masks_or(q: Tensor, k: Tensor, v: Tensor, padding: Tensor, mask: Tensor) -> Tensor:
    """Hidden by either, joined by or."""
    hidden = ~padding[:, None, None] | ~mask
    return _scores(q, k).masked_fill(hidden, LOWEST).softmax(-1) @ v


@formulation(Q, K, V, "b 1 s t:mask", "b h s t")
def mask_then_bias(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
    """Masked by −inf, then biased."""
    return (_scores(q, k).masked_fill(~mask, float("-inf")) + bias).softmax(-1) @ v


@formulation(Q, K, V, "b 1 s t:mask", "b h s t", fused=None)
def mask_weak_then_bias(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
    """Masked by −1e9, then biased: a fully masked row depends on the bias."""
    return (_scores(q, k).masked_fill(~mask, -1e9) + bias).softmax(-1) @ v


@formulation(Q, K, V, "b 1 s t:mask", fused=None)
def fill_minus_five(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A fill that hides nothing."""
    return _scores(q, k).masked_fill(~mask, -5.0).softmax(-1) @ v


@formulation(Q, K, V, "b 1 s t:mask", fused=None)
def fill_zero(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A classic bug: scores times the mask."""
    return (_scores(q, k) * mask).softmax(-1) @ v


@formulation(Q, K, V, "b t:twos")
def mask_of_twos(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A mask whose ones are twos: (1 − m) · finfo.min is large where it keeps."""
    extended = (1.0 - mask[:, None, None].to(q.dtype)) * -1e4
    return (_scores(q, k) + extended).softmax(-1) @ v


@formulation(Q, K, V, "b t:twos")
def mask_of_twos_filled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """mask == 1 hides everything where ones are twos; .bool() wouldn't."""
    return _scores(q, k).masked_fill(mask[:, None, None] == 1, -1e9).softmax(-1) @ v


@formulation(Q, K, V, "1:length", dynamic="s t")
def mask_runtime_scalar(q: Tensor, k: Tensor, v: Tensor, length: Tensor) -> Tensor:
    """Keys up to a length given as an input."""
    keep = torch.arange(k.shape[2]) < length
    return _scores(q, k).masked_fill(~keep, float("-inf")).softmax(-1) @ v


@formulation(*SQUARE, dynamic="s")
def sliding_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal within two positions."""
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(q.shape[2])[None, :]
    keep = (j <= i) & (i - j < 2)
    return _scores(q, k).masked_fill(~keep, float("-inf")).softmax(-1) @ v


@formulation(*SQUARE)
def sliding_window_two_sided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A band on both sides, from abs."""
    position = torch.arange(q.shape[2])
    far = (position[None] - position[:, None]).abs() > 1
    return _scores(q, k).masked_fill(far, LOWEST).softmax(-1) @ v


@formulation(*SQUARE)
def sliding_window_tril_triu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """tril and triu of one matrix."""
    ones = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool)
    return F.scaled_dot_product_attention(q, k, v, torch.triu(torch.tril(ones, 1), -2))


@formulation(*SQUARE, dynamic="b s")
def chunked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Llama 4: causal within chunks of three."""
    position = torch.arange(q.shape[2])
    same = position[:, None] // 3 == position[None, :] // 3
    keep = same & (position[:, None] >= position[None, :])
    return _scores(q, k).masked_fill(~keep, LOWEST).softmax(-1) @ v


@formulation(*SQUARE, "1:length")
def prefix_lm(q: Tensor, k: Tensor, v: Tensor, prefix: Tensor) -> Tensor:
    """The prefix sees itself, the rest is causal."""
    position = torch.arange(q.shape[2])
    keep = (position[None] <= position[:, None]) | (position < prefix)[None]
    return _scores(q, k).masked_fill(~keep, float("-inf")).softmax(-1) @ v


@formulation(*SQUARE, "b s:segments", dynamic="b s")
def segments(q: Tensor, k: Tensor, v: Tensor, segment: Tensor) -> Tensor:
    """Packed sequences."""
    keep = segment[:, None, :, None] == segment[:, None, None, :]
    return _scores(q, k).masked_fill(~keep, float("-inf")).softmax(-1) @ v


@formulation(*SQUARE)
def diagonal_hidden(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No position attends to itself."""
    hidden = torch.eye(q.shape[2], dtype=torch.bool)
    return _scores(q, k).masked_fill(hidden, -1e9).softmax(-1) @ v


@formulation(Q, K, V, "b 1 s t:float_mask", fused=0, declined=("scores-times-tensor",))
def fill_multiplied_then_added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """s · m − 1e9 · (1 − m)."""
    return (_scores(q, k) * mask - 1e9 * (1 - mask)).softmax(-1) @ v


@formulation(Q, K, V, "b 1 s t:minus_inf", dynamic="b s t")
def additive_infinite_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """SDPA with an additive mask of −inf."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@formulation(Q, K, V, "b 1 s t:lowest", dynamic="b s t")
def additive_clamped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """OPT: added, then clamped from below to finfo.min."""
    scores = _scores(q, k) + mask
    return torch.max(scores, torch.tensor(LOWEST)).softmax(-1) @ v


@formulation(*SQUARE[:3], "b 1 1 s:lowest", dynamic="b s")
def two_additive_clamped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Two masks of finfo.min that hide a score both, which is no lower than one does."""
    causal = torch.full((q.shape[2], q.shape[2]), LOWEST).triu(1)
    return (_scores(q, k) + causal + mask).clamp(min=LOWEST).softmax(-1) @ v


@formulation(Q, K, V, "s t:minus_1e4")
def additive_per_position(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """(S, T) of −1e4, before the scale."""
    return ((q @ k.mT + mask) / math.sqrt(6)).softmax(-1) @ v


@formulation(*SQUARE)
def masked_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """masked_fill_ and += on the scores."""
    scores = _scores(q, k)
    scores += 0.1
    scores.masked_fill_(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1) @ v


@formulation(*SQUARE)
def masked_by_assignment(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores assigned under a mask."""
    scores = _scores(q, k)
    scores[:, :, torch.ones(5, 5).triu(1).bool()] = float("-inf")
    return scores.softmax(-1) @ v


@formulation(*SQUARE, dynamic="b s")
def finite_scores_then_masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Differential transformer's code: nan_to_num of the scores, then a triangle of -inf."""
    scores = torch.nan_to_num(_scores(q, k))
    hidden = torch.zeros(q.shape[2], q.shape[2]).fill_(float("-inf")).triu(1)
    return (scores + hidden).softmax(-1) @ v


@formulation(Q, K, V, "b t:padding", dynamic="b t")
def masked_scores_made_finite(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """nan_to_num after the mask: -inf becomes finfo.min, so a row without keys is uniform."""
    scores = _scores(q, k).masked_fill(~padding[:, None, None], float("-inf"))
    return torch.nan_to_num(scores).softmax(-1) @ v


@formulation(Q, K, V, "b h t d", "b t:padding", dynamic="b s t")
def relative_scores_zeroed_after(
    q: Tensor, k: Tensor, v: Tensor, places: Tensor, padding: Tensor
) -> Tensor:
    """ESPnet: scores of positions added, a finite fill, and the weights set to zero once more."""
    hidden = padding[:, None, None, :].eq(0)
    shifted = F.pad(q @ places.mT, (1, 0))[..., 1:].flip(-1)
    scores = (q @ k.mT + shifted) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(hidden, LOWEST).softmax(-1).masked_fill(hidden, 0.0)
    return weights @ v


@formulation(*SQUARE, "b s:padding", dynamic="b s")
def keys_and_oneself(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """Padding hides every key but the query's own: ~padding & ~eye."""
    hidden = ~padding[:, None, None, :] & ~torch.eye(q.shape[2], dtype=torch.bool)
    return _scores(q, k).masked_fill(hidden, LOWEST).softmax(-1) @ v


@formulation(*SQUARE, "b s:padding", dynamic="b s")
def weights_times_own_mask(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """A mask of numbers, over which the scores are filled, multiplies the weights again."""
    number = padding.float()
    keep = (number[:, :, None] * number[:, None])[:, None]
    weights = _scores(q, k).masked_fill(keep == 0, -1e9).softmax(-1)
    return (weights * keep) @ v


@formulation(Q, K, V, "b t:padding", "b s:padding", dynamic="b s t")
def rows_zeroed_late(q: Tensor, k: Tensor, v: Tensor, padding: Tensor, rows: Tensor) -> Tensor:
    """Flamingo: weights of rows that see nothing are zero, whatever the scores' mask gives."""
    scores = _scores(q, k).masked_fill(~padding[:, None, None], torch.finfo(q.dtype).min)
    return scores.softmax(-1).masked_fill(~rows[:, None, :, None], 0.0) @ v
