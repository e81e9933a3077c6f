"""Which form of an attention is fastest at which number of queries, on this CPU.

    python -m bench.block_causal [--seconds 1.0] [--longest 4096] [--cpu-time] [--keep]
        [--case "causal, window" …]

Measures every form that the kernel table allows, of static lengths, and the block forms of a
dynamic length behind their branch. Writes bench/results/block_causal-FAMILY.json, of this machine's
family of CPUs; with --keep also export/kernels/measured.json, which the kernel table chooses by.
With --case only these are measured, and the others stay as they were. Run it on a quiet machine;
where others work, --cpu-time measures the processor time of one thread.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime
import torch

from attngraph.export.families import own_family
from attngraph.export.files.save import to_session
from attngraph.export.kernels import Choice, Facts
from attngraph.export.kernels.choice import candidates, version_of
from attngraph.export.kernels.crossovers import case_of
from attngraph.export.kernels.facts import BOOL, CAUSAL, LENGTHS, SINKS, WINDOW
from attngraph.export.kernels.table import MASKED, PRIMITIVE
from attngraph.export.lowering.lower import lower
from attngraph.export.target import Target
from attngraph.export.tuning.timing import milliseconds, site_graph, time_forms
from attngraph.ir import DimInfo, Graph, TensorType
from attngraph.ir.dims import symbol
from bench import machine
from bench.harness import keep, option, options_of

SIZES = (1, 8, 32, 128, 256, 512, 1024, 2048, 4096)
HEADS, SIZE, NEAR = 12, 64, 128
CPU = Target("cpu")
MEASURED = Path(__file__).parents[1] / "export" / "kernels" / "measured.json"


def _facts(features: Sequence[str], length: int) -> Facts:
    return Facts(
        dtype=torch.float32,
        heads=HEADS,
        groups=HEADS,
        head_size=SIZE,
        value_size=SIZE,
        batch=(1, 1),
        queries=(length, length),
        keys=(length, length),
        square=True,
        aligned_keys=length % 4 == 0,
        features=frozenset(features),
        positive_scale=True,
        window=NEAR if WINDOW in features else 0,
    )


@dataclass(frozen=True)
class Timer:
    """Wall time on all cores, or the processor time of one thread."""

    threads: int
    clock: Callable[[], float]


CASES = (
    (CAUSAL,),
    (CAUSAL, BOOL),
    (CAUSAL, WINDOW),
    (CAUSAL, SINKS),
    (CAUSAL, LENGTHS),
    (BOOL,),
    (LENGTHS,),
    (),
)


def static(
    lengths: Sequence[int], seconds: float, timer: Timer, cases: Sequence[str]
) -> dict[str, dict[str, dict[int, float]]]:
    """Milliseconds by case, form and length, each length a number in the model."""
    version = version_of(onnxruntime.__version__)
    results: dict[str, dict[str, dict[int, float]]] = {}
    for features in CASES:
        if case_of(_facts(features, 8)) not in cases:
            continue
        rows = results.setdefault(case_of(_facts(features, 8)), {})
        for length in lengths:
            facts = _facts(features, length)
            forms = [c.form for c in candidates(facts, CPU, version) if not c.refused]
            forms = [form for form in forms if form != PRIMITIVE or length <= 1024]
            graph = site_graph(facts, length)
            found = time_forms(graph, forms, CPU, seconds, threads=timer.threads, clock=timer.clock)
            for name, ms in found.items():
                rows.setdefault(name, {})[length] = ms
            print(f"{case_of(facts):16} S={length:5} " + _line(found), flush=True)
    return results


def dynamic(lengths: Sequence[int], seconds: float, timer: Timer) -> dict[str, dict[int, float]]:
    """Causal blocks of a dynamic length, which an `If` takes from 256 queries on."""
    facts = _facts((CAUSAL,), 8)
    forms = [c.form for c in candidates(facts, CPU, version_of(onnxruntime.__version__))]
    results: dict[str, dict[int, float]] = {}
    for form in forms:
        if form.blocks > 1:
            graph = _dynamic(site_graph(facts, 8))
            (node,) = graph
            model = lower(graph, kernels={node: Choice(form, "", 256, MASKED)})
            with to_session(model, CPU, threads=timer.threads) as session:
                for length in lengths:
                    inputs = [torch.randn(1, length, HEADS * SIZE) for _ in graph.inputs]
                    session.run(inputs)
                    blocks = [
                        milliseconds(partial(session.run, inputs), seconds / 5, timer.clock)
                        for _ in range(5)
                    ]
                    results.setdefault(f"{form.name}, dynamic", {})[length] = sorted(blocks)[2]
    return results


def _dynamic(graph: Graph) -> Graph:
    """The same site with a named number of queries and keys."""
    graph.dims["seq"] = DimInfo(low=1, high=None, hint=8)
    for value in [*graph.inputs, *graph.outputs]:
        batch, _, width = value.shape
        value.type = TensorType(value.dtype, (batch, symbol("seq"), width))
    return graph


def _line(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {ms:.3f}" for name, ms in sorted(found.items(), key=lambda i: i[1]))


def kept(results: dict[str, Any]) -> dict[str, Any]:
    """What the kernel table keeps of the results: no primitives, three digits."""
    rows = {
        case: {
            form: {str(length): float(f"{ms:.3g}") for length, ms in row.items()}
            for form, row in forms.items()
            if form != PRIMITIVE.name
        }
        for case, forms in results["static"].items()
    }
    return {
        "onnxruntime": results["onnxruntime"],
        "shape": results["shape"],
        "timed": results["timed"],
        "milliseconds": rows,
    }


def main() -> None:
    known = [case_of(_facts(features, 8)) for features in CASES]
    options = options_of(
        __doc__,
        seconds=option(1.0, "for each form and length"),
        longest=SIZES[-1],
        keep=option(False, "also write the kernel table's times"),
        cpu_time=option(False, "processor time of one thread"),
        case=option([], "measure these cases only", choices=known),
    )
    timer = Timer(os.cpu_count() or 1, time.perf_counter)
    if options.cpu_time:
        timer = Timer(1, time.thread_time)
    lengths = [length for length in SIZES if length <= options.longest]
    name = f"block_causal-{own_family()}"
    kept_before = machine.RESULTS / f"{name}.json"
    before = json.loads(kept_before.read_text()) if options.case else {}
    cases = options.case or known
    how = "processor time of 1 thread" if options.cpu_time else f"{timer.threads} threads"
    found = static(lengths, options.seconds, timer, cases)
    results: dict[str, Any] = {
        "onnxruntime": onnxruntime.__version__,
        "shape": f"batch 1, {HEADS} heads of {SIZE}, float32, windows of {NEAR}, lengths of half",
        "timed": {**before.get("timed", {}), **dict.fromkeys(cases, how)},
        "load_before": os.getloadavg()[0],
        "static": {**before.get("static", {}), **found},
        "dynamic": before.get("dynamic") or dynamic(lengths, options.seconds, timer),
    }
    path = machine.write(name, results)
    print(f"wrote {path}")
    if options.keep:
        known = json.loads(MEASURED.read_text())
        known["families"][own_family()] = kept(json.loads(path.read_text()))
        keep(MEASURED, known)


if __name__ == "__main__":
    main()
