"""Time per call of BERT-base with half of the tokens padding, with and without ignored padding.

    python -m bench.packing [--rounds 9] [--seconds 0.5] [--target cpu] [--keep]

The workload is bench.workloads' `bert_padded`, so the plain file is the one that bench.speed holds
against other engines. With --keep the figures go to bench/results.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import warnings
from contextlib import ExitStack
from pathlib import Path

from attngraph.measuring.turns import Server, own_stdout, serve, take_turns, timed
from bench.machine import write
from bench.workloads import bert_padded

ENGINES = {"every row": False, "valid rows": True}


def save(engine: str, path: Path, target: str) -> None:
    """Writes the file of one engine, checked against eager."""
    from attngraph.compiler import optimize

    module, args, shapes = bert_padded()
    ignored = ENGINES[engine]
    optimized = optimize(
        module, args, dynamic_shapes=shapes, target=target, ignore_padded_rows=ignored
    )
    optimized.save(path)


def _serve(path: Path, seconds: float, target: str) -> None:
    """Answers with milliseconds per call."""
    answers = own_stdout()
    from attngraph.export.session import Session
    from attngraph.export.target import parse_target

    session = Session.open(path, parse_target(target))
    _, args, _ = bert_padded()
    for _ in range(3):
        session.run(args)
    serve(lambda: timed(lambda: session.run(args), seconds), answers)


def _command(*arguments: object) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "bench.packing", *map(str, arguments)]


def measure(rounds: int, options: list[str]) -> dict[str, list[float]]:
    """Milliseconds per call by engine, one figure per round."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = {}
        for engine in ENGINES:
            path = Path(folder) / f"{engine.split()[0]}.onnx"
            command = _command("--save", path, "--engine", engine, *options)
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            servers[engine] = stack.enter_context(Server(_command("--serve", path, *options)))
        for server in servers.values():
            server.answer()
        return take_turns(servers, rounds)


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--engine", choices=list(ENGINES))
    parser.add_argument("--save", type=Path)
    parser.add_argument("--serve", type=Path)
    options = parser.parse_args()
    if options.save:
        save(options.engine, options.save, options.target)
        return
    if options.serve:
        _serve(options.serve, options.seconds, options.target)
        return
    shared = ["--seconds", str(options.seconds), "--target", options.target]
    figures = measure(options.rounds, shared)
    rows = [
        {"engine": engine, "ms": found, "median_ms": statistics.median(found)}
        for engine, found in figures.items()
    ]
    for row in rows:
        print(f"  {row['engine']:12} {row['median_ms']:9.2f} ms per call")
    pairs = zip(figures["every row"], figures["valid rows"], strict=True)
    ratio = statistics.median(plain / packed for plain, packed in pairs)
    print(f"  {ratio:.2f} × as fast with --ignore-padded-rows")
    if options.keep:
        print(write("packing", {"target": options.target, "rows": rows, "ratio": ratio}))


if __name__ == "__main__":
    main()
