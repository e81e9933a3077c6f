"""The suite's real models, as data: tiny, random, and built so that a wrong attention shows.

`CASES` lists every model; `case.build()` makes one. A model is static when it is captured without
its `dynamic_shapes`, dynamic with them. Weights are re-initialised so that attention is peaked:
under the default init it is nearly uniform and a dropped mask goes unseen. Biases are not zero and
norm weights are not one, so that a dropped one shows too. Rows of a batch are padded on the left by
different lengths and have a hole, and no two of batch, sequence, heads and key-value heads are
equal.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.export import Dim

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Sizes = Mapping[str, int]
Args = tuple[Tensor, ...]

HIDDEN, HEADS, LAYERS, FEED_FORWARD, VOCABULARY, POSITIONS = 64, 4, 2, 96, 120, 64
BATCH = Dim("batch", max=1024)
SEQ = Dim("seq", max=POSITIONS)
TARGET = Dim("target", max=POSITIONS)
TRACED = {"batch": 3, "seq": 9, "target": 7}
OTHERS = ({"batch": 5, "seq": 14, "target": 6}, {"batch": 1, "seq": 5, "target": 11})


@dataclass(frozen=True)
class Built:
    """One model with everything a test asks of it.

    `inputs(sizes)` makes positional inputs for any size of the named dims; `args` are those of the
    traced size. `sites` counts the attentions. `unmasked` maps each mask's name to the same model
    and inputs with that mask dropped.
    """

    module: nn.Module
    inputs: Callable[[Sizes], Args]
    input_names: tuple[str, ...]
    dynamic_shapes: tuple[dict[int, Dim], ...]
    sites: int
    unmasked: dict[str, tuple[nn.Module, Args]] = field(default_factory=dict)

    @property
    def args(self) -> Args:
        return self.inputs(TRACED)

    @property
    def sizes(self) -> tuple[dict[str, int], ...]:
        """Sizes to test besides the traced one, for the dims that this model has."""
        names = {dim.__name__ for axes in self.dynamic_shapes for dim in axes.values()}
        return tuple({name: sizes[name] for name in sizes if name in names} for sizes in OTHERS)


@dataclass(frozen=True)
class Case:
    """A named model of the suite; `build` is deterministic."""

    name: str
    build: Callable[[], Built]


def peaked(module: nn.Module, gain: float = 1.5) -> nn.Module:
    """Re-initialise in place, for attention scores with a standard deviation of about `gain`²."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                if name.endswith("bias"):
                    parameter.normal_(0, 0.2, generator=random)
                elif parameter.ndim < 2:
                    parameter.normal_(1, 0.2, generator=random)
                else:
                    transposed = (
                        type(owner).__name__ == "Conv1D"
                    )  # GPT-2 keeps weights as (in, out)
                    fan_in = parameter.shape[0] if transposed else parameter[0].numel()
                    parameter.normal_(0, gain / fan_in**0.5, generator=random)
    return module.eval()


def present(batch: int, seq: int) -> Tensor:
    """(B, S) bool, true where there is a token.

    Row b is padded on the left by b % 3 and has a hole before its last token.
    """
    position, padding = torch.arange(seq), torch.arange(batch)[:, None] % 3
    return (position >= padding) & ((position != seq - 2) | (seq < 4))


def tokens(batch: int, seq: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, seq), generator=random)


def states(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# torch.nn


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


# transformers


class Text(nn.Module):
    """A transformers model of token ids and perhaps a padding mask, returning `outputs`."""

    def __init__(self, model: PreTrainedModel, outputs: tuple[str, ...], cached: bool) -> None:
        super().__init__()
        self.model, self.outputs = model, outputs
        self.fixed = {"use_cache": False} if cached else {}

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Args:
        result = self.model(input_ids=input_ids, attention_mask=attention_mask, **self.fixed)
        return tuple(result[name] for name in self.outputs)


class TextToText(nn.Module):
    """A transformers encoder-decoder, returning its logits."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_ids: Tensor) -> Tensor:
        return self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_ids,
            use_cache=False,
        ).logits


class Vision(nn.Module):
    """A transformers image model, returning its hidden states."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.model(pixel_values).last_hidden_state


def _text(
    model: PreTrainedModel, outputs: tuple[str, ...], causal: bool = False, padded: bool = True
) -> Built:
    def inputs(sizes: Sizes) -> Args:
        batch, seq = sizes["batch"], sizes["seq"]
        mask = present(batch, seq).long()
        return (tokens(batch, seq), mask) if padded else (tokens(batch, seq),)

    module = Text(model, outputs, cached=causal)
    peaked(module)
    args = inputs(TRACED)
    unmasked: dict[str, tuple[nn.Module, Args]] = {}
    if padded:
        unmasked["padding"] = (module, (args[0], torch.ones_like(args[1])))
    if causal:
        unmasked["causal"] = (_acausal(module), args)
    return Built(
        module,
        inputs,
        ("input_ids", "attention_mask")[: len(args)],
        ({0: BATCH, 1: SEQ},) * len(args),
        LAYERS,
        unmasked,
    )


def _acausal(module: nn.Module) -> nn.Module:
    """A copy in which every transformers sub-module attends both ways."""
    module = copy.deepcopy(module)
    for part in module.modules():
        if isinstance(getattr(part, "is_causal", None), bool):
            part.is_causal = False
        if (config := getattr(part, "config", None)) is not None:
            config.is_causal = False
    return module


def _bert(attention: str) -> Built:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_hidden_layers=LAYERS,
        intermediate_size=FEED_FORWARD,
        vocab_size=VOCABULARY,
        max_position_embeddings=POSITIONS,
        attn_implementation=attention,
    )
    return _text(BertModel(config), ("last_hidden_state", "pooler_output"))


def _gpt2(attention: str, padded: bool) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=HIDDEN,
        n_head=HEADS,
        n_layer=LAYERS,
        n_inner=FEED_FORWARD,
        n_positions=POSITIONS,
        vocab_size=VOCABULARY,
        attn_implementation=attention,
        **_SPECIAL_TOKENS,
    )
    return _text(GPT2LMHeadModel(config), ("logits",), causal=True, padded=padded)


def _llama(attention: str, padded: bool) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        num_hidden_layers=LAYERS,
        intermediate_size=FEED_FORWARD,
        max_position_embeddings=POSITIONS,
        vocab_size=VOCABULARY,
        attn_implementation=attention,
        **_SPECIAL_TOKENS,
    )
    return _text(LlamaForCausalLM(config), ("logits",), causal=True, padded=padded)


def _vit(attention: str) -> Built:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_hidden_layers=LAYERS,
        intermediate_size=FEED_FORWARD,
        image_size=24,
        patch_size=8,
        attn_implementation=attention,
    )
    module = Vision(ViTModel(config, add_pooling_layer=False))
    peaked(module)

    def inputs(sizes: Sizes) -> Args:
        return (states(sizes["batch"], 3, 24, 24),)

    return Built(module, inputs, ("pixel_values",), ({0: BATCH},), LAYERS)


def _t5(attention: str) -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=HIDDEN,
        num_heads=HEADS,
        d_kv=HIDDEN // HEADS,
        num_layers=LAYERS,
        num_decoder_layers=LAYERS,
        d_ff=FEED_FORWARD,
        vocab_size=VOCABULARY,
        decoder_start_token_id=0,
        attn_implementation=attention,
    )
    module = TextToText(T5ForConditionalGeneration(config))
    peaked(module, gain=0.75)  # T5 does not divide its scores by √d

    def inputs(sizes: Sizes) -> Args:
        batch, seq, target = sizes["batch"], sizes["seq"], sizes["target"]
        return tokens(batch, seq), present(batch, seq).long(), tokens(batch, target, seed=1)

    ids, mask, decoder_ids = inputs(TRACED)
    return Built(
        module,
        inputs,
        ("input_ids", "attention_mask", "decoder_ids"),
        ({0: BATCH, 1: SEQ}, {0: BATCH, 1: SEQ}, {0: BATCH, 1: TARGET}),
        3 * LAYERS,
        {
            "padding": (module, (ids, torch.ones_like(mask), decoder_ids)),
            "causal": (_acausal(module), (ids, mask, decoder_ids)),
        },
    )


_SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

CASES: tuple[Case, ...] = (
    Case("mha", partial(_mha, weights=False)),
    Case("mha-weights", partial(_mha, weights=True)),
    Case("encoder", partial(_encoder, prenorm=False)),
    Case("encoder-prenorm", partial(_encoder, prenorm=True)),
    Case("decoder", _decoder),
    *(
        Case(f"{name}-{attention}", partial(build, attention))
        for name, build in (
            ("bert", _bert),
            ("gpt2", partial(_gpt2, padded=True)),
            ("gpt2-unpadded", partial(_gpt2, padded=False)),
            ("llama", partial(_llama, padded=True)),
            ("llama-unpadded", partial(_llama, padded=False)),
            ("vit", _vit),
            ("t5", _t5),
        )
        for attention in ("eager", "sdpa")
    ),
)
