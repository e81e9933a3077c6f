"""A hundred kills at random moments of writing: what lies at the output path is whole."""

from __future__ import annotations

import multiprocessing
import random
import time
from pathlib import Path

import onnx
import pytest
import torch

import attngraph

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
    assert left <= {"model.onnx", "model.onnx.data"}, "the next run removes what was left"
