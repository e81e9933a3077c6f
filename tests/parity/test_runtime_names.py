"""A decoder's file has the names that other runtimes look for, and needs nothing else."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import numpy
import onnx_ir
import onnxruntime
import pytest
import torch
from torch import nn

import attngraph
from attngraph import Decoder
from attngraph.compiling.compiler import Model
from attngraph.export.runtime.session import Session
from attngraph.export.target import Target
from attngraph.frontend.families.cache import METADATA_KEY, Layout
from attngraph.ir import Graph, TensorType
from attngraph.options import CacheKind
from attngraph.verification.verify import verify_file
from tests.models.kit import peaked
from tests.parity.test_decode import MODELS, prompts

pytestmark = pytest.mark.wide

LAYERS, ROOM, STEPS = 2, 16, 8
PASTS = [f"past_key_values.{n}.{part}" for n in range(LAYERS) for part in ("key", "value")]
PRESENTS = [f"present.{n}.{part}" for n in range(LAYERS) for part in ("key", "value")]


@functools.cache
def compiled(cache: CacheKind) -> tuple[nn.Module, Decoder]:
    module = peaked(MODELS["llama"]())
    room = ROOM if cache == "static" else None
    return module, attngraph.optimize_decoder(module, cache=cache, max_length=room)


@pytest.fixture(params=["growing", "static"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[nn.Module, Path, CacheKind]:
    module, decoder = compiled(request.param)
    path = tmp_path / "model.onnx"
    decoder.save(path)
    return module, path, request.param


def test_a_caller_who_knows_the_names_alone_has_eagers_tokens(
    written: tuple[nn.Module, Path, CacheKind],
) -> None:
    """Ids, a mask as long as all tokens, and each present in place of its past: nothing more."""
    module, path, cache = written
    session = onnxruntime.InferenceSession(path)
    assert [value.name for value in session.get_inputs()] == ["input_ids", "attention_mask", *PASTS]
    assert [value.name for value in session.get_outputs()] == ["logits", *PRESENTS]
    ids, mask = prompts(3)
    expected = module.generate(
        ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    _, groups, _, width = session.get_inputs()[2].shape
    shape = [len(ids), groups, ROOM if cache == "static" else 0, width]
    pasts = {name: numpy.zeros(shape, numpy.float32) for name in PASTS}
    whole, new, shown = ids.numpy(), ids.numpy(), mask.numpy()
    for _ in range(STEPS):
        feeds = {"input_ids": new, "attention_mask": shown, **pasts}
        logits, *presents = session.run(None, feeds)
        pasts = dict(zip(PASTS, presents, strict=True))
        new = logits[:, -1].argmax(-1)[:, None]
        whole = numpy.concatenate([whole, new], 1)
        shown = numpy.concatenate([shown, numpy.ones_like(new)], 1)
    assert whole.tolist() == expected.tolist()


def test_a_file_with_other_names_still_loads_and_is_verified(
    written: tuple[nn.Module, Path, CacheKind],
) -> None:
    """Those that the code itself has, as files had before."""
    module, path, cache = written
    model = onnx_ir.load(path)
    called = {name: name.replace("past_key_values.", "past_").replace(".", "_") for name in PASTS}
    called |= {name: name.replace(".", "_") for name in PRESENTS}
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.name = called.get(value.name or "", value.name)
    layout = Layout.from_json(model.metadata_props[METADATA_KEY], "the file")
    layout = replace(
        layout,
        pasts=tuple(map(called.__getitem__, layout.pasts)),
        presents=tuple(map(called.__getitem__, layout.presents)),
    )
    model.metadata_props[METADATA_KEY] = layout.to_json()
    onnx_ir.save(model, path)
    ids, mask = prompts(3)
    assert Decoder.load(path).session.input_names[2:4] == ("past_0_key", "past_0_value")
    expected = compiled(cache)[1].generate(ids, STEPS, mask)
    assert torch.equal(Decoder.load(path).generate(ids, STEPS, mask), expected)
    with Session.open(path, Target("cpu")) as session:
        found = verify_file(Model(module, None, (), {}, None, "llama"), path, session)
    assert found.paired == {"inputs": "name", "outputs": "name"}
    assert found.passed, str(found.parity)


def test_names_may_be_exchanged() -> None:
    graph = Graph()
    for name in ("x", "y", "z"):
        graph.add_input(name, TensorType(torch.float32, (2,)))
    graph.set_outputs(graph.inputs[:2], ["a", "b"])
    graph.rename({"x": "y", "y": "x", "a": "b", "b": "a"})
    assert [value.name for value in graph.inputs] == ["y", "x", "z"]
    assert graph.output_names == ("b", "a")
    assert graph.unique_name("x") != "x"
