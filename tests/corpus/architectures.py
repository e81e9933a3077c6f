"""Tiny random models of the architectures in `transformers`, made from their config classes alone.

Nothing is downloaded. `build("llama", "eager")` makes one, with sample inputs, at two layers and a
width of 64; `build("llama head=CausalLM length=33", "sdpa")` another (see tests/corpus/rows.py).
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.export import Dim

from tests.corpus.inputs import sample_inputs
from tests.corpus.rows import Row, parse_row
from tests.models import peaked

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

MAX_PARAMETERS = 40_000_000

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
    1: "n_group topk_group first_k_dense_replace bos_token_id image_token_id image_token_index",
    0: "pad_token_id",
}
SMALL = {name: size for size, names in NAMES.items() for name in names.split()}
# Sizes that stay equal where they are: of attentions whose keys are of one latent vector.
LATENT = (("head_dim", "qk_rope_head_dim"), ("num_key_value_heads", "num_attention_heads"))


@dataclass(frozen=True)
class Architecture:
    """A tiny model in eval mode with the positional inputs that it takes, by name.

    `dynamic_shapes` is torch.export's, None where every dim is static.
    """

    module: nn.Module
    args: tuple[Tensor, ...]
    input_names: tuple[str, ...]
    dynamic_shapes: tuple[tuple[dict[int, Dim] | None, ...]] | None = None

    def of_any_size(self) -> Architecture:
        """With dims that take what the model takes of them, where it doesn't take all of 2..64."""
        assert self.dynamic_shapes is not None
        (shapes,) = self.dynamic_shapes
        names = {dim.__name__ for shape in shapes for dim in (shape or {}).values()}
        dims = {name: Dim(name) for name in names}
        opened = tuple(
            shape and {axis: dims[dim.__name__] for axis, dim in shape.items()} for shape in shapes
        )
        return replace(self, dynamic_shapes=(opened,))


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
    feed, fixed = sample_inputs(model, row)
    module = FirstTensor(model, tuple(feed), fixed).eval()
    return Architecture(module, tuple(feed.values()), tuple(feed), _dynamic(feed, row.dims))


class FirstTensor(nn.Module):
    """Calls the model with its positional inputs by name and returns one tensor of its outputs.

    It is the last hidden state, or the first tensor where there is none.
    """

    def __init__(
        self, model: PreTrainedModel, names: tuple[str, ...], fixed: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        self.model, self.names = model, names
        cached = "use_cache" in inspect.signature(model.forward).parameters
        self.flags = {"use_cache": False} if cached else {}
        self.constants = tuple(fixed)
        for name, value in fixed.items():
            self.register_buffer(f"fixed_{name}", value, persistent=False)

    def forward(self, *inputs: Tensor) -> Tensor:
        feed = dict(zip(self.names, inputs, strict=True))
        feed |= {name: getattr(self, f"fixed_{name}") for name in self.constants}
        result = self.model(**feed, **self.flags, return_dict=True)
        found = result.get("last_hidden_state")
        if isinstance(found, Tensor):
            return found
        return next(value for value in result.values() if isinstance(value, Tensor))


def _model(row: Row, attention: str) -> PreTrainedModel:
    import transformers

    config = _config(row, attention)
    maker = getattr(transformers, f"AutoModelFor{row.head}" if row.head else "AutoModel")
    if row.head or type(config) in maker._model_mapping:
        make = maker.from_config
    else:
        make = _own_class(config)._from_config
    model: PreTrainedModel = make(config, attn_implementation=attention)
    return model


def _own_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The model that is made of this config, where it is no `AutoModel`: a part of another one."""
    from transformers import PreTrainedModel

    module = importlib.import_module(type(config).__module__.replace("configuration", "modeling"))
    made = [
        found
        for found in vars(module).values()
        if isinstance(found, type)
        and issubclass(found, PreTrainedModel)
        and found.config_class is type(config)
        and found.forward is not PreTrainedModel.forward
    ]
    return next((found for found in made if found.__name__.endswith("Model")), made[-1])


def _config(row: Row, attention: str) -> PreTrainedConfig:
    from transformers import CONFIG_MAPPING

    parts = {key: value for key, value in row.options.items() if _is_part(value)}
    config = CONFIG_MAPPING[row.model_type](**parts)
    _shrink(config)
    for key, value in row.options.items():
        if key in parts:
            continue
        *path, name = key.split(".")
        setattr(reduce(getattr, path, config), name, value)
    config.use_cache = False
    config._attn_implementation = attention
    return config


def _is_part(value: object) -> bool:
    """Whether it is a config of its own, which the whole one is made with."""
    return isinstance(value, dict) and "model_type" in value


def _are_equal(config: PreTrainedConfig, name: str, other: str) -> bool:
    return getattr(config, name, None) == getattr(config, other, None) is not None


def _shrink(config: PreTrainedConfig) -> None:
    from transformers import PreTrainedConfig

    for part in [*vars(config).values()]:
        if isinstance(part, PreTrainedConfig):
            _shrink(part)
    equal = [pair for pair in LATENT if _are_equal(config, *pair)]
    for name, value in SMALL.items():
        if isinstance(getattr(config, name, None), int | float):
            # A config may compute the size from another, or refuse ours: then it keeps its own.
            with contextlib.suppress(AttributeError, TypeError, ValueError, NotImplementedError):
                setattr(config, name, value)
    for name, other in equal:
        setattr(config, name, getattr(config, other))
    if kinds := list(dict.fromkeys(getattr(config, "layer_types", None) or [])):
        with contextlib.suppress(AttributeError):  # some compute the kinds from other options
            config.layer_types = (kinds * 2)[:2]


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
