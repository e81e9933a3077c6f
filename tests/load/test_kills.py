"""A hundred kills at random moments of writing: what lies at the output path is whole."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch

import attngraph

ROOT = Path(__file__).parents[2]
KILLS = 100
_PROCESSES = multiprocessing.get_context("forkserver")


def _written_by_a_killed_process(path: Path, first: int, seconds: float) -> None:
    from tests.load.killed import write_on_and_on

    started = _PROCESSES.Event()
    process = _PROCESSES.Process(target=write_on_and_on, args=(str(path), first, started))
    process.start()
    assert started.wait(120)
    time.sleep(seconds)
    process.kill()
    process.join()
    process.close()


@pytest.mark.machine
def test_what_a_kill_leaves_at_the_output_path_is_whole(tmp_path: Path) -> None:
    _PROCESSES.set_forkserver_preload(["tests.load.killed"])
    folder, chance, seen = tmp_path / "out", random.Random(0), 0
    folder.mkdir()
    path = folder / "model.onnx"
    for turn in range(KILLS):
        _written_by_a_killed_process(path, turn << 10, chance.uniform(0, 0.02))
        if path.exists():
            seen += 1
            model = onnx.load(path)
            (count,) = (each.value for each in model.metadata_props if each.key == "count")
            weights = [onnx.numpy_helper.to_array(each) for each in model.graph.initializer]
            large = [weight for weight in weights if weight.size >= 256]
            assert large
            assert all((weight == int(count)).all() for weight in large)
    assert seen > KILLS // 10  # between two models there is none for a while
    attngraph.optimize(torch.nn.Linear(4, 4), (torch.randn(2, 4),), verify="off").save(path)
    left = {each.name for each in folder.iterdir()}
    assert left <= {"model.onnx", "model.onnx_data"}, "the next run removes what was left"


@pytest.mark.machine
def test_two_compiles_to_one_path_with_one_cache_folder_are_both_whole(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "attngraph", "optimize", "--factory", "examples.vit:build"]
    line += ["-o", str(tmp_path / "out" / "m.onnx"), "--tune", "--threads", "1", "--json"]
    (tmp_path / "out").mkdir()
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    both = [
        subprocess.Popen(line, env=environment, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(2)
    ]
    for process in both:
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0
        assert json.loads(said)["parity"]["passed"]
    assert {each.name for each in (tmp_path / "out").iterdir()} <= {"m.onnx", "m.onnx_data"}
    onnxruntime.InferenceSession(tmp_path / "out" / "m.onnx")
    kept = [each for each in (tmp_path / "cache" / "attngraph").rglob("*") if each.is_file()]
    assert kept
    for each in kept:
        assert each.suffix == ".json"
        json.loads(each.read_text())
