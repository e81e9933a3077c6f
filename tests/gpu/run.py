"""All that a GPU can tell: `make gpu OUT=dir`, or without an installation of its own

    python -m tests.gpu.run OUT [--steps suite bench decode] [--precision fp16 …] [--workload …]
        [--minutes 9] [--quick] [--at-once 8]

`suite` compiles every model of the parity suite in float16, bfloat16 and float32 (TF32 off), and
checks parity, placement, and the attention kernels dispatched against the kernel table:
OUT/suite.json. `bench` times the workloads of bench/ against eager PyTorch, torch.compile with CUDA
graphs and torch.onnx.export: OUT/speed_*.json. `decode` times a step behind 1024 tokens against
eager with its cache: OUT/decode_*.json. What was measured against what is wanted of a GPU:
OUT/figures.json.

Each result is written as it comes, so that what was found stays when a later step fails. With
`--minutes` nothing new starts after that time; what was left out is named, and a call with the same
OUT takes up there. The exit code is 1 where anything was wrong or left out, and where CUDA is
missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from bench.machine import describe
from bench.speed import parse as speed_options
from bench.speed import result_path
from bench.workloads import BY_NAME
from tests.gpu import figures
from tests.gpu.checks import NAMES, PRECISIONS, ROOT, examine, faults, target, why_not

STEPS = ("suite", "bench", "decode")
_ENGINES = ("eager", "compile", "onnx", "attngraph", "attngraph-packed")
_QUICK = 3
LEFT_OUT = "left out: its time was up"


class Clock:
    """When nothing new may start."""

    def __init__(self, minutes: float | None) -> None:
        self._end = None if minutes is None else time.monotonic() + 60 * minutes

    @property
    def left(self) -> float | None:
        """Seconds, None for any number of them."""
        return None if self._end is None else max(self._end - time.monotonic(), 0.0)


def suite(out: Path, options: argparse.Namespace, clock: Clock) -> int:
    """The number of models and precisions with a fault, or left out."""
    path, machine = out / "suite.json", options.target or target()
    results: dict[str, dict[str, Any]] = _known(path).get("results", {})
    names = NAMES[:_QUICK] if options.quick else NAMES
    wanted = [(name, precision) for precision in options.precision for name in names]
    missing = [(n, p) for n, p in wanted if n not in results.get(p, {})]

    def examined(name: str, precision: str) -> dict[str, Any] | None:
        return None if clock.left == 0 else examine(name, precision, machine)

    with ThreadPoolExecutor(options.at_once) as pool:
        jobs = {pool.submit(examined, *job): job for job in missing}
        for job in as_completed(jobs):
            name, precision = jobs[job]
            found = job.result()
            if found is None:
                print(f"{name} in {precision}: {LEFT_OUT}", flush=True)
                continue
            found["faults"] = faults(found, kernels=machine != "cpu")
            results.setdefault(precision, {})[name] = found
            _write(path, {"target": machine, "results": results})
            for fault in found["faults"]:
                print(f"{name} in {precision}: {fault}", flush=True)
    right = sum(not results.get(p, {}).get(n, {"faults": ["none"]})["faults"] for n, p in wanted)
    print(f"suite: {right} of {len(wanted)} are right", flush=True)
    return len(wanted) - right


def bench(out: Path, options: argparse.Namespace, clock: Clock) -> int:
    """The number of workloads and precisions that failed, or were left out."""
    machine, wrong = options.target or target(), 0
    for precision in options.precision:
        done = _known(_speed(out, machine, precision, options.quick)).get("workloads", {})
        for workload in options.workload:
            if workload in done:
                continue
            command = ["-m", "bench.speed", "--only", workload, "--target", machine, "--static"]
            command += ["--precision", precision, "--results", str(out), "--at-once", "4"]
            command += ["--layers", "0", "--engine", *_ENGINES]
            wrong += _ran(f"{workload} in {precision}", command, options.quick, clock)
    return wrong


def decode(out: Path, options: argparse.Namespace, clock: Clock) -> int:
    """The number of precisions in which decoding failed, or was left out."""
    machine, wrong = options.target or target(), 0
    for precision in options.precision:
        if (out / f"decode_{precision}.json").exists():
            continue
        command = ["-m", "bench.decode", "--target", machine, "--precision", precision]
        command += ["--results", str(out)]
        wrong += _ran(f"decode in {precision}", command, options.quick, clock)
    return wrong


def _ran(what: str, command: list[str], quick: bool, clock: Clock) -> bool:
    """Whether a command failed or did not come to its end in time."""
    if clock.left == 0:
        print(f"{what}: {LEFT_OUT}", flush=True)
        return True
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    full = [sys.executable, "-W", "ignore", *command, *(["--quick"] if quick else [])]
    try:
        done = subprocess.run(full, cwd=ROOT, env=environment, check=False, timeout=clock.left)
    except subprocess.TimeoutExpired:
        print(f"{what}: {LEFT_OUT}", flush=True)
        return True
    return done.returncode != 0


def _speed(out: Path, machine: str, precision: str, quick: bool) -> Path:
    """Where bench.speed writes."""
    parsed = ["--target", machine, "--precision", precision, "--results", str(out)]
    return result_path(speed_options([*parsed, *(["--quick"] if quick else [])]))


def _known(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _write(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps({"measured_on": describe(), **found}, indent=1) + "\n")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--workload", nargs="+", choices=list(BY_NAME), default=list(BY_NAME))
    parser.add_argument("--minutes", type=float, help="after which nothing new starts")
    parser.add_argument("--quick", action="store_true", help="three models, tiny workloads")
    parser.add_argument("--at-once", type=int, default=8, help="models examined at a time")
    parser.add_argument("--target", help="cpu tries the suite itself out where there is no GPU")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.target != "cpu" and (missing := why_not()):
        print(f"{missing}; run make gpu on a machine with a GPU.", file=sys.stderr)
        return 1
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    clock, wrong = Clock(options.minutes), 0
    for step, work in (("suite", suite), ("bench", bench), ("decode", decode)):
        if step in options.steps:
            wrong += work(out, options, clock)
    found = figures.of(out)
    _write(out / "figures.json", {"figures": found})
    for figure in found:
        print(figures.told(figure), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
