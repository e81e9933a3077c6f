"""The driver for encoder-decoders: the encoder, the decoder, and both over several steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch.export import Dim

from attngraph.compiling.compiler import compile_model
from attngraph.decoding.checking import Encoded
from attngraph.decoding.compile import compile_decoder
from attngraph.decoding.decoder import Decoder
from attngraph.decoding.merging import merge_first_step
from attngraph.decoding.rules import Rules
from attngraph.decoding.seq2seq import DECODER, ENCODER, MERGED, Seq2Seq, Wiring
from attngraph.errors import UsageError
from attngraph.export.files.staged import Staged
from attngraph.frontend.families.cache import rows_looked_up
from attngraph.frontend.families.seq2seq import Parts, is_seq2seq, of_transformers
from attngraph.frontend.interface.wrappers import adapters
from attngraph.ir.ranges import Ranges
from attngraph.keywords import CacheKeywords, read, spelled_out
from attngraph.optimized import Optimized
from attngraph.options import DEFAULTS, DecoderOptions, Options
from attngraph.stages import Progress, telling

_ROWS = 4
_LENGTHS = (9, 1, 160)
"""The lengths encoded in the check over steps; the last lies behind all buckets of a T5."""
_WORK = 1 << 36
"""Multiplications of one encoding above which such a length is left out."""


@spelled_out(CacheKeywords)
def optimize_seq2seq(
    module: torch.nn.Module,
    source: Mapping[str, torch.Tensor] | None = None,
    *,
    source_shapes: Mapping[str, Any] | None = None,
    first_step: bool = True,
    progress: Progress | None = None,
    **options: Unpack[CacheKeywords],
) -> Seq2Seq:
    """Compiles an encoder-decoder of transformers, and checks it over several steps.

    What the decoder's cross-attentions read is computed once, by the encoder; the decoder is one
    graph for its first tokens and for each step. `source` are samples of what is encoded, by the
    names of the model's inputs, and `source_shapes` their dynamic dims as torch.export has them,
    beside their rows, of which there may always be any number; a model that takes token ids,
    images, or features as Whisper does needs none. With `first_step`
    and a growing cache there is a third graph, which begins with the encoder's hidden states, as
    other runtimes do.
    The rest is as in `optimize_decoder`.

    Raises UsageError where the model is no such one or its caches can't be found, and as
    `optimize_decoder` does.
    """
    name = type(module).__name__
    if not is_seq2seq(module):
        raise UsageError(
            f"{name} is no encoder-decoder of transformers that can generate.{adapters(module)}"
        )
    parts = of_transformers(module, source, source_shapes, name)
    if not first_step:
        parts = replace(parts, keys=None)
    chosen, decoding = read(options)
    with telling(progress):
        return compile_seq2seq(parts, rules_of(module), decoding, chosen)


def compile_seq2seq(
    parts: Parts,
    rules: Rules,
    decoding: DecoderOptions,
    options: Options = DEFAULTS,
    *,
    staged: Callable[[str], Staged | None] = lambda name: None,
) -> Seq2Seq:
    """As `optimize_seq2seq`, for a model in parts; large weights are `staged`, by the file's name.

    Raises ParityError where a part is out of its error budget, or the steps of the whole are.
    """
    encoder = compile_model(parts.encoder, options, staged=staged(ENCODER))
    wiring = _wiring(parts, encoder)

    def encoded(decoder: Decoder) -> Iterator[Encoded]:
        model = Seq2Seq(encoder, decoder, wiring, rules)
        return encodings(parts, model, encoder.ranges)

    decoder = compile_decoder(
        parts.decoder,
        replace(decoding, presents=dict(parts.presents)),
        options,
        memory=parts.memory,
        encoded=encoded,
        staged=staged(DECODER),
    )
    model = Seq2Seq(encoder, decoder, wiring, rules)
    if parts.keys is not None and not decoder.is_static:
        keys = compile_model(parts.keys, options)
        sources = sources_of(parts, encoder.ranges, wiring)
        model.merged = merge_first_step(model, keys, sources, options, staged(MERGED))
    decoder.report.notes += rules.notes
    return model


def encodings(parts: Parts, model: Seq2Seq, ranges: Ranges) -> Iterator[Encoded]:
    """What a check over steps encodes; `ranges` are those of the encoder."""
    for label, source in sources_of(parts, ranges, model.wiring):
        cache = model.start(source)
        yield Encoded(label, _ROWS, cache, parts.whole, (source,), parts.pad)


def rules_of(module: torch.nn.Module | None) -> Rules:
    """How a model of transformers chooses its tokens."""
    return Rules.of_config(getattr(module, "generation_config", None))


def _wiring(parts: Parts, encoder: Optimized) -> Wiring:
    inputs = {value.name: value for value in encoder.graph.inputs}
    main = encoder.graph.inputs[0]
    held = [origin for origin in parts.memory.values() if origin in inputs]
    mask = "attention_mask" if "attention_mask" in inputs else (held[0] if held else None)
    vocabulary = None
    if not main.dtype.is_floating_point:
        vocabulary = rows_looked_up(main)
    return Wiring(dict(parts.memory), mask, vocabulary)


def sources_of(
    parts: Parts, ranges: Ranges, wiring: Wiring
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """What a check encodes: rows that are all different and padded differently, of several lengths
    if there may be."""
    (sample,) = parts.encoder.args
    axes = parts.encoder.dynamic_shapes["source"]
    main = next(iter(sample))
    own = [(axis, d.__name__) for axis, d in (axes[main] or {}).items() if _is_dim(d)]
    named = ((axis, name) for axis, name in own if axis)
    axis, dim = next(named, (1, None))
    random = torch.Generator().manual_seed(1)
    work = sum(value.numel() for value in parts.whole.parameters()) * _ROWS
    rows = {name: _ROWS for axis, name in own if axis == 0}
    fitting = [n for n in _LENGTHS if dim is not None and not ranges.broken({**rows, dim: n})]
    lengths = fitting or [sample[main].shape[axis]]
    for length in lengths:
        if length != lengths[0] and length * work > _WORK:
            continue
        found = {}
        for name, tensor in sample.items():
            shape = list(tensor.shape)
            for axis, given in (axes[name] or {}).items():
                if axis == 0:
                    shape[0] = _ROWS
                elif _is_dim(given) and given.__name__ == dim:
                    shape[axis] = length
            found[name] = _drawn(tensor, shape, random, is_mask=name == wiring.mask)
        yield ("" if dim is None else f"{dim}={length}"), found


def _is_dim(dim: Any) -> bool:
    return isinstance(dim, Dim) or hasattr(dim, "__name__")


def _drawn(
    sample: torch.Tensor, shape: list[int], random: torch.Generator, *, is_mask: bool
) -> torch.Tensor:
    """Other values like a sample's; of a mask the last rows are padded, on either side."""
    if is_mask:
        rows, places = torch.arange(shape[0])[:, None], torch.arange(shape[1])[None]
        hidden = (rows * shape[1] // (shape[0] + 1)).clamp(max=shape[1] - 1)
        mask = places < shape[1] - hidden
        mask[-1] = places[0] >= int(hidden[-1])  # on the left
        return mask.to(sample.dtype)
    if sample.dtype.is_floating_point:
        scale = float(sample.std()) or 1.0
        noise = torch.randn(shape, generator=random) * scale + float(sample.mean())
        return noise.to(sample.dtype)
    return torch.randint(int(sample.max()) + 1, shape, generator=random).to(sample.dtype)
