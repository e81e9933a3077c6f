"""The options of a compile: each value is checked where they are made, and reaches the passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attngraph.analysis.masks.masking import NO_MASKED_ROWS
from attngraph.compiling.pipeline import pipeline
from attngraph.compiling.provenance import Provenance
from attngraph.errors import UsageError
from attngraph.options import ASSUMPTIONS, DecoderOptions, Options


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"target": "tpu"}, "There is no target 'tpu': use cpu, cuda, or cuda:"),
        ({"precision": "fp8"}, "precision is 'fp8'; it can be fp32, fp16, bf16."),
        ({"verify": "often"}, "verify is 'often'; it can be final, each, off."),
        ({"weights": "int2"}, "weights is 'int2'; it can be int8, int4."),
        ({"assume": ["luck"]}, "assume names 'luck'; it can be no-fully-masked-rows."),
        ({"session": {"provider_options": {"a": 1}}}, "has no option 'a'"),
        ({"session": {"cuda_graph": True}}, "cuda_graph is for target cuda, not for cpu."),
    ],
)
def test_a_value_that_there_is_not_is_refused(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence.replace(".", r"\.")):
        Options(**wrong)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"cache": "endless"}, "cache is 'endless'; it can be growing, static."),
        ({"max_length": 8}, "max_length is for a static cache"),
        ({"cache": "static"}, "A static cache needs max_length"),
        ({"cache": "static", "max_length": 1}, "max_length is 1; it must be a whole number"),
        ({"cache": "static", "max_length": True}, "max_length is True"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence.replace(".", r"\.")):
        DecoderOptions(**wrong)


def test_what_may_be_assumed_is_what_the_pass_goes_by() -> None:
    assert ASSUMPTIONS == (NO_MASKED_ROWS,)


@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options("cuda:sm80", exact=True, assume=ASSUMPTIONS, ignore_padded_rows=True),
        Options("cuda", weights="int4"),
    ],
    ids=["default", "packed", "quantized"],
)
def test_a_file_says_which_passes_it_was_made_with(options: Options) -> None:
    metadata: dict[str, str] = {}
    Provenance(options.of_pipeline(), "fp16", options.weights).write(metadata)
    made = Provenance.read(metadata, Path("model.onnx"))
    assert made == Provenance(options.of_pipeline(), "fp16", options.weights)
    assert made.pipeline() == pipeline(**options.of_pipeline())


def test_a_file_that_others_made_says_nothing() -> None:
    assert Provenance.read({}, Path("model.onnx")) == Provenance()


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({"attngraph.weights": "int3"}, "weights are in 'int3', and there are int8 and int4 only"),
        ({"attngraph.options": json.dumps({"magic": True})}, "made by another attngraph"),
    ],
)
def test_a_file_made_in_an_unknown_way_is_refused(metadata: dict[str, str], sentence: str) -> None:
    with pytest.raises(UsageError, match=rf"model\.onnx .*{sentence}"):
        Provenance.read(metadata, Path("model.onnx"))
