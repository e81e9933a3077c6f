"""Time per call of heads written one by one: plain export, without and with merge-heads.

    python -m bench.per_head [--rounds 9] [--seconds 0.5] [--target cpu]

Each engine runs in a process of its own, because onnxruntime's threads spin on after a call and
slow their neighbours; their blocks take turns. Saved: milliseconds per call by round, medians, and
what the files are made of.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from attngraph.measuring.turns import Server, own_stdout, serve, take_turns, timed
from bench.machine import write

ENGINES = ("torch.onnx.export", "without merge-heads", "with merge-heads")
_BATCH, _SEQ, _WIDTH, _HEADS, _LAYERS = 4, 128, 768, 12, 4


def _model(summed: bool) -> tuple[Any, tuple[torch.Tensor, ...], Any]:
    """BERT-base's width and heads, four layers, dynamic in batch and sequence."""
    from examples import per_head

    torch.manual_seed(0)
    module = per_head.Encoder(_WIDTH, _HEADS, _LAYERS, summed).eval()
    mask = torch.ones(_BATCH, _SEQ, dtype=torch.bool)
    mask[1:, -_SEQ // 4 :] = False
    axes = {0: torch.export.Dim("batch", max=1024), 1: torch.export.Dim("seq", max=4096)}
    return module, (torch.randn(_BATCH, _SEQ, _WIDTH), mask), (axes, axes)


def save(engine: str, summed: bool, path: Path, target: str) -> None:
    """Writes the ONNX file that one engine runs."""
    module, args, shapes = _model(summed)
    if engine == "torch.onnx.export":
        torch.onnx.export(module, args, path, dynamic_shapes=shapes, dynamo=True, verbose=False)
        return
    from attngraph import compiler
    from attngraph.compiler import optimize
    from attngraph.pipeline import pipeline

    if engine == "without merge-heads":
        kept = [item for item in pipeline() if item.name != "merge-heads"]
        compiler.__dict__["pipeline"] = lambda exact=False: kept
    optimize(module, args, dynamic_shapes=shapes, target=target, verify="off").save(path)


def _serve(path: Path, seconds: float, target: str) -> None:
    """Answers with milliseconds per call."""
    answers = own_stdout()
    from attngraph.export.session import Session
    from attngraph.export.target import parse_target

    session = Session.open(path, parse_target(target))
    _, args, _ = _model(summed=False)
    for _ in range(3):
        session.run(args)
    serve(lambda: timed(lambda: session.run(args), seconds), answers)


def _command(*arguments: object) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "bench.per_head", *map(str, arguments)]


def compare(paths: dict[str, Path], rounds: int, options: list[str]) -> dict[str, list[float]]:
    """Milliseconds per call by engine, one figure per round."""
    with ExitStack() as stack:
        servers = {
            engine: stack.enter_context(Server(_command("--serve", path, *options)))
            for engine, path in paths.items()
        }
        for server in servers.values():
            server.answer()
        return take_turns(servers, rounds)


def _measure(form: str, rounds: int, options: list[str]) -> list[dict[str, Any]]:
    import onnx

    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / f"{i}.onnx" for i, name in enumerate(ENGINES)}
        for engine, path in paths.items():
            command = _command("--save", path, "--engine", engine, "--form", form, *options)
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        figures = compare(paths, rounds, options)
        rows = []
        for engine, path in paths.items():
            nodes = onnx.load(path, load_external_data=False).graph.node
            ops = dict(sorted(Counter(node.op_type for node in nodes).items()))
            row = {"form": form, "engine": engine, "nodes": len(nodes), "ops": ops}
            median = statistics.median(figures[engine])
            rows.append(row | {"ms": figures[engine], "median_ms": median})
            print(f"  {form:12} {engine:20} {len(nodes):5} nodes {median:9.3f} ms per call")
    return rows


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--form", choices=["concatenated", "summed"])
    parser.add_argument("--engine", choices=ENGINES)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--serve", type=Path)
    options = parser.parse_args()
    if options.save:
        save(options.engine, options.form == "summed", options.save, options.target)
        return
    if options.serve:
        _serve(options.serve, options.seconds, options.target)
        return
    shared = ["--seconds", str(options.seconds), "--target", options.target]
    forms = [options.form] if options.form else ["concatenated", "summed"]
    rows = [row for form in forms for row in _measure(form, options.rounds, shared)]
    sizes = {"batch": _BATCH, "seq": _SEQ, "width": _WIDTH, "heads": _HEADS, "layers": _LAYERS}
    print(write("per_head", {"target": options.target, "sizes": sizes, "rows": rows}))


if __name__ == "__main__":
    main()
