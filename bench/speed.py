"""Time per call of every workload on every engine: bench/results/speed-FAMILY.json.

    python -m bench.speed [--only bert_padded …] [--layers 4] [--rounds 7] [--prepare] [--quick]

`--prepare` only writes the files that the other engines run, which takes most of the time and needs
no quiet machine; a later run with the same versions uses them again (out/bench). A workload that
is measured takes its place in the results, the others stay. `--quick` runs tiny models and writes
out/bench/quick.json instead.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from attngraph.export.families import own_family
from attngraph.frontend.files.source import Source
from attngraph.measuring.contest import PATIENCE, Contest, engines_named, hold
from attngraph.measuring.job import Job
from bench import workloads
from bench.harness import Turn, option, options_of
from bench.machine import RESULTS, describe
from bench.workloads import WORKLOADS, Workload

OUT = Path("out/bench")


def job_of(workload: Workload, options: argparse.Namespace) -> Job:
    source = Source(factory=workload.factory)
    return Job(
        source,
        options.target,
        options.precision,
        options.static,
        threads=options.threads,
        padding=workload.padding,
    )


def folder_of(workload: Workload, job: Job) -> Path:
    """One for each thing that other engines' files depend on, so that they can be kept."""
    known = {
        "job": str(job),
        "environment": {k: v for k, v in os.environ.items() if k.startswith("BENCH_")},
        "packages": describe()["packages"],
        "workloads": Path(workloads.__file__).read_text("utf-8"),
    }
    key = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
    return OUT / f"{workload.name}-{key[:10]}"


def result_of(workload: Workload, contest: Contest, options: argparse.Namespace) -> dict[str, Any]:
    """As it is saved, with the machine and commit of this very workload."""
    return {
        "measured_on": describe(),
        "title": workload.title,
        "layers": {"whole": workload.layers, "measured": workload.measured_layers},
        "target": options.target,
        "precision": options.precision,
        "static": options.static,
        "rounds": options.rounds,
        "seconds": options.seconds,
        **contest.to_dict(),
    }


def result_path(options: argparse.Namespace) -> Path:
    """Of the results: quick ones are no figures, and never among those of the page."""
    where = options.target.partition(":")[0]
    name = "quick" if options.quick else "speed"
    if (where, options.precision) != ("cpu", "fp32"):
        name += f"_{where}_{options.precision}"
    elif not options.quick:
        name += f"-{own_family()}"  # of another family of CPUs none is written over
    return (options.results or (OUT if options.quick else RESULTS)) / f"{name}.json"


def _add(path: Path, name: str, result: dict[str, Any]) -> None:
    kept = json.loads(path.read_text())["workloads"] if path.exists() else {}
    kept[name] = result
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"workloads": kept}, indent=1) + "\n")


def _print(contest: Contest) -> None:
    for row in contest.rows:
        if row.median_ms is None:
            print(f"    {row.engine:22} {row.status}: {row.reason}")
            continue
        error = "" if row.error is None else f"  error {row.error:.2%} rms"
        ratio = f"{row.ratio:6.2f} × attngraph's" if row.ratio is not None else ""
        spread = f"({min(row.ms):.2f} to {max(row.ms):.2f})"
        print(f"    {row.engine:22} {row.median_ms:10.2f} ms {spread:22} {ratio}{error}")
    print(f"    {contest.load}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    options = options_of(
        __doc__,
        arguments,
        only=option([], choices=list(workloads.BY_NAME)),
        engine=[],
        layers=option(4, "at most; 0 leaves models as they are"),
        rounds=7,
        seconds=0.5,
        threads=option(None, type=int),
        target="cpu",
        precision=option("fp32", choices=["fp32", "fp16", "bf16"]),
        static=False,
        at_once=option(2, "files prepared at a time"),
        results=option(None, "a folder", type=Path),
        prepare=False,
        prepared=False,
        patience=option(PATIENCE, "seconds for a file or an answer", type=float),
        turn=option(None, "a file: see bench.harness.Turn", type=Path),
        quick=False,
    )
    if options.quick:
        options.layers, options.rounds, options.seconds = 1, 2, 0.01
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    engines_named(options.engine)
    os.environ["BENCH_LAYERS"] = str(options.layers)
    os.environ["BENCH_TINY"] = "1" if options.quick else ""
    failed = 0
    for workload in WORKLOADS:
        if not options.only or workload.name in options.only:
            turn = Turn(options.turn)
            try:
                failed += not _measured(workload, options, turn)
            finally:
                turn.end()
    return 1 if failed else 0


def _measured(workload: Workload, options: argparse.Namespace, turn: Turn) -> bool:
    """Whether attngraph was timed, or its file made, where that is all that was asked for."""
    job, start = job_of(workload, options), time.perf_counter()
    try:
        contest = hold(
            job,
            engines=options.engine,
            rounds=options.rounds,
            seconds=options.seconds,
            folder=folder_of(workload, job),
            at_once=options.at_once,
            time_them=not options.prepare,
            prepared=options.prepared,
            patience=options.patience,
            ready=turn.take,
        )
    except Exception as error:
        print(f"{workload.title}: {error}", file=sys.stderr)
        return False
    print(f"{workload.title} ({time.perf_counter() - start:.0f} s)", flush=True)
    if options.prepare:
        return True
    _print(contest)
    _add(result_path(options), workload.name, result_of(workload, contest, options))
    return contest.ours is None or contest.ours.status == "timed"


if __name__ == "__main__":
    sys.exit(main())
