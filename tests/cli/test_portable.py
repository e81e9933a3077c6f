"""`--portable` and `--opset`: what the file then holds, and what they can't stand beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

import attngraph as package
from attngraph import Decoder
from attngraph.export.target import OPSET
from tests.parity.test_decode import MODELS, prompts

pytestmark = pytest.mark.wide

USAGE = 2
EAGER = ("optimize", "--factory", "examples.eager_attention:build", "-o", "out.onnx")


def test_standard_operators_of_an_older_opset(attngraph: Any, here: Path) -> None:
    """The file says so itself, and `verify` compiles as it was compiled: each weight is found."""
    ran = attngraph(*EAGER, "--portable", "--opset", "21", "--json")
    assert ran.code == 0, ran.err
    report = json.loads(ran.out)
    assert report["operators"] == "opset 21, standard operators only"
    assert {site["kernel"]["form"] for site in report["sites"]} == {"MatMul, Softmax, MatMul"}
    model = onnx.load(here / "out.onnx")
    assert {(each.domain, each.version) for each in model.opset_import} == {("", 21)}
    said = {entry.key: entry.value for entry in model.metadata_props}
    assert (said["attngraph.opset"], said["attngraph.portable"]) == ("21", "true")
    ran = attngraph("verify", *EAGER[1:3], "out.onnx", "--json")
    weights = json.loads(ran.out)["weights"]
    assert weights["compared"] == weights["total"] > 0
    ran = attngraph(*EAGER, "--portable", "--verify", "off")
    assert ", standard operators only)" in ran.out
    assert {each.version for each in onnx.load(here / "out.onnx").opset_import} == {OPSET}


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ("--portable", "--weights", "int8", "--activations", "int8"),
            "--activations int8 needs an operator of onnxruntime's own",
        ),
        (("--portable", "--decode", "--for", "genai"), "--for genai is for a runtime with"),
        (("--opset", "20"), "opset is 20; it must be a whole number, 21 to 24."),
        (("--opset", "25"), "opset is 25; it must be a whole number, 21 to 24."),
    ],
)
def test_what_contradicts_it_is_refused(
    attngraph: Any, here: Path, flags: tuple[str, ...], sentence: str
) -> None:
    before = sorted(here.iterdir())
    ran = attngraph(*EAGER, *flags)
    assert ran.code == USAGE
    assert sentence in ran.sentence
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize("cache", [pytest.param("growing", marks=pytest.mark.slow), "static"])
def test_a_decoders_file_in_the_oldest_opset(cache: Any, here: Path) -> None:
    """A static cache is written by index there, and none of its tokens is another."""
    module, room = MODELS["llama"]().eval(), 24 if cache == "static" else None
    compiled = package.optimize_decoder(
        module, cache=cache, max_length=room, verify="off", portable=True, opset=21
    )
    compiled.save(here / "out.onnx")
    assert {each.domain for each in onnx.load(here / "out.onnx").opset_import} == {""}
    ids, mask = prompts(3)
    found = Decoder.load(here / "out.onnx").generate(ids, 8, attention_mask=mask)
    expected = module.generate(
        ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None
    )
    assert torch.equal(found, expected)
