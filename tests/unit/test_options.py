"""The options of a compile: each value is checked where they are made, and reaches the passes."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer
from torch import nn

from attngraph.analysis.masks.masking import NO_MASKED_ROWS
from attngraph.cli.flags import grouped
from attngraph.compiling.compiler import optimize
from attngraph.compiling.pipeline import pipeline
from attngraph.compiling.provenance import Provenance
from attngraph.decoding.compile import optimize_decoder
from attngraph.decoding.compile_multimodal import optimize_multimodal
from attngraph.decoding.compile_seq2seq import optimize_seq2seq
from attngraph.deployment.checkpoint import optimize_checkpoint
from attngraph.errors import UsageError
from attngraph.export.target import parse_target
from attngraph.options import ASSUMPTIONS, DecoderOptions, Options

COMMON = (
    *("target", "precision", "verify", "exact", "tune", "assume"),
    *("weights", "activations", "budget", "calibrate", "portable", "opset", "single_file"),
)
"""What `optimize_decoder` says to be as in `optimize`."""


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"target": "tpu"}, "There is no target 'tpu': use cpu, cuda, or cuda:"),
        ({"precision": "fp8"}, "precision is 'fp8'; it can be fp32, fp16, bf16."),
        ({"verify": "often"}, "verify is 'often'; it can be final, each, off."),
        ({"weights": "int2"}, "weights is 'int2'; it can be int8, int4."),
        ({"activations": "int8"}, "is for products with quantized weights: add --weights int8"),
        ({"activations": "fp8", "weights": "int8"}, "activations is 'fp8'; it can be int8."),
        (
            {"activations": "int8", "weights": "int8", "target": "cuda"},
            "--activations int8 is for the CPU",
        ),
        ({"calibrate": Path("a.npz")}, "--calibrate a.npz is for weights that are quantized"),
        ({"budget": "1%"}, "--budget 1% is measured where activations are rounded"),
        (
            {"activations": "int8", "weights": "int8", "budget": "wide"},
            "budget is 'wide'; it is a share of the output's rms, such as 1% or 0.01.",
        ),
        (
            {"activations": "int8", "weights": "int8", "budget": "200%"},
            "budget is '200%'; it is a share",
        ),
        ({"opset": 20}, "opset is 20; it must be a whole number, 21 to 24."),
        ({"opset": 25}, "opset is 25; it must be a whole number, 21 to 24."),
        (
            {"portable": True, "weights": "int8", "activations": "int8"},
            "--activations int8 needs an operator of onnxruntime's own, and --portable writes",
        ),
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
        ({"runtime": "optimum"}, "runtime is 'optimum'; it can be genai."),
        ({"max_length": 8}, "max_length is for a static cache"),
        ({"cache": "static"}, "A static cache needs max_length"),
        ({"cache": "static", "max_length": 1}, "max_length is 1; it must be a whole number"),
        ({"cache": "static", "max_length": True}, "max_length is True"),
        ({"padding": False, "position_ids": True}, "keep the padding"),
        ({"padding": False, "runtime": "genai"}, "--for genai needs the mask"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence.replace(".", r"\.")):
        DecoderOptions(**wrong)


ENCODERS = (optimize, optimize_checkpoint)
DECODERS = (optimize_decoder, optimize_seq2seq, optimize_multimodal)


@pytest.mark.parametrize("function", [*ENCODERS, *DECODERS])
def test_keywords_are_the_declared_options(function: Callable[..., object]) -> None:
    """By name, type and default; a decoder has no padded rows to ignore."""
    hints = get_type_hints(Options)
    declared = {item.name: (hints[item.name], item.default) for item in fields(Options)}
    keywords = inspect.signature(function).parameters
    shared = {
        name: (keywords[name].annotation, keywords[name].default)
        for name in keywords
        if name in declared
    }
    assert shared == {name: declared[name] for name in shared}
    internal = {"session", "decodes"}
    missing = {"ignore_padded_rows"} if function in DECODERS else set()
    assert shared.keys() == declared.keys() - internal - missing


@pytest.mark.parametrize("function", [optimize_checkpoint, *DECODERS])
def test_keywords_of_a_decoder_are_the_declared_options(function: Callable[..., object]) -> None:
    """By name, type and default. A model of several files has no other options of a cache."""
    hints = get_type_hints(DecoderOptions)
    declared = {item.name: (hints[item.name], item.default) for item in fields(DecoderOptions)}
    keywords = inspect.signature(function).parameters
    shared = {
        name: (keywords[name].annotation, keywords[name].default)
        for name in keywords
        if name in declared
    }
    assert shared == {name: declared[name] for name in shared}
    missing = {
        optimize_decoder: {"runtime"},
        optimize_checkpoint: {"presents"},
    }.get(function, declared.keys() - {"cache", "max_length"})
    assert shared.keys() == declared.keys() - missing


@pytest.mark.parametrize(
    ("function", "name"),
    [
        *((function, "targt") for function in (*ENCODERS, *DECODERS)),
        *((function, "ignore_padded_rows") for function in DECODERS),
        *((function, "decodes") for function in ENCODERS),
    ],
)
def test_a_keyword_that_there_is_not_is_an_error_of_the_call(
    function: Callable[..., object], name: str
) -> None:
    with pytest.raises(TypeError, match=rf"^optimize\w*\(\) .*keyword argument '{name}'"):
        function(*((None, ()) if function is optimize else (None,)), **{name: True})


def test_an_option_is_checked_before_the_model() -> None:
    with pytest.raises(UsageError, match="There is no target 'tpu'"):
        optimize_decoder(nn.Identity(), target="tpu")


@pytest.mark.parametrize(("function", "apart"), [(optimize, ()), (optimize_decoder, COMMON)])
def test_the_documentation_of_a_function_names_its_options(
    function: Callable[..., object], apart: Collection[str]
) -> None:
    said = inspect.getdoc(function) or ""
    options = {item.name for kind in (Options, DecoderOptions) for item in fields(kind)}
    names = options & inspect.signature(function).parameters.keys() - {*apart}
    assert names
    assert not [name for name in names if f"`{name}`" not in said]


def test_every_flag_of_optimize_reaches_the_compile() -> None:
    """A flag that is declared is one of the command line, and its value one of `Options`."""
    found: list[Options] = []

    @grouped
    def command(*, how: functools.partial[Options]) -> None:
        found.append(how(session={}))

    app = typer.Typer()
    app.command()(command)
    given = (
        "--target cuda --precision fp16 --verify off --exact --tune --ignore-padded-rows "
        "--weights int4 --assume no-fully-masked-rows"
    )
    chosen = ("cuda", "fp16", "off", True, True, ASSUMPTIONS, True, "int4")
    names = ("target", "precision", "verify", "exact", "tune", "assume", "ignore_padded_rows")
    app(given.split(), standalone_mode=False)
    app([], standalone_mode=False)
    app(["--weights", "int4", "--activations", "int8"], standalone_mode=False)
    assert found[2].activations == "int8"
    app(["--portable", "--opset", "22"], standalone_mode=False)
    assert (found[3].device.portable, found[3].device.opset) == (True, 22)
    app(["--single-file"], standalone_mode=False)
    assert found[4].single_file
    assert tuple(getattr(found[0], name) for name in (*names, "weights")) == chosen
    assert found[1] == Options()
    assert set(inspect.signature(command).parameters) == {
        *names,
        "weights",
        "activations",
        "budget",
        "calibrate",
        "portable",
        "opset",
        "single_file",
    }


def test_what_may_be_assumed_is_what_the_pass_goes_by() -> None:
    assert ASSUMPTIONS == (NO_MASKED_ROWS,)


@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options("cuda:sm80", exact=True, assume=ASSUMPTIONS, ignore_padded_rows=True),
        Options("cuda", weights="int4"),
        Options(portable=True, opset=21),
    ],
    ids=["default", "packed", "quantized", "portable"],
)
def test_a_file_says_which_passes_it_was_made_with(options: Options) -> None:
    metadata: dict[str, str] = {}
    how = {"opset": options.opset, "portable": options.portable}
    said = Provenance(options.of_pipeline(), "fp16", options.weights, **how)
    said.write(metadata)
    made = Provenance.read(metadata, Path("model.onnx"))
    assert made == said
    assert made.on(parse_target(options.target)) == options.device
    assert made.pipeline() == pipeline(**options.of_pipeline())


def test_a_file_that_others_made_says_nothing() -> None:
    assert Provenance.read({}, Path("model.onnx")) == Provenance()


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({"attngraph.weights": "int3"}, "weights are in 'int3', and there are int8 and int4 only"),
        ({"attngraph.options": json.dumps({"magic": True})}, "made by another attngraph"),
        ({"attngraph.opset": "99"}, "made by another attngraph"),
    ],
)
def test_a_file_made_in_an_unknown_way_is_refused(metadata: dict[str, str], sentence: str) -> None:
    with pytest.raises(UsageError, match=rf"model\.onnx .*{sentence}"):
        Provenance.read(metadata, Path("model.onnx"))


def test_every_flag_of_a_cache_reaches_the_compile() -> None:
    """Those that options.py declares; `--present` is read by the command."""
    found: list[DecoderOptions] = []

    @grouped
    def command(*, decoding: functools.partial[DecoderOptions]) -> None:
        found.append(decoding(presents=None))

    app = typer.Typer()
    app.command()(command)
    for line in ("", "--cache static --max-length 8 --position-ids", "--for genai", "--no-padding"):
        app(line.split(), standalone_mode=False)
    app(["--all-logits"], standalone_mode=False)
    assert found == [
        DecoderOptions(),
        DecoderOptions("static", 8, position_ids=True),
        DecoderOptions(runtime="genai"),
        DecoderOptions(padding=False),
        DecoderOptions(all_logits=True),
    ]
