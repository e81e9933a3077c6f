"""OpenVINO computes on its CPU device what the eager model does, within our own error budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import openvino
import pytest
import torch
from torch import Tensor

import attngraph
from attngraph.export.parity.budget import compare
from attngraph.export.parity.reference import Reference
from attngraph.export.target import OLDEST_OPSET, OPSET
from attngraph.ir import interpret
from tests.models.kit import HEADS, HIDDEN
from tests.parity.test_decode import PROMPT, prompts
from tests.runtimes import families
from tests.runtimes.conftest import Record
from tests.runtimes.encoders import MODELS
from tests.runtimes.seq2seq import written

OTHER_WAYS: tuple[dict[str, Any], ...] = (
    {"SNIPPETS_MODE": "DISABLE"},
    {"INFERENCE_NUM_THREADS": 1},
    {},
)
"""Settings that change how OpenVINO computes a file and not what: without the kernels that it
generates, on one thread, and once more."""


def holds_by_itself(error_of: Callable[[dict[str, Any]], str]) -> None:
    """Fails for what a file means, and not for what one way of computing it gets wrong.

    On one machine of our CI, and on none that we could look at, OpenVINO 2026.4 gave wrong numbers
    for T5, an error of 0.08 where others have 1e-6. `error_of` runs the test with more settings;
    what it returns is empty if all is right. A file that is right in any of them is well read: the
    test is then told as expected to fail, with each error. One that is wrong in all of them fails.
    """
    first = error_of({})
    if not first:
        return
    errors = {str(settings): error_of(settings) for settings in OTHER_WAYS}
    told = f"OpenVINO's own ways differ: by default {first}; {errors}"
    if all(errors.values()):
        raise AssertionError(told)
    pytest.xfail(told)


def opened(path: Path, **settings: Any) -> openvino.CompiledModel:
    """Computing in float32, which some CPUs would leave for bfloat16."""
    core = openvino.Core()
    settings["INFERENCE_PRECISION_HINT"] = "f32"
    return core.compile_model(core.read_model(path), "CPU", settings)


def results_of(model: openvino.CompiledModel, feeds: dict[str, Tensor]) -> dict[str, Tensor]:
    found = model({name: tensor.numpy() for name, tensor in feeds.items()})
    return {
        output.any_name: torch.from_numpy(numpy.array(found[output])) for output in model.outputs
    }


@pytest.mark.parametrize("name", MODELS)
def test_an_encoder(name: str, tmp_path: Path, record: Record) -> None:
    torch.manual_seed(0)
    module, args, shapes = MODELS[name]()
    optimized = attngraph.optimize(module.eval(), args, dynamic_shapes=shapes)
    optimized.save(tmp_path / "model.onnx")

    def error_of(settings: dict[str, Any]) -> str:
        model = opened(tmp_path / "model.onnx", **settings)
        for rows in (1, 3):
            given = tuple(tensor[:rows] for tensor in args)
            found = results_of(model, dict(zip(optimized.session.input_names, given, strict=True)))
            expected = Reference(module, precision="fp32")(given)
            parity = compare(expected, tuple(found[name] for name in expected.names), "fp32")
            if not parity.passed:
                return f"{rows} rows: {parity}"
        return ""

    holds_by_itself(error_of)
    record("openvino", name, "parity")


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantized_weights_of_a_portable_file(weights: Any, tmp_path: Path, record: Record) -> None:
    """By itself OpenVINO rounds what such a linear is given to 8 bits."""
    torch.manual_seed(0)
    module, x = torch.nn.Linear(64, 96).eval(), torch.randn(3, 5, 64)
    made = attngraph.optimize(module, (x,), weights=weights, portable=True, opset=OLDEST_OPSET)
    made.save(tmp_path / "model.onnx")
    model = opened(tmp_path / "model.onnx", DYNAMIC_QUANTIZATION_GROUP_SIZE=0)
    (expected,) = interpret(made.graph, (x,))
    (found,) = results_of(model, {made.session.input_names[0]: x}).values()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    record("openvino", "linears", f"{weights} weights (portable)")


@pytest.mark.parametrize("portable", [False, True], ids=["", "portable"])
@pytest.mark.parametrize("cache", ["growing", "static"])
def test_a_decoder_gives_the_tokens_of_transformers(
    cache: Any, portable: bool, tmp_path: Path, record: Record
) -> None:
    """A portable file is written in the oldest opset, whose static cache keeps its room."""
    module, steps, room = families.decoder("Llama"), 12, 32
    compiled = attngraph.optimize_decoder(
        module,
        cache=cache,
        max_length=room if cache == "static" else None,
        portable=portable,
        opset=OLDEST_OPSET if portable else OPSET,
    )
    compiled.save(tmp_path / "model.onnx")
    model, layout = opened(tmp_path / "model.onnx"), compiled.layout
    in_place = cache == "static" and not portable
    rows = 1 if in_place else 3  # its GroupQueryAttention reads the length of one row
    ids, mask = prompts(rows)
    expected = module.generate(
        ids, attention_mask=mask, max_new_tokens=steps, do_sample=False, eos_token_id=None
    )
    held = room if cache == "static" else 0
    shape = (rows, HEADS // 2, held, HIDDEN // HEADS)
    pasts = {name: torch.zeros(shape) for name in layout.pasts}
    whole, new = ids, ids
    for _ in range(steps):
        found = results_of(model, {"input_ids": new, "attention_mask": mask, **pasts})
        new = found["logits"][:, -1].argmax(-1)[:, None]
        pasts = dict(zip(layout.pasts, (found[name] for name in layout.presents), strict=True))
        whole, mask = torch.cat([whole, new], 1), torch.cat([mask, mask.new_ones(rows, 1)], 1)
    assert torch.equal(whole, expected)
    # A buffer of GroupQueryAttention comes back cut to its tokens, as if it had grown.
    kept = room if cache == "static" and portable else PROMPT + steps - 1
    assert pasts[layout.pasts[0]].shape[2] == kept
    record("openvino", "Llama", f"{cache} cache{' (portable)' * portable}")


def test_an_encoder_decoder_gives_the_tokens_of_transformers(
    tmp_path: Path, record: Record
) -> None:
    """Rows padded differently; the decoder reads what the encoder gave once, and its own past."""
    folder, source, expected = written("t5", tmp_path, rows=3)

    def error_of(settings: dict[str, Any]) -> str:
        encoder, decoder = (
            opened(folder / name, **settings)
            for name in ("encoder_model.onnx", "decoder_with_past_model.onnx")
        )
        found = generated(encoder, decoder, source, expected.shape[1])
        return "" if torch.equal(found, expected) else f"{found.tolist()}, not {expected.tolist()}"

    holds_by_itself(error_of)
    record("openvino", "T5", "growing cache")


def generated(
    encoder: openvino.CompiledModel,
    decoder: openvino.CompiledModel,
    source: dict[str, Tensor],
    length: int,
) -> Tensor:
    """The likeliest tokens for `source` after a first 0: shape (rows, length)."""
    rows, names = len(source["input_ids"]), [value.any_name for value in decoder.inputs]
    given = results_of(encoder, source)
    memory = {
        name: given[name.replace("past_key_values", "present")]
        for name in names
        if ".encoder." in name
    }
    (width,) = {tensor.shape[-1] for tensor in memory.values()}
    (heads,) = {tensor.shape[1] for tensor in memory.values()}
    pasts = {name: torch.zeros(rows, heads, 0, width) for name in names if ".decoder." in name}
    mask = {"encoder_attention_mask": source["attention_mask"]}
    whole = torch.zeros(rows, 1, dtype=torch.int64)
    for _ in range(length - 1):
        found = results_of(decoder, {"input_ids": whole[:, -1:], **mask, **memory, **pasts})
        pasts = {name: found[name.replace("past_key_values", "present")] for name in pasts}
        whole = torch.cat([whole, found["logits"][:, -1].argmax(-1)[:, None]], 1)
    return whole
