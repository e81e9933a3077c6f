"""All of `make gpu` from its start to its end, on the CPU provider and with tiny models.

What it starts as processes runs in this one: each of them would import torch.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import threading
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from attngraph.measuring import contest, worker
from bench import decode, harness
from tests.gpu import checks, run

pytestmark = pytest.mark.machine

ARGUMENTS = ("--quick", "--target", "cpu", "--precision", "fp32", "--at-once", "1")
BENCH = ("--workload", "per_head", "--engine", "eager", "attngraph")


class Here(nullcontext[Any]):
    """A server of bench.speed or bench.decode."""

    process_id = os.getpid()

    def __init__(self, command: Sequence[str], *_: Any, **__: Any) -> None:
        super().__init__(self)
        if "serve" in command:
            what, folder, *more = command[command.index("serve") :]
            self._said, self._block = worker.answer(what, Path(folder), *more)
            return
        given = json.loads(command[command.index("bench.decode:block_of") + 1])
        self._said, self._block = given["engine"], None
        if given["engine"] != decode.COMPILED:  # which takes longer than all the rest
            self._block = decode.block_of(**given)

    def answer(self) -> Any:
        if self._block is None:
            raise EOFError(f"no block: {self._said}")
        return self._said

    def block(self) -> Any:
        return self._block()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The modules that would have been started as processes."""
    modules: list[str] = []
    one_at_a_time = threading.Lock()  # they share this process's arguments

    def ended(command: list[str], *_: Any) -> int:
        module, *arguments = command[command.index("-m") + 1 :]
        if "--turn" in arguments:  # there is one process alone, which would wait for itself
            at = arguments.index("--turn")
            del arguments[at : at + 2]
        with one_at_a_time, warnings.catch_warnings():
            modules.append(module)
            monkeypatch.setattr(sys, "argv", [module, *arguments])
            warnings.simplefilter("ignore")
            try:
                runpy.run_module(module, run_name="__main__")
            except SystemExit as error:
                return int(error.code or 0)
        return 0

    def work(patience: float, what: str, folder: Path, *more: str) -> dict[str, Any]:
        return worker.answer(what, folder, *more)[0]

    for module in (checks, run):
        monkeypatch.setattr(module, "ended", ended)
    for module in (contest, harness):
        monkeypatch.setattr(module, "Server", Here)
    monkeypatch.setattr(contest, "_work", work)
    for name in ("BENCH_LAYERS", "BENCH_TINY", "ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO"):
        monkeypatch.setenv(name, "")
    monkeypatch.chdir(tmp_path)
    return modules


def test_every_step_comes_to_its_end_and_is_not_run_again(
    started: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found"
    assert run.main([str(out), *ARGUMENTS, *BENCH]) == 0, capsys.readouterr().out
    modules = {"tests.gpu.opening", "tests.gpu.worker", "bench.speed", "bench.decode"}
    assert set(started) == {*modules, "tests.kernels"}
    suite = json.loads((out / "suite.json").read_text())
    assert [each["faults"] for each in suite["results"]["fp32"].values()] == [[], [], []]
    assert set(suite["opening"]["fp16"].values()) == {""}
    rows = json.loads((out / "quick.json").read_text())["workloads"]["per_head"]["rows"]
    assert [row["status"] for row in rows] == ["timed", "timed"]
    corpus = json.loads((out / "corpus_fp32.json").read_text())
    assert [row["outcome"] for row in corpus] == ["right", "right"]
    assert {path.name for path in out.iterdir()} == {
        *("suite.json", "figures.json", "kernels.json"),
        *("quick.json", "decode_fp32.json", "corpus_fp32.json"),
    }
    decoded = json.loads((out / "decode_fp32.json").read_text())
    assert {decode.GROWING, decode.STATIC} <= set(decoded["ms_per_token"])
    started.clear()
    assert run.main([str(out), *ARGUMENTS, *BENCH]) == 0
    assert started == []


def test_what_is_left_out_is_named_and_counts(
    started: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main([str(tmp_path / "out"), *ARGUMENTS, *BENCH, "--minutes", "0"]) == 1
    said = capsys.readouterr().out
    for what in ("opening", "mha in fp32", "decode in fp32", "per_head in fp32"):
        assert f"{what}: {run.LEFT_OUT}" in said
    assert started == []
