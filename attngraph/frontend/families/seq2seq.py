"""An encoder-decoder of `transformers` as modules whose caches are explicit.

The keys and values that the decoder's cross-attentions read don't depend on its tokens. The encoder
returns them beside its hidden states, so they are computed once; to the decoder they are inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from attngraph.errors import UsageError, reason_of
from attngraph.frontend.families.causal_lm import can_generate
from attngraph.frontend.interface.modalities import beside_text, cache_parameter, refuse_mixed
from attngraph.frontend.model import Model

_TOKENS, _PAST, _SAMPLES, _FRAMES = 3, 5, 4000, 40
Past = list[dict[str, dict[str, Tensor]]]
"""For each layer, under "decoder" and under "encoder", a "key" and a "value" (B, G, T, D)."""
_KINDS, _PARTS = ("decoder", "encoder"), ("key", "value")


def is_seq2seq(module: Any) -> bool:
    """Whether the module is an encoder-decoder of transformers that can generate."""
    return can_generate(module) and bool(module.config.is_encoder_decoder)


@dataclass(frozen=True)
class Parts:
    """An encoder-decoder as the models that are compiled.

    `memory` maps each input of the decoder that stays the same in all steps to the output, or
    input, of the encoder that it is, and `presents` each of its pasts to the output that takes its
    place. `keys` computes from its hidden states what the encoder gives of the memory, for a file
    that begins with these. `whole` takes the encoder's inputs as a dict and the decoder's tokens so
    far, and returns their logits (B, S, V) without any cache. A token `pad` among these may count
    no position, which a cache of the tokens before it doesn't tell.
    """

    encoder: Model
    decoder: Model
    whole: nn.Module
    memory: Mapping[str, str]
    presents: Mapping[str, str]
    keys: Model | None = None
    pad: int | None = None


class _Seq2Seq(nn.Module):
    """`kind` is the class of what the model's encoder returns."""

    def __init__(self, model: nn.Module, kind: type[Any]) -> None:
        super().__init__()
        self.model = model
        self.kind = kind

    def _run(self, hidden: Tensor, mask: Tensor | None, ids: Tensor, cache: Any) -> Any:
        """A run of the decoder on what the encoder gave."""
        given = {cache_parameter(self.model.forward): cache}
        if mask is not None:
            given["attention_mask"] = mask
        return self.model(
            encoder_outputs=self.kind(last_hidden_state=hidden),
            decoder_input_ids=ids,
            use_cache=True,
            **given,
        )

    def _crossed(self, hidden: Tensor, mask: Tensor | None) -> list[dict[str, dict[str, Tensor]]]:
        """What the cross-attentions keep of the encoder's hidden states."""
        ids = torch.zeros(hidden.shape[0], 1, dtype=torch.long, device=hidden.device)
        cache = _filled([])
        self._run(hidden, mask, ids, cache)
        return [{"encoder": layer} for layer in _tensors(cache.cross_attention_cache)]


class Encoder(_Seq2Seq):
    """What is encoded to hidden states (B, T, H), and for each layer of the decoder the key and the
    value (B, G, T, D) of its cross-attention.
    """

    def forward(self, source: dict[str, Tensor]) -> dict[str, Any]:
        model: Any = self.model
        hidden = model.get_encoder()(**source)[0]
        present = self._crossed(hidden, source.get("attention_mask"))
        return {"last_hidden_state": hidden, "present": present}


class CachedDecoder(_Seq2Seq):
    """Tokens (B, S), the encoder's mask (B, T) and the past to logits (B, S, V) and the presents.

    The past has the keys and values of the tokens so far, and those of the encoder's output.
    """

    def __init__(self, model: nn.Module, kind: type[Any], width: int) -> None:
        super().__init__(model, kind)
        self.width = width

    def forward(
        self, input_ids: Tensor, encoder_attention_mask: Tensor | None, past: Past
    ) -> dict[str, Any]:
        cache, key = _filled(past), past[0]["encoder"]["key"]
        unread = key.new_zeros(1, 1, 1).expand(key.shape[0], key.shape[2], self.width)
        result = self._run(unread, encoder_attention_mask, input_ids, cache)
        present = [{"decoder": layer} for layer in _tensors(cache.self_attention_cache)]
        return {"logits": result.logits, "present": present}


class CrossKeys(_Seq2Seq):
    """Hidden states (B, T, H) to the keys and values (B, G, T, D) of all cross-attentions."""

    def forward(self, encoder_hidden_states: Tensor) -> dict[str, Any]:
        return {"present": self._crossed(encoder_hidden_states, None)}


class Uncached(nn.Module):
    """The model on what is encoded and all tokens so far."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: dict[str, Tensor], ids: Tensor) -> Tensor:
        logits: Tensor = self.model(**source, decoder_input_ids=ids, use_cache=False).logits
        return logits


def of_transformers(
    module: nn.Module, source: Mapping[str, Tensor] | None, shapes: Any, name: str
) -> Parts:
    """The parts of an encoder-decoder of transformers.

    `source` are samples of what it encodes, by name, with torch.export's dynamic `shapes`, to which
    rows are added where they aren't there; without them they are made for token ids, features of
    sound, sound and images. Raises UsageError where they can't be, where the model encodes more
    than that, or where it doesn't keep its keys and values in a cache of transformers.
    """
    if beside_text(type(module), source or ()):
        refuse_mixed(type(module), name)
    if source is None:
        source, shapes = sample_source(module, name)
    traced = _Traced.of(module, dict(source), _with_rows(source, shapes or {}), name)
    memory = traced.names("past_key_values", "encoder", "present")
    if "attention_mask" in source:
        memory["encoder_attention_mask"] = "attention_mask"
    return Parts(
        traced.encoder(),
        traced.decoder(),
        Uncached(module),
        memory,
        traced.names("past_key_values", "decoder", "present"),
        traced.keys(),
        _pad_of(module),
    )


@dataclass(frozen=True)
class _Traced:
    """Samples to trace each part with. `encoded` is the dim of the encoder's length, if any."""

    module: nn.Module
    source: dict[str, Tensor]
    shapes: dict[str, Any]
    name: str
    probed: _Probed
    rows: Any
    encoded: Any
    new: Any = field(default_factory=lambda: Dim("seq"))
    before: Any = field(default_factory=lambda: Dim("past"))

    @classmethod
    def of(
        cls, module: nn.Module, source: dict[str, Tensor], shapes: dict[str, Any], name: str
    ) -> _Traced:
        probed = _probe(module, source, name)
        length = int(probed.hidden.shape[1])
        return cls(
            module,
            source,
            shapes,
            name,
            probed,
            next(axes[0] for axes in shapes.values()),
            _encoded(source, shapes, length),
        )

    @property
    def mask(self) -> Tensor | None:
        return self.source.get("attention_mask")

    @property
    def ids(self) -> Tensor:
        seed, rows = torch.Generator().manual_seed(0), self.probed.hidden.shape[0]
        return torch.randint(self.probed.logits.shape[-1], (rows, _TOKENS), generator=seed)

    @property
    def past(self) -> Past:
        seed = torch.Generator().manual_seed(0)

        def drawn(kind: str, like: Tensor) -> Tensor:
            rows, heads, tokens, width = like.shape
            tokens = tokens if kind == "encoder" else _PAST
            return torch.randn((rows, heads, tokens, width), generator=seed).to(like.dtype)

        return [
            {kind: {part: drawn(kind, layer[kind][part]) for part in _PARTS} for kind in _KINDS}
            for layer in self.probed.layers
        ]

    def names(self, old: str, kind: str, new: str) -> dict[str, str]:
        """From names of the cache of one kind to others."""
        return {
            f"{old}.{layer}.{kind}.{part}": f"{new}.{layer}.{kind}.{part}"
            for layer in range(len(self.probed.layers))
            for part in _PARTS
        }

    def called(self, own: str, new: str) -> dict[str, str]:
        """The names of the cache, by its names in the trace."""
        return {
            name.replace(new, own).replace(".", "_"): name
            for kind in _KINDS
            for name in self.names(new, kind, new)
        }

    def axes(self, axis: int) -> dict[int, Any]:
        """The dynamic axes of a tensor with the batch first and the encoder's length in `axis`."""
        return {0: self.rows} if self.encoded is None else {0: self.rows, axis: self.encoded}

    def encoder(self) -> Model:
        return Model.of_module(
            Encoder(self.module, self.probed.kind),
            (self.source,),
            {"source": {each: self.shapes.get(each) for each in self.source}},
            f"the encoder of {self.name}",
            names={
                **{f"source_{each}": each for each in self.source},
                **self.called("present", "present"),
            },
        )

    def decoder(self) -> Model:
        grown, held = {0: self.rows, 2: self.before}, self.axes(2)
        layer = {"decoder": dict.fromkeys(_PARTS, grown), "encoder": dict.fromkeys(_PARTS, held)}
        return Model.of_module(
            CachedDecoder(self.module, self.probed.kind, self.probed.hidden.shape[2]),
            (self.ids, self.mask, self.past),
            {
                "input_ids": {0: self.rows, 1: self.new},
                "encoder_attention_mask": self.shapes.get("attention_mask"),
                "past": [layer for _ in self.probed.layers],
            },
            f"the decoder of {self.name}",
            names={**self.called("past", "past_key_values"), **self.called("present", "present")},
        )

    def keys(self) -> Model:
        return Model.of_module(
            CrossKeys(self.module, self.probed.kind),
            (self.probed.hidden,),
            {"encoder_hidden_states": self.axes(1)},
            f"the cross-attentions' keys of {self.name}",
            names=self.called("present", "present"),
        )


def _pad_of(module: nn.Module) -> int | None:
    """The decoder's id of padding, by which some models count positions."""
    config: Any = module.config
    found = getattr(getattr(config, "decoder", config), "pad_token_id", None)
    return found if isinstance(found, int) else None


def _filled(past: Past) -> Any:
    """transformers' cache of both kinds with these tensors in it, or an empty one."""
    from transformers import DynamicCache, EncoderDecoderCache

    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    kept = (cache.self_attention_cache, cache.cross_attention_cache)
    for index, layer in enumerate(past):
        for kind, part in zip(_KINDS, kept, strict=True):
            part.update(layer[kind]["key"], layer[kind]["value"], index)
        cache.is_updated[index] = True  # the encoder's are there, and are not computed
    return cache


def _tensors(cache: Any) -> list[dict[str, Tensor]]:
    return [{"key": layer.keys, "value": layer.values} for layer in cache.layers]


@dataclass(frozen=True)
class _Probed:
    kind: type[Any]
    hidden: Tensor
    logits: Tensor
    layers: Past


def _probe(module: nn.Module, source: Mapping[str, Tensor], name: str) -> _Probed:
    """What the model gives and keeps for a few tokens. Raises UsageError."""
    model: Any = module
    training, cache = module.training, None
    ids = torch.zeros(len(next(iter(source.values()))), _TOKENS, dtype=torch.long)
    try:
        with torch.no_grad():
            model.eval()
            encoded, cache = model.get_encoder()(**source), _filled([])
            hidden, runner = encoded[0], _Seq2Seq(module, type(encoded))
            result = runner._run(hidden, source.get("attention_mask"), ids, cache)
    except Exception as error:
        raise UsageError(
            f"{name} can't be decoded with a cache: it doesn't run with an EncoderDecoderCache of "
            f"transformers ({reason_of(error)})."
        ) from error
    finally:
        module.train(training)
    kept = zip(cache.self_attention_cache.layers, cache.cross_attention_cache.layers, strict=False)
    layers: Past = []
    for pair in kept:
        found: dict[str, dict[str, Tensor]] = {}
        for kind, layer in zip(_KINDS, pair, strict=True):
            length = _TOKENS if kind == "decoder" else hidden.shape[1]
            found[kind] = {}
            for part in _PARTS:
                tensor: Any = getattr(layer, f"{part}s", None)
                if not _is_kept(tensor, len(ids), length):
                    raise UsageError(
                        f"The cache of {name} can't be found: layer {len(layers)} keeps a "
                        f"{type(layer).__name__} of the {kind} without keys and values (batch, "
                        "heads, length, width)."
                    )
                found[kind][part] = tensor
        layers.append(found)
    if not layers or len(cache.cross_attention_cache.layers) != len(layers):
        raise UsageError(
            f"The cache of {name} can't be found: it kept {len(layers)} layers with keys and "
            f"values of its own and {len(cache.cross_attention_cache.layers)} of cross-attention."
        )
    return _Probed(runner.kind, hidden, result.logits, layers)


def _is_kept(tensor: Any, batch: int, length: int) -> bool:
    if not isinstance(tensor, Tensor) or tensor.ndim != 4:
        return False
    return tensor.shape[0] == batch and tensor.shape[2] == length


def _with_rows(source: Mapping[str, Tensor], shapes: Mapping[str, Any]) -> dict[str, Any]:
    """The dynamic dims of the samples, that of their rows with them: a decoder has any number."""
    rows = next((axes[0] for axes in shapes.values() if axes and 0 in axes), Dim("batch_size"))
    return {name: {0: rows, **(shapes.get(name) or {})} for name in source}


def _encoded(source: Mapping[str, Tensor], shapes: Mapping[str, Any], length: int) -> Any:
    """The dim of the encoder's length: that of its inputs where each element gives one row."""
    dims = [
        (source[name].shape[axis], axis, dim)
        for name, axes in shapes.items()
        for axis, dim in (axes or {}).items()
        if axis > 0 and hasattr(dim, "__name__")
    ]
    same = next((dim for size, axis, dim in dims if axis == 1 and size == length), None)
    return same if same is not None or not dims else Dim("encoded")


def sample_source(model: Any, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Two rows of what the model encodes, and their dynamic dims. Raises UsageError."""
    seed = torch.Generator().manual_seed(0)
    config, main = model.config, model.main_input_name
    part: Any = getattr(config, "encoder", config)
    if main == "input_ids":
        encoder = model.get_encoder()
        owner = encoder if hasattr(encoder, "get_input_embeddings") else model
        table = owner.get_input_embeddings().weight
        ids = torch.randint(int(table.shape[0]), (2, 7), generator=seed)
        most = _longest(part)
        rows, length = Dim("batch_size"), Dim("source", max=most) if most else Dim("source")
        axes = {0: rows, 1: length}
        mask = torch.ones_like(ids)
        return {"input_ids": ids, "attention_mask": mask}, {
            "input_ids": axes,
            "attention_mask": axes,
        }
    if main == "input_features" and hasattr(config, "num_mel_bins"):
        frames = 2 * int(config.max_source_positions)
        features = torch.randn(2, int(config.num_mel_bins), frames, generator=seed)
        return {main: features.to(model.dtype)}, {main: {0: Dim("batch_size")}}
    if main == "input_features" and hasattr(config, "input_feat_per_channel"):
        width = int(config.input_feat_per_channel) * int(config.input_channels)
        features = torch.randn(2, _FRAMES, width, generator=seed).to(model.dtype)
        axes = {0: Dim("batch_size"), 1: Dim("frames", max=int(config.max_source_positions))}
        mask = torch.ones(2, _FRAMES, dtype=torch.long)
        return {main: features, "attention_mask": mask}, {main: axes, "attention_mask": axes}
    if main == "input_values":  # samples of sound
        sound = torch.randn(2, _SAMPLES, generator=seed).to(model.dtype)
        return {main: sound}, {main: {0: Dim("batch_size"), 1: Dim("samples")}}
    size = getattr(part, "image_size", None)
    if main == "pixel_values" and size is not None:
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        channels = int(getattr(part, "num_channels", 3))
        image = torch.randn(2, channels, int(height), int(width), generator=seed)
        return {main: image.to(model.dtype)}, {main: {0: Dim("batch_size")}}
    taken = list(inspect.signature(model.forward).parameters)
    raise UsageError(
        f"No sample of what {name} encodes can be made: give it, such as "
        f"source={{{main!r}: tensor}} with source_shapes; it takes {', '.join(taken[:4])} and more."
    )


def _longest(config: Any) -> int | None:
    """How many tokens an encoder with a table of positions takes."""
    for name in ("max_encoder_position_embeddings", "max_position_embeddings", "n_positions"):
        most = getattr(config, name, None)
        if isinstance(most, int) and not hasattr(config, "relative_attention_num_buckets"):
            return most
    return None
