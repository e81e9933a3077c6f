"""Time per call of an optimised model against eager PyTorch.

    python -m bench.latency MODEL.pt2 MODEL.onnx [--rounds 7] [--seconds 0.5]

Each engine runs in a process of its own, because onnxruntime's threads spin on after a call and
slow their neighbours; their blocks take turns. Printed: medians, spread, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def _eager(path: Path) -> tuple[Callable[[], Any], str]:
    program = torch.export.load(path)
    module, (args, kwargs) = program.module(), program.example_inputs or ((), {})
    return lambda: module(*args, **kwargs), "eager PyTorch"


def _onnx(path: Path, model: Path) -> tuple[Callable[[], Any], str]:
    from attngraph.export.session import Session
    from attngraph.export.target import parse_target

    args, _ = torch.export.load(model).example_inputs or ((), {})
    session = Session.open(path, parse_target("cpu"))
    tensors = [leaf for leaf in args if isinstance(leaf, torch.Tensor)]
    return lambda: session.run(tensors), "attngraph on onnxruntime"


def _serve(engine: str, model: Path, optimised: Path, seconds: float) -> None:
    """Runs one block of calls per line of standard input; prints milliseconds per call."""
    call, _ = _eager(model) if engine == "eager" else _onnx(optimised, model)
    with torch.no_grad():
        for _ in range(3):
            call()
        print("ready", flush=True)
        for _ in sys.stdin:
            end, calls, start = time.perf_counter() + seconds, 0, time.perf_counter()
            while time.perf_counter() < end:
                call()
                calls += 1
            print(json.dumps((time.perf_counter() - start) / calls * 1e3), flush=True)


def compare(model: Path, optimised: Path, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Milliseconds per call by engine, one figure per round."""
    engines = {}
    for name in ("eager", "onnx"):
        command = [sys.executable, "-W", "ignore", "-m", "bench.latency", str(model)]
        command += [str(optimised), "--engine", name, "--seconds", str(seconds)]
        engines[name] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    figures: dict[str, list[float]] = {name: [] for name in engines}
    for process in engines.values():
        assert process.stdout is not None
        process.stdout.readline()
    for _ in range(rounds):
        for name, process in engines.items():
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            figures[name].append(json.loads(process.stdout.readline()))
    for process in engines.values():
        process.communicate()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("optimised", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--engine", choices=["eager", "onnx"])
    options = parser.parse_args()
    if options.engine:
        _serve(options.engine, options.model, options.optimised, options.seconds)
        return
    figures = compare(options.model, options.optimised, options.rounds, options.seconds)
    medians = {name: statistics.median(values) for name, values in figures.items()}
    for name, title in (("eager", "eager PyTorch"), ("onnx", "attngraph, onnxruntime")):
        low, high = min(figures[name]), max(figures[name])
        print(f"  {title:24} {medians[name]:8.3f} ms per call (from {low:.3f} to {high:.3f})")
    print(f"  {'ratio':24} {medians['eager'] / medians['onnx']:8.2f} × as fast, at the sample size")


if __name__ == "__main__":
    main()
