"""`attngraph optimize --decode`: a file that Decoder reads, or a sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from attngraph import Decoder
from examples import cached_gpt

USAGE = 2
CACHED = ("--factory", "examples.cached_gpt:build")


def test_a_decoder_is_written_and_read(attngraph: Any, here: Path) -> None:
    ran = attngraph("optimize", *CACHED, "--decode", "-o", "out.onnx", "--json")
    assert ran.code == 0, ran.err
    report = json.loads(ran.out)
    assert report["parity"]["passed"] is True
    assert [site["mask"] for site in report["sites"]] == ["causal", "causal"]
    assert all(site["cache"] for site in report["sites"])
    module, (ids, _), _ = cached_gpt.build()
    found = Decoder.load(here / "out.onnx").generate(ids, 8)
    assert torch.equal(found, cached_gpt.generate(module, ids, 8))


LLAMA = """
from transformers import LlamaConfig, LlamaForCausalLM

def build():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, vocab_size=50, **sizes)).eval()
"""


def test_without_padding_there_is_no_mask(attngraph: Any, here: Path) -> None:
    (here / "llama.py").write_text(LLAMA)
    model = ("--factory", "llama:build", "--decode", "-o", "out.onnx")
    for flags, takes_a_mask in (((), True), (("--no-padding",), False)):
        ran = attngraph("optimize", *model, *flags)
        assert ran.code == 0, ran.err
        names = Decoder.load(here / "out.onnx").session.input_names
        assert ("attention_mask" in names) is takes_a_mask


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--factory", "examples.nanogpt:build", "--decode"), "cache of examples.nanogpt:build"),
        ((*CACHED, "--decode", "--present", "past_0_0"), "'past_0_0' doesn't parse"),
        ((*CACHED, "--decode", "--present", "past=output_1"), "no input past; there are input_ids"),
        ((*CACHED, "--decode", "--all-logits"), "leave out --all-logits"),
        ((*CACHED, "--decode", "--no-padding"), "leave out --all-logits, --no-padding"),
        ((*CACHED, "--no-padding"), "are for --decode"),
        ((*CACHED, "--present", "a=b"), "are for --decode"),
        ((*CACHED, "--for", "genai"), "are for --decode"),
        ((*CACHED, "--cache", "static", "--max-length", "8"), "are for --decode"),
        ((*CACHED, "--decode", "--cache", "static"), "A static cache needs max_length"),
        ((*CACHED, "--decode", "--max-length", "8"), "max_length is for a static cache"),
        ((*CACHED, "--decode", "--cache", "static", "--max-length", "1"), "2 or more"),
    ],
)
def test_what_is_no_decoder(attngraph: Any, arguments: tuple[str, ...], message: str) -> None:
    ran = attngraph("optimize", *arguments, "-o", "out.onnx")
    assert ran.code == USAGE
    assert message in ran.sentence
    assert not [name for name in os.listdir() if ".onnx" in name]


def test_for_genai_its_config_lies_beside_the_file(attngraph: Any, here: Path) -> None:
    (here / "llama.py").write_text(LLAMA)
    model = ("--factory", "llama:build", "--decode", "--verify", "off")
    ran = attngraph("optimize", *model, "--for", "genai", "-o", "out.onnx")
    assert ran.code == 0, ran.err
    said = json.loads((here / "genai_config.json").read_text())
    assert said["model"]["decoder"]["filename"] == "out.onnx"
    ran = attngraph("optimize", *model, "--for", "genai", "--no-padding", "-o", "other.onnx")
    assert ran.code == USAGE
    assert "needs the mask" in ran.sentence
    assert not (here / "other.onnx").exists()
