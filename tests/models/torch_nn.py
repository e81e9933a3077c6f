"""torch.nn's own attention: MultiheadAttention, TransformerEncoder, TransformerDecoder."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor, nn

from tests.models.kit import (
    BATCH,
    FEED_FORWARD,
    HEADS,
    HIDDEN,
    LAYERS,
    SEQ,
    TARGET,
    TRACED,
    Args,
    Built,
    Case,
    Sizes,
    peaked,
    present,
    states,
)


class SelfAttention(nn.Module):
    """nn.MultiheadAttention over one input; with `weights` it also returns them, per head."""

    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)
        self.weights = weights

    def forward(self, x: Tensor, absent: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        context, weights = self.attention(
            x, x, x, absent, need_weights=self.weights, average_attn_weights=False
        )
        return (context, weights) if self.weights else context


class RaggedEncoder(nn.Module):
    """nn.TransformerEncoder of batches padded on the right, which are told by their lengths."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, FEED_FORWARD, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        absent = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
        return self.encoder(x, src_key_padding_mask=absent)


class Encoder(nn.Module):
    """nn.TransformerEncoder, post-norm with batch first, or pre-norm with the sequence first."""

    def __init__(self, prenorm: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            HIDDEN,
            HEADS,
            FEED_FORWARD,
            activation="gelu" if prenorm else "relu",
            batch_first=not prenorm,
            norm_first=prenorm,
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, x: Tensor, absent: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=absent)


class Decoder(nn.Module):
    """nn.TransformerDecoder with a causal target mask over a padded memory of another length."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(HIDDEN, HEADS, FEED_FORWARD, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, LAYERS)
        self.causal = True

    def forward(self, target: Tensor, memory: Tensor, absent: Tensor) -> Tensor:
        length = target.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length) if self.causal else None
        mask = mask if mask is None else mask.to(target.dtype)
        return self.decoder(
            target,
            memory,
            tgt_mask=mask,
            tgt_is_causal=self.causal,
            memory_key_padding_mask=absent,
        )


def _self_attention(module: nn.Module, sites: int, batch_axis: int = 0) -> Built:
    """A module over x (B, S, H), or (S, B, H) when `batch_axis` is 1, and absent (B, S) bool."""

    def inputs(sizes: Sizes) -> Args:
        batch, seq = sizes["batch"], sizes["seq"]
        return states(batch, seq, HIDDEN).transpose(0, batch_axis), ~present(batch, seq)

    peaked(module)
    x, absent = inputs(TRACED)
    return Built(
        module,
        inputs,
        ("x", "absent"),
        ({batch_axis: BATCH, 1 - batch_axis: SEQ}, {0: BATCH, 1: SEQ}),
        sites,
        {"padding": (module, (x, torch.zeros_like(absent)))},
    )


def _mha(weights: bool) -> Built:
    return _self_attention(SelfAttention(weights), sites=1)


def _encoder(prenorm: bool) -> Built:
    return _self_attention(Encoder(prenorm), LAYERS, batch_axis=1 if prenorm else 0)


def _ragged_encoder() -> Built:
    """Of x (B, S, H) and lengths (B,), the first of them S and no other."""

    def inputs(sizes: Sizes) -> Args:
        batch, seq = sizes["batch"], sizes["seq"]
        return states(batch, seq, HIDDEN), seq - torch.arange(batch) * 2 % seq

    module = RaggedEncoder()
    peaked(module)
    x, lengths = inputs(TRACED)
    return Built(
        module,
        inputs,
        ("x", "lengths"),
        ({0: BATCH, 1: SEQ}, {0: BATCH}),
        LAYERS,
        {"padding": (module, (x, torch.full_like(lengths, x.shape[1])))},
    )


def _decoder() -> Built:
    def inputs(sizes: Sizes) -> Args:
        batch, seq, target = sizes["batch"], sizes["seq"], sizes["target"]
        memory = states(batch, seq, HIDDEN, seed=1)
        return states(batch, target, HIDDEN), memory, ~present(batch, seq)

    module = Decoder()
    peaked(module)
    target, memory, absent = inputs(TRACED)
    acausal = copy.deepcopy(module)
    acausal.causal = False
    return Built(
        module,
        inputs,
        ("target", "memory", "absent"),
        ({0: BATCH, 1: TARGET}, {0: BATCH, 1: SEQ}, {0: BATCH, 1: SEQ}),
        2 * LAYERS,
        {
            "padding": (module, (target, memory, torch.zeros_like(absent))),
            "causal": (acausal, (target, memory, absent)),
        },
    )


CASES = (
    Case("mha", partial(_mha, weights=False)),
    Case("mha-weights", partial(_mha, weights=True)),
    Case("encoder", partial(_encoder, prenorm=False)),
    Case("encoder-prenorm", partial(_encoder, prenorm=True)),
    Case("encoder-lengths", _ragged_encoder),
    Case("decoder", _decoder),
)
