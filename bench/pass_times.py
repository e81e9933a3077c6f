"""Seconds of each pass, and their share of the whole time from module to saved ONNX.

    python -m bench.pass_times [--layers 32] [--repeat 3]

Each run has a process of its own; the figure of a pass is the median over the runs of the sum over
its places in the pipeline. `--profile` prints where the slowest pass spends its time instead.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from bench.compile_time import llama
from bench.harness import in_process, options_of
from bench.machine import write

BUDGET = 0.1
"""The share of the total that no pass may exceed."""


def measure(layers: int) -> dict[str, Any]:
    """One run in this process: the seconds of each pass by name, and of everything."""
    warnings.simplefilter("ignore")
    from attngraph.compiling.compiler import optimize

    module, args, shapes = llama(layers)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        optimized = optimize(module, args, dynamic_shapes=shapes, verify="off")
        optimized.save(Path(folder) / "model.onnx")
    total = time.perf_counter() - start
    seconds: dict[str, float] = {}
    for result in optimized.report.passes:
        seconds[result.name] = seconds.get(result.name, 0.0) + result.seconds
    return {"total_s": total, "passes_s": seconds}


def profile(layers: int) -> None:
    """Prints the functions in which the slowest pass spends its time."""
    warnings.simplefilter("ignore")
    from attngraph.compiling.pipeline import pipeline
    from attngraph.frontend.model import Model, trace
    from attngraph.passes import run

    module, args, shapes = llama(layers)
    graph = trace(Model.of_module(module, args, shapes)).graph
    slowest, most = None, -1.0
    for item in pipeline():
        recorder = cProfile.Profile()
        recorder.enable()
        (result,) = run(graph, [item])
        recorder.disable()
        if result.seconds > most:
            slowest, most = recorder, result.seconds
            print(f"{item.name}: {most:.3f} s")
    if slowest is not None:
        pstats.Stats(slowest).sort_stats("tottime").print_stats(20)


def main() -> None:
    options = options_of(__doc__, layers=32, repeat=3, profile=False)
    if options.profile:
        profile(options.layers)
        return
    runs = [in_process(measure, layers=options.layers) for _ in range(options.repeat)]
    total = statistics.median(run["total_s"] for run in runs)
    rows = []
    for name in runs[0]["passes_s"]:
        seconds = statistics.median(run["passes_s"][name] for run in runs)
        share = statistics.median(run["passes_s"][name] / run["total_s"] for run in runs)
        rows.append({"pass": name, "seconds": seconds, "share": share})
    rows.sort(key=lambda row: -row["share"])
    for row in rows:
        over = "  over the budget" if row["share"] > BUDGET else ""
        print(f"{row['pass']:20} {row['seconds']:7.3f} s {row['share']:7.2%}{over}")
    print(write("pass_times", {"layers": options.layers, "total_s": total, "rows": rows}))
    if rows[0]["share"] > BUDGET:
        sys.exit(1)


if __name__ == "__main__":
    main()
