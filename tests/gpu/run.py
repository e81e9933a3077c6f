"""All that a GPU can tell: `make gpu OUT=dir`, or without an installation of its own

    python -m tests.gpu.run OUT [--steps opening suite kernels decode bench corpus]
        [--precision fp16 …] [--timed fp16 …] [--workload …] [--engine …] [--layers 0]
        [--minutes 9] [--quick] [--at-once 16]

`opening` tries out whether a session works at all. `suite` compiles every model of the parity suite
in float16, bfloat16 and float32 (TF32 off), and checks parity, placement, and the attention kernels
dispatched against the kernel table. Both are in OUT/suite.json. `kernels` runs every operator that
a lowering emits (tests/kernels) on the GPU: OUT/kernels.json. `decode` times a step behind 1024
tokens against eager with its cache: OUT/decode_*.json. `bench` times the workloads of bench/
against eager PyTorch, torch.compile with CUDA graphs and torch.onnx.export: OUT/speed_*.json. What
was measured against what is wanted of a GPU: OUT/figures.json. `corpus` compiles and checks the
architectures of transformers, as many as time allows: OUT/corpus_*.json.

What is timed is prepared beside what is only checked, and then runs alone.

What tells most comes first. Each result is written as it comes, and nothing waits for long for what
hangs. With `--minutes` all ends after that time; what was left out is named, and a call with the
same OUT takes up there. The exit code is 1 where anything was wrong or left out, and where CUDA is
missing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from attngraph.measuring.engines import BY_NAME as ENGINES
from bench.harness import Turn
from bench.machine import describe
from bench.speed import parse as speed_options
from bench.speed import result_path
from bench.workloads import BY_NAME
from tests.gpu import architectures, figures
from tests.gpu.checks import (
    NAMES,
    PATIENCE,
    PRECISIONS,
    ended,
    examine,
    faults,
    target,
    told_by,
    why_not,
)
from tests.gpu.opening import OPENS
from tests.kernels.table import CASES

STEPS = ("opening", "suite", "kernels", "decode", "bench", "corpus")
SUITE = "suite.json"
LEFT_OUT = "left out: its time was up"
_ENGINES = ("eager", "compile", "onnx", "attngraph", "attngraph-packed")
_QUICK = 3
_KERNELS = 4
"""Processes among which the operators are divided."""
_SHARE = 4
"""Of the cores, what each process has that is prepared: one in so many."""
_ANSWER, _WORK = 180.0, 300.0
"""Seconds that one engine may take, and all of a workload."""
_TOLD, _LOG = 400, 2000
"""Characters of a fault, of which all are in the file, and of a log."""


_ENDINGS = {None: LEFT_OUT, 0: "done"}


class Clock:
    """When all must have ended."""

    def __init__(self, minutes: float | None) -> None:
        self._end = None if minutes is None else time.monotonic() + 60 * minutes

    def at_most(self, seconds: float) -> float:
        """So many, or those that are left."""
        return seconds if self._end is None else max(min(seconds, self._end - time.monotonic()), 0)


def opening(out: Path, options: argparse.Namespace, clock: Clock) -> int:
    """The number of things that a session can't do here. Raises SystemExit where none opens."""
    path = out / SUITE
    if "opening" in _known(path):
        return 0
    left = clock.at_most(PATIENCE)
    if not left:
        print(f"opening: {LEFT_OUT}", flush=True)
        return 1
    found, log = told_by("tests.gpu.opening", _machine(options), seconds=left)
    _write(path, {**_known(path), "opening": found})
    print(f"opening: {json.dumps(found)}", flush=True)
    tried = [each for each in found.values() if isinstance(each, dict)]
    if not any(each.get(OPENS) == "" for each in tried):
        raise SystemExit(f"No session opens here, so nothing else is tried: {log[-_LOG:]}")
    return sum(bool(wrong) for each in tried for wrong in each.values())


def suite(out: Path, options: argparse.Namespace, clock: Clock) -> int:
    """The number of models and precisions with a fault, or left out."""
    path, machine = out / SUITE, _machine(options)
    known = _known(path)
    results: dict[str, dict[str, Any]] = known.get("results", {})
    names = NAMES[:_QUICK] if options.quick else NAMES
    wanted = [(name, precision) for precision in options.precision for name in names]
    missing = [(n, p) for n, p in wanted if n not in results.get(p, {})]

    def examined(name: str, precision: str) -> dict[str, Any] | None:
        left = clock.at_most(PATIENCE)
        many = options.at_once
        return examine(name, precision, machine, at_once=many, seconds=left) if left else None

    with ThreadPoolExecutor(options.at_once) as pool:
        jobs = {pool.submit(examined, *job): job for job in missing}
        for job in as_completed(jobs):
            name, precision = jobs[job]
            found = job.result()
            if found is None or ("process" in found and not clock.at_most(1)):
                print(f"{name} in {precision}: {LEFT_OUT}", flush=True)
                continue
            found["faults"] = faults(found, kernels=machine != "cpu")
            results.setdefault(precision, {})[name] = found
            _write(path, {**known, "target": machine, "results": results})
            for fault in found["faults"]:
                print(f"{name} in {precision}: {fault[:_TOLD]}", flush=True)
    right = sum(not results.get(p, {}).get(n, {"faults": ["none"]})["faults"] for n, p in wanted)
    print(f"suite: {right} of {len(wanted)} are right", flush=True)
    return len(wanted) - right


def kernels(out: Path, options: argparse.Namespace, clock: Clock) -> int:
    """The number of processes that found an operator to differ from the CPU's, or that ended."""
    path = out / "kernels.json"
    if path.exists():
        return 0
    names = options.case or (["softmax", "layer_norm"] if options.quick else list(CASES))
    shares = [names[at::_KERNELS] for at in range(min(_KERNELS, len(names)))]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(shares)) as pool:
        parts = [Path(folder) / f"{at}.json" for at in range(len(shares))]

        def run(share: list[str], part: Path) -> int | None:
            command = ["-m", "tests.kernels", *share, "--target", _machine(options)]
            left = clock.at_most(_WORK)
            whole = ["-W", "ignore", *command, "--results", str(part)]
            return ended(whole, _KERNELS, left) if left else None

        codes = list(pool.map(run, shares, parts))
        read = [json.loads(part.read_text()) for part in parts if part.exists()]
        _write(path, _joined(read))
    print(f"kernels: {', '.join(map(str, codes))} (0 is well)", flush=True)
    return sum(code != 0 for code in codes)


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What several processes found, by kind; of what is PyTorch's result the dtypes by case."""
    found: dict[str, Any] = {}
    for part in parts:
        del part["versions"]
        for kind, rows in part.items():
            if kind not in ("same", "none"):
                found.setdefault(kind, []).extend(rows)
                continue
            for row in rows:
                before = found.setdefault(kind, {}).get(row["case"], "")
                found[kind][row["case"]] = f"{before} {row['dtype']}".strip()
    return found


CHECKS = {"suite": suite, "kernels": kernels}


def timed(
    out: Path,
    options: argparse.Namespace,
    clock: Clock,
    precision: str,
    beside: Callable[[], int],
) -> int:
    """The number of things that failed in a precision, or were left out, and what `beside` counts.

    Workloads prepare side by side, and beside what is only checked; then they are timed one by one.
    Decoding comes after them: it takes longer than all of them to get ready.
    """
    with tempfile.TemporaryDirectory() as folder:
        turn = Path(folder) / "turn"
        commands = _timings(out, options, precision, turn)
        decoding = commands.pop("decode", None)
        mine = Turn(turn)
        with ThreadPoolExecutor(len(commands) or 1) as pool:
            jobs = [
                pool.submit(_ran, f"{name} in {precision}", command, options, clock, _SHARE)
                for name, command in commands.items()
            ]
            wrong = beside()
            mine.end()
            wrong += sum(job.result() for job in jobs)
        if decoding is not None:
            wrong += _ran(f"decode in {precision}", decoding, options, clock)
        return wrong


def _timings(
    out: Path, options: argparse.Namespace, precision: str, turn: Path
) -> dict[str, list[str]]:
    """The commands that time what there is no figure of yet."""
    more = ["--target", _machine(options), "--precision", precision, "--results", str(out)]
    more += ["--patience", str(_ANSWER), "--turn", str(turn)]
    found = {}
    if "decode" in options.steps and not (out / f"decode_{precision}.json").exists():
        layers = ["--layers", str(options.layers)] if options.layers else []
        found["decode"] = ["-m", "bench.decode", *layers, *more]
    if "bench" in options.steps:
        for name in _missing(out, options, precision):
            start = ["-m", "bench.speed", "--only", name, "--layers", str(options.layers)]
            start += ["--static", "--seconds", "0.2", *more]
            found[name] = [*start, "--engine", *options.engine]
    return found


def _missing(out: Path, options: argparse.Namespace, precision: str) -> list[str]:
    done = _known(_speed(out, _machine(options), precision, options.quick)).get("workloads", {})
    return [name for name in options.workload if name not in done]


def corpus(out: Path, options: argparse.Namespace, clock: Clock) -> int:
    """The number of precisions in which a row was wrong, failed or left out."""
    wrong = 0
    for precision in options.precision:
        how = {"at_once": options.at_once, "clock": clock, "quick": options.quick}
        right, count = architectures.tried(out, _machine(options), precision, **how)
        print(f"corpus in {precision}: {right} of {count} are right", flush=True)
        wrong += right < count
    return wrong


def _ran(
    what: str, command: list[str], options: argparse.Namespace, clock: Clock, at_once: int = 1
) -> bool:
    """Whether a command failed or did not come to its end in time."""
    start, code = time.monotonic(), None
    if left := clock.at_most(_WORK):
        full = ["-W", "ignore", *command, *(["--quick"] if options.quick else [])]
        code = ended(full, at_once, left)
    ending = _ENDINGS.get(code, f"failed ({code})")
    print(f"{what}: {ending}, {time.monotonic() - start:.0f} s", flush=True)
    return code != 0


def _machine(options: argparse.Namespace) -> str:
    return str(options.target or target())


def _speed(out: Path, machine: str, precision: str, quick: bool) -> Path:
    """Where bench.speed writes."""
    parsed = ["--target", machine, "--precision", precision, "--results", str(out)]
    return result_path(speed_options([*parsed, *(["--quick"] if quick else [])]))


def _known(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _write(path: Path, found: dict[str, Any]) -> None:
    """As a whole or not at all, whenever this process is ended."""
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps({**found, "measured_on": describe()}, indent=1) + "\n")
    beside.replace(path)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--timed", nargs="+", choices=PRECISIONS, help="those that are timed")
    parser.add_argument("--layers", type=int, default=0, help="of what is timed; 0 for all")
    parser.add_argument("--case", nargs="+", default=[], help="of tests.kernels; all if not given")
    parser.add_argument("--workload", nargs="+", choices=list(BY_NAME), default=list(BY_NAME))
    parser.add_argument("--engine", nargs="+", choices=list(ENGINES), default=list(_ENGINES))
    parser.add_argument("--minutes", type=float, help="after which all ends")
    parser.add_argument("--quick", action="store_true", help="three models, tiny workloads")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1, help="models at a time")
    parser.add_argument("--target", help="cpu tries the suite itself out where there is no GPU")
    options = parser.parse_args(arguments)
    options.timed = options.timed or options.precision
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.target != "cpu" and (missing := why_not()):
        print(f"{missing}; run make gpu on a machine with a GPU.", file=sys.stderr)
        return 1
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    clock, wrong = Clock(options.minutes), 0
    if "opening" in options.steps:
        wrong += opening(out, options, clock)

    def checked() -> int:
        steps = [step for name, step in CHECKS.items() if name in options.steps]
        with ThreadPoolExecutor(len(steps) or 1) as pool:
            return sum(pool.map(lambda step: step(out, options, clock), steps))

    if {"decode", "bench"}.isdisjoint(options.steps):
        wrong += checked()
    else:
        for precision in options.timed:
            first = precision == options.timed[0]
            wrong += timed(out, options, clock, precision, checked if first else lambda: 0)
            _write(out / "figures.json", {"figures": figures.of(out)})
    if "corpus" in options.steps:
        wrong += corpus(out, options, clock)
    for figure in figures.of(out):
        print(figures.told(figure), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
