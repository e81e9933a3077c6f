"""genai_config.json, by which onnxruntime-genai generates with a decoder's file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attngraph.decoding.decoder import Decoder
from attngraph.errors import UsageError
from attngraph.export.files.save import write_text
from attngraph.export.runtime.denormals import kept_by

CONFIG = "genai_config.json"
_KIND = "decoder"
"""genai's word for a decoder that is given ids, a mask and its cache, and nothing special."""
_SEARCH = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "length_penalty",
    "min_length",
)
_NOT_SEARCHED = (
    "forced_bos_token_id",
    "forced_eos_token_id",
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
    "min_new_tokens",
)
"""Rules that a decoder follows and genai's search has no setting for."""
_UNKNOWN = 2**31 - 1


@dataclass(frozen=True)
class Generation:
    """What a model says of its tokens: which ids begin, end and pad a text, how many tokens it was
    made for and how many of them a layer looks back at, and how it is to be sampled from (`search`,
    in transformers' words).
    """

    eos: tuple[int, ...] = ()
    bos: int | None = None
    pad: int | None = None
    length: int | None = None
    window: int | None = None
    search: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, module: Any) -> Generation:
        """From the `config` and `generation_config` of a model of transformers, if it is one."""
        config, generation = (getattr(module, n, None) for n in ("config", "generation_config"))
        text_of = getattr(config, "get_text_config", None)
        text = None if text_of is None else text_of(decoder=True)

        def told(name: str) -> Any:
            found = (getattr(each, name, None) for each in (generation, text, config))
            return next((value for value in found if value is not None), None)

        eos = told("eos_token_id")
        search = {name: getattr(generation, name, None) for name in _SEARCH}
        return cls(
            tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,),
            told("bos_token_id"),
            told("pad_token_id"),
            told("max_position_embeddings"),
            told("sliding_window"),
            {name: value for name, value in search.items() if value is not None},
        )


def write_config(
    folder: str | Path, decoder: Decoder, told: Generation, *, file: str = "model.onnx"
) -> None:
    """Writes genai_config.json into the folder that holds the decoder's `file`.

    Raises UsageError where onnxruntime-genai can't run such a decoder, OutputError as `save`.
    """
    write_text(Path(folder) / CONFIG, json.dumps(genai_config(decoder, told, file=file), indent=2))


def genai_config(decoder: Decoder, told: Generation, *, file: str = "model.onnx") -> dict[str, Any]:
    """The content of genai_config.json for a decoder. Raises UsageError where genai can't run it.

    The cache keeps the names it has. A growing one is handed on as it comes; a static one is a
    buffer that genai makes as long as `max_length` of its search, by default all that it may be.
    genai pads the rows of a batch on the right, makes the mask of that, and goes on from the
    logits of each row's last token, so the graph must give those of all positions.
    """
    layout, session = decoder.layout, decoder.session
    if layout.states:
        raise UsageError(
            "onnxruntime-genai gives the keys and values of a decoder back to it, and this one "
            f"keeps states as well, such as {layout.states[0]}: run it with attngraph's Decoder."
        )
    if layout.mask is None:
        raise UsageError(
            "onnxruntime-genai tells a decoder by its mask how many tokens there are, and this one "
            "takes none: compile it with padding."
        )
    _, positions, vocabulary = session.output_shape(layout.logits)
    if positions == 1:
        raise UsageError(
            "onnxruntime-genai pads rows on the right, and this decoder gives the logits of the "
            "last position alone: compile it with all logits."
        )
    assert isinstance(vocabulary, int)
    heads, width = _sizes(decoder)
    names = {
        "past_key_names": layout.pasts[::2],
        "past_value_names": layout.pasts[1::2],
        "present_key_names": layout.presents[::2],
        "present_value_names": layout.presents[1::2],
    }
    templates = {what: template(those) for what, those in names.items()}
    inputs = {"input_ids": layout.ids, "attention_mask": layout.mask}
    if layout.positions is not None:
        inputs["position_ids"] = layout.positions
    outputs = {"logits": layout.logits}
    for what, name in templates.items():
        (inputs if what.startswith("past") else outputs)[what] = name
    length, eos = _length(decoder, told), _known(told.eos, vocabulary)
    if not eos:
        raise UsageError(
            "onnxruntime-genai wants an id that ends a text, below the vocabulary of "
            f"{vocabulary}, and the model names {', '.join(map(str, told.eos)) or 'none'}: set "
            "eos_token_id in its generation_config."
        )
    bos, pad = (_known([each], vocabulary) or eos for each in (told.bos, told.pad))
    provider = session.provider.removesuffix("ExecutionProvider").lower()
    options: dict[str, Any] = {
        "log_id": "onnxruntime-genai",
        "session.set_denormal_as_zero": "0" if kept_by(session.metadata) else "1",
        "provider_options": [] if provider == "cpu" else [{provider: {}}],
    }
    return {
        "model": {
            "type": _KIND,
            "vocab_size": vocabulary,
            "context_length": length,
            "bos_token_id": bos[0],
            "eos_token_id": eos,
            "pad_token_id": pad[0],
            "decoder": {
                "filename": file,
                "session_options": options,
                "hidden_size": heads * width,
                "head_size": width,
                "num_attention_heads": heads,
                "num_key_value_heads": heads,
                "num_hidden_layers": len(layout.pasts) // 2,
                "inputs": inputs,
                "outputs": outputs,
            },
        },
        "search": {
            "do_sample": False,
            **told.search,
            "max_length": length,
            "past_present_share_buffer": decoder.is_static,
        },
    }


def notes_of(decoder: Decoder, told: Generation) -> list[str]:
    """What a user of genai should know of this decoder."""
    graph = None if decoder.optimized is None else decoder.optimized.graph
    found = () if graph is None else (node.attrs.get("window") for node in graph)
    unknown = [name for name in _NOT_SEARCHED if getattr(decoder.rules, name)]
    notes = [
        f"onnxruntime-genai knows no {', '.join(unknown)}, which the generation config sets: its "
        "tokens are others where these matter."
    ]
    notes = notes if unknown else []
    if told.window is None and not any(found):
        return notes
    return [
        *notes,
        "onnxruntime-genai pads the rows of a batch on the right, between a prompt and what "
        "follows, and a window counts padding too: give it rows of one length, or one row.",
    ]


def _known(ids: Sequence[int | None], vocabulary: int) -> list[int]:
    return [each for each in ids if each is not None and 0 <= each < vocabulary]


def _sizes(decoder: Decoder) -> tuple[int, int]:
    """(heads, width) of every key and value. Raises UsageError where they differ."""
    pasts, session = decoder.layout.pasts, decoder.session
    shapes = {name: session.input_shape(name) for name in pasts}
    sizes = {(shape[1], shape[3]) for shape in shapes.values() if len(shape) == 4}
    heads, width = next(iter(sizes), (None, None))
    are_plain = all(len(shape) == 4 for shape in shapes.values()) and len(pasts) % 2 == 0
    if not (are_plain and len(sizes) == 1 and isinstance(heads, int) and isinstance(width, int)):
        listed = "; ".join(
            f"{name} ({', '.join(map(str, shape))})" for name, shape in shapes.items()
        )
        raise UsageError(
            "onnxruntime-genai makes one kind of cache for all layers, a key and a value (batch, "
            f"heads, tokens, width) of one size, and those of this decoder are {listed}."
        )
    return heads, width


def template(names: Sequence[str]) -> str:
    """The name with `%d` for the layer's number, such as `present.%d.key`. Raises UsageError."""
    first = names[0]
    for place, character in enumerate(first):
        if character != "0":
            continue
        found = f"{first[:place]}%d{first[place + 1 :]}"
        if [found.replace("%d", str(layer)) for layer in range(len(names))] == list(names):
            return found
    raise UsageError(
        "onnxruntime-genai wants names that differ by the number of the layer, counted from 0, and "
        f"the cache has {', '.join(names)}: return and take it as a list of layers."
    )


def _length(decoder: Decoder, told: Generation) -> int:
    """The tokens that a text may have."""
    known = [each for each in (told.length, decoder.layout.max_length) if each is not None]
    length = decoder.extent.longest(min(known, default=_UNKNOWN))
    if length == _UNKNOWN:
        raise UsageError(
            "onnxruntime-genai wants to know how many tokens a text may have, and the model "
            "doesn't say: give a static cache of --max-length tokens."
        )
    return length
