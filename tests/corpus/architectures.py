"""Tiny random models of the architectures in `transformers`, made from their config classes alone.

Nothing is downloaded. `build("llama", "eager")` makes one, with sample inputs, at two layers and a
width of 64; `build("llama head=CausalLM length=33", "sdpa")` another (see tests/corpus/rows.py).
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from tests.corpus.rows import Row, parse_row
from tests.models import peaked, present, states, tokens

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

MAX_PARAMETERS = 40_000_000
BATCH, LENGTH = 3, 16
FRAMES, SAMPLES = 128, 4000  # of audio: a spectrogram's, a waveform's

# What the architectures call their sizes. A config is shrunk in those that it has.
NAMES: dict[int, str] = {
    120: "vocab_size",
    96: "intermediate_size ffn_dim d_ff n_inner hidden_dim encoder_ffn_dim decoder_ffn_dim",
    64: "hidden_size d_model n_embd dim emb_dim embedding_size encoder_hidden_size "
    "max_position_embeddings n_positions n_ctx max_source_positions max_target_positions",
    48: "moe_intermediate_size",
    32: "q_lora_rank kv_lora_rank projection_dim image_size",
    16: "head_dim d_kv qk_nope_head_dim v_head_dim num_mel_bins",
    8: "rotary_dim qk_rope_head_dim patch_size",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
    "decoder_attention_heads num_experts num_local_experts n_routed_experts",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
    "num_decoder_layers num_key_value_heads num_experts_per_tok num_codebooks eos_token_id",
    1: "n_group topk_group first_k_dense_replace bos_token_id",
    0: "pad_token_id",
}
SMALL = {name: size for size, names in NAMES.items() for name in names.split()}


class UnknownInputError(NotImplementedError):
    """No sample input is known for what the model asks for."""


@dataclass(frozen=True)
class Architecture:
    """A tiny model in eval mode with the positional inputs that it takes, by name.

    `dynamic_shapes` is torch.export's, None where every dim is static.
    """

    module: nn.Module
    args: tuple[Tensor, ...]
    input_names: tuple[str, ...]
    dynamic_shapes: tuple[tuple[dict[int, Dim] | None, ...]] | None = None


def build(text: str, attention: str = "eager") -> Architecture:
    """Build the row `text` with random, peaked weights and `attention` "eager" or "sdpa".

    Raises MemoryError where the architecture stays too large when shrunk, UnknownInputError where
    its input is of an unknown kind, and what transformers raises where it can't be built.
    """
    row = parse_row(text)
    with _quiet():
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in _model(row, attention).parameters())
        if size > MAX_PARAMETERS:
            raise MemoryError(f"{text} has {size:,} parameters even when shrunk")
        torch.manual_seed(0)
        model = _model(row, attention).float()
    peaked(model)
    feed = _inputs(model, row.length or LENGTH)
    module = FirstTensor(model, tuple(feed)).eval()
    return Architecture(module, tuple(feed.values()), tuple(feed), _dynamic(feed, row.dims))


class FirstTensor(nn.Module):
    """Calls the model with its positional inputs by name and returns its first tensor output."""

    def __init__(self, model: PreTrainedModel, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names
        cached = "use_cache" in inspect.signature(model.forward).parameters
        self.fixed = {"use_cache": False} if cached else {}

    def forward(self, *inputs: Tensor) -> Tensor:
        feed = dict(zip(self.names, inputs, strict=True))
        result = self.model(**feed, **self.fixed, return_dict=True)
        return next(value for value in result.values() if isinstance(value, Tensor))


def _model(row: Row, attention: str) -> PreTrainedModel:
    import transformers

    config = _config(row, attention)
    maker = getattr(transformers, f"AutoModelFor{row.head}" if row.head else "AutoModel")
    model: PreTrainedModel = maker.from_config(config, attn_implementation=attention)
    return model


def _config(row: Row, attention: str) -> PreTrainedConfig:
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[row.model_type]()
    for name in getattr(config, "sub_configs", None) or {}:
        if getattr(config, name, None) is not None:
            _shrink(getattr(config, name))
    _shrink(config)
    for key, value in row.options.items():
        *path, name = key.split(".")
        setattr(reduce(getattr, path, config), name, value)
    config.use_cache = False
    config._attn_implementation = attention
    return config


def _shrink(config: PreTrainedConfig) -> None:
    for name, value in SMALL.items():
        if isinstance(getattr(config, name, None), int | float):
            # A config may compute the size from another, or refuse ours: then it keeps its own.
            with contextlib.suppress(AttributeError, TypeError, ValueError, NotImplementedError):
                setattr(config, name, value)
    if kinds := list(dict.fromkeys(getattr(config, "layer_types", None) or [])):
        config.layer_types = (kinds * 2)[:2]


def _inputs(model: PreTrainedModel, length: int) -> dict[str, Tensor]:
    """Sample inputs by name, in the order in which `FirstTensor` takes them."""
    config: Any = model.config
    names = inspect.signature(model.forward).parameters
    match model.main_input_name:
        case "input_ids":
            feed = {"input_ids": tokens(BATCH, length)}
            if "attention_mask" in names:
                feed["attention_mask"] = present(BATCH, length).long()
            if "decoder_input_ids" in names:
                feed["decoder_input_ids"] = tokens(BATCH, length // 2, seed=1)
            vision = getattr(config, "vision_config", None)
            if "pixel_values" in names and vision is not None:
                feed["pixel_values"] = states(BATCH, 3, vision.image_size, vision.image_size)
            return feed
        case "pixel_values":
            side = getattr(config, "image_size", None) or 32
            side = side if isinstance(side, int) else side[0]
            channels = getattr(config, "num_channels", 3)
            feed = {"pixel_values": states(BATCH, channels, side, side)}
            if "noise" in names:  # else the model draws its own, and no two runs agree
                feed["noise"] = states(BATCH, (side // config.patch_size) ** 2)
            return feed
        case "input_features":
            bins = getattr(config, "num_mel_bins", None) or 80
            return {"input_features": states(BATCH, bins, FRAMES)}
        case "input_values":
            return {"input_values": states(BATCH, SAMPLES)}
        case other:
            raise UnknownInputError(f"no sample input is known for {other}")


def _dynamic(
    feed: Mapping[str, Tensor], dims: Sequence[str]
) -> tuple[tuple[dict[int, Dim] | None, ...]] | None:
    """The batch, and the lengths of the token inputs, as dims; the decoder's length is its own."""
    if not dims:
        return None
    made = {name: Dim(name, min=2, max=64) for name in (*dims, "target")}
    shapes: list[dict[int, Dim]] = []
    for name, tensor in feed.items():
        length = "target" if name.startswith("decoder") else "seq"
        shapes.append({0: made["batch"]} if "batch" in dims else {})
        if "seq" in dims and tensor.ndim == 2 and ("input_ids" in name or "mask" in name):
            shapes[-1][1] = made[length]
    return (tuple(shape or None for shape in shapes),)  # they are one starred parameter


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the advice that configs of default values give while they are built."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
