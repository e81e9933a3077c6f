"""Plain onnxruntime wheels, older and newer than ours, run what ours compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy
import pytest
import torch
from torch import Tensor

import attngraph
from attngraph.decoding.decoder import Decoder
from attngraph.export.parity.budget import compare
from attngraph.export.parity.reference import ReferenceOutputs
from attngraph.optimized import Optimized
from attngraph.options import CacheKind
from tests.models.kit import HEADS, HIDDEN
from tests.parity.test_decode import PROMPT, prompts
from tests.runtimes import run_file
from tests.runtimes.conftest import Record, wheels
from tests.runtimes.encoders import MODELS
from tests.runtimes.families import decoder


class Written(NamedTuple):
    """A compiled model, and for some inputs what our own onnxruntime computes."""

    path: Path
    given: Path
    expected: dict[str, Tensor]


def _encoder(name: str) -> tuple[Optimized, dict[str, Tensor]]:
    torch.manual_seed(0)
    module, args, shapes = MODELS[name]()
    made = attngraph.optimize(module.eval(), args, dynamic_shapes=shapes)
    return made, dict(zip(made.session.input_names, args, strict=True))


def _decoder(cache: CacheKind) -> tuple[Decoder, dict[str, Tensor]]:
    """A step of one token behind a past, whose buffers have room behind it."""
    room = 2 * PROMPT if cache == "static" else None
    made = attngraph.optimize_decoder(decoder("Llama"), cache=cache, max_length=room)
    ids, mask = prompts(3)
    held = room or PROMPT - 1
    shape = (3, HEADS // 2, held, HIDDEN // HEADS)
    random = torch.Generator().manual_seed(0)
    pasts = {name: torch.randn(shape, generator=random) for name in made.layout.pasts}
    return made, {"input_ids": ids[:, -1:], "attention_mask": mask, **pasts}


KINDS: dict[str, Callable[[], tuple[Optimized | Decoder, dict[str, Tensor]]]] = {
    "BERT": lambda: _encoder("BERT"),
    "ViT": lambda: _encoder("ViT"),
    "T5 encoder": lambda: _encoder("T5 encoder"),
    "Llama, growing cache": lambda: _decoder("growing"),
    "Llama, static cache": lambda: _decoder("static"),
}


@pytest.fixture(scope="module", params=KINDS)
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Written]:
    folder = tmp_path_factory.mktemp("onnxruntime")
    made, feeds = KINDS[request.param]()
    made.save(folder / "model.onnx")
    numpy.savez(folder / "given.npz", **{name: t.numpy() for name, t in feeds.items()})
    results = made.session.run(feeds)
    expected = dict(zip(made.session.output_names, results, strict=True))
    return request.param, Written(folder / "model.onnx", folder / "given.npz", expected)


@pytest.mark.parametrize("wheel", wheels(), ids=lambda wheel: wheel.name)
def test_a_wheel_computes_what_ours_does(
    wheel: Path, written: tuple[str, Written], tmp_path: Path, record: Record
) -> None:
    family, (path, given, expected) = written
    environment = {**os.environ, "PYTHONPATH": str(wheel)}
    files = (path, given, tmp_path / "found.npz")
    subprocess.run([sys.executable, run_file.__file__, *files], env=environment, check=True)
    with numpy.load(tmp_path / "found.npz") as found:
        version = str(found["version"])
        results = tuple(torch.from_numpy(found[name]) for name in expected)
    assert wheel.name == f"onnxruntime-{version}"
    ours = ReferenceOutputs(tuple(expected), tuple(expected.values()), (None,) * len(expected))
    parity = compare(ours, results, "fp32")
    assert parity.passed, str(parity)
    record(f"onnxruntime {version}", family, "as ours")
