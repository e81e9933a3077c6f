"""genai_config.json says of a decoder's file what it is, and what genai can't run is refused.

tests/runtimes runs onnxruntime-genai itself.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

import attngraph
from attngraph import Decoder
from attngraph.errors import UsageError
from attngraph.options import CacheKind
from attngraph.runtimes.genai import Generation, genai_config, notes_of, template, write_config
from examples import cached_gpt
from tests.models.kit import HIDDEN, LAYERS, POSITIONS, VOCABULARY
from tests.parity.test_decode import MODELS

pytestmark = pytest.mark.wide

ROOM = 16
TOLD = Generation(eos=(7,), pad=0, length=POSITIONS)


@functools.cache
def compiled(name: str, cache: CacheKind = "growing", **options: bool) -> tuple[nn.Module, Decoder]:
    room = ROOM if cache == "static" else None
    module = MODELS[name]().eval()
    options = {"all_logits": True, **options}
    decoder = attngraph.optimize_decoder(
        module, cache=cache, max_length=room, verify="off", **options
    )
    return module, decoder


def test_names_sizes_and_ids_are_those_of_the_file_and_the_model(tmp_path: Path) -> None:
    _, decoder = compiled("llama")
    write_config(tmp_path, decoder, TOLD, file="llama.onnx")
    said = json.loads((tmp_path / "genai_config.json").read_text())
    model, inner = said["model"], said["model"]["decoder"]
    assert (model["vocab_size"], model["context_length"]) == (VOCABULARY, POSITIONS)
    assert (model["eos_token_id"], model["pad_token_id"], model["bos_token_id"]) == ([7], 0, 7)
    assert inner["filename"] == "llama.onnx"
    assert inner["num_hidden_layers"] == LAYERS
    assert inner["num_key_value_heads"] * inner["head_size"] == HIDDEN // 2
    assert inner["inputs"]["past_value_names"] == "past_key_values.%d.value"
    assert inner["outputs"]["present_key_names"] == "present.%d.key"
    assert said["search"]["past_present_share_buffer"] is False


def test_a_static_cache_is_one_buffer_of_as_many_tokens() -> None:
    config = genai_config(compiled("llama", "static")[1], TOLD)
    assert config["search"]["past_present_share_buffer"] is True
    assert config["search"]["max_length"] == config["model"]["context_length"] == ROOM


def test_a_text_is_no_longer_than_the_cache_stays_right() -> None:
    """Tables end; and keys that are turned otherwise behind a length would have to be computed
    anew, which genai doesn't do."""
    _, decoder = compiled("gpt2")
    assert genai_config(decoder, replace(TOLD, length=None))["model"]["context_length"] == POSITIONS
    layout = replace(decoder.layout, switches=(24, 40))
    session = decoder.session
    assert genai_config(Decoder(session, layout), TOLD)["model"]["context_length"] == 24
    with pytest.raises(UsageError, match="give a static cache of --max-length tokens"):
        genai_config(compiled("llama")[1], replace(TOLD, length=None))


@pytest.mark.parametrize(
    ("options", "told", "message"),
    [
        ({"padding": False}, TOLD, "takes none: compile it with padding"),
        ({"all_logits": False}, TOLD, "compile it with all logits"),
        ({}, replace(TOLD, eos=(50256,)), "below the vocabulary of 120, and the model names 50256"),
        ({}, replace(TOLD, eos=()), "names none: set eos_token_id"),
    ],
)
def test_what_genai_has_no_way_to_run(
    options: dict[str, bool], told: Generation, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        genai_config(compiled("llama", **options)[1], told)


def test_a_cache_of_two_sizes() -> None:
    _, decoder = compiled("llama")
    layout = decoder.layout
    mixed = replace(layout, pasts=(layout.ids, *layout.pasts[1:]))
    with pytest.raises(UsageError, match="one kind of cache for all layers"):
        genai_config(Decoder(decoder.session, mixed), TOLD)


def test_what_a_model_of_transformers_says_of_its_tokens() -> None:
    from transformers import GenerationConfig

    module, _ = compiled("llama")
    module.generation_config = GenerationConfig(
        eos_token_id=[3, 5], pad_token_id=1, do_sample=True, temperature=0.5, top_k=4
    )
    told = Generation.of(module)
    assert (told.eos, told.pad, told.length, told.window) == ((3, 5), 1, POSITIONS, None)
    assert told.search == {"do_sample": True, "temperature": 0.5, "top_k": 4}
    assert Generation.of(cached_gpt.build()[0]) == Generation()
    assert Generation.of(MODELS["mistral"]()).window == 5


def test_a_window_that_padding_would_fill_is_told() -> None:
    decoder = compiled("llama")[1]
    assert notes_of(decoder, TOLD) == []
    assert "a window counts padding" in notes_of(decoder, replace(TOLD, window=5))[0]


def test_names_differ_by_the_number_of_the_layer() -> None:
    assert template([f"past_{layer}_0" for layer in range(12)]) == "past_%d_0"
    assert template(["k0"]) == "k%d"
    for names in (["k0", "k2"], ["a", "b"], ["past_1_k", "past_2_k"]):
        with pytest.raises(UsageError, match="by the number of the layer, counted from 0"):
            template(names)
