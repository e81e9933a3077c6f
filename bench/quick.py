"""Checks in less than five minutes that the ratios that matter are where they should be.

    python -m bench.quick [--only bert_padded …] [--rounds 5] [--layers 2] [--minutes 5] [--anyway]

A bar is the least that another engine's time over ours may be, the median over the rounds of one
run. Exits with 1 where a ratio lies below its bar, or an engine of ours gave no time; with 2 where
there is no verdict: others took too much of the machine, or not all was measured in `--minutes`.
A machine that is busy to begin with is measured with `--anyway` only. Writes nothing but out/bench.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from attngraph.errors import LoadError
from attngraph.measuring.contest import Contest, Row, hold
from attngraph.measuring.load import before
from bench import speed
from bench.harness import option, options_of
from bench.workloads import BY_NAME


@dataclass(frozen=True)
class Bar:
    """`theirs` may take no less than `least` times the time of `ours`; of two quantized engines,
    ours must have no more than `error` times the error of theirs.
    """

    workload: str
    theirs: str
    least: float
    ours: str = "attngraph"
    error: float | None = None


BARS = (
    Bar("bert_padded", "onnx", 1.0),
    Bar("bert_padded", "onnx", 1.5, "attngraph-packed"),
    Bar("bert_padded", "onnx-int8", 1.05, "attngraph-int8", error=0.5),
    Bar("llama_prefill", "onnx", 1.3),
    Bar("llama_prefill", "eager", 1.0),
    Bar("per_head", "onnx", 1.05),
)


def misses(contest: Contest, bars: list[Bar]) -> Iterator[tuple[bool, str]]:
    """For each bar whether it is missed, and a line on it."""
    rows = {row.engine: row for row in contest.rows}
    for bar in bars:
        theirs, ours = rows[bar.theirs], rows[bar.ours]
        what = f"{bar.workload}: {bar.theirs} ÷ {bar.ours}"
        if lost := next((row for row in (ours, theirs) if row.status != "timed"), None):
            yield True, f"{what}: {lost.engine} {lost.status}: {lost.reason}"
            continue
        found = [a / b for a, b in zip(theirs.ms, ours.ms, strict=True)]
        ratio = statistics.median(found)
        missed = ratio < bar.least
        said = f"{ratio:.2f} ({min(found):.2f} to {max(found):.2f}), at least {bar.least:.2f}"
        if bar.error is not None:
            share = _share(ours, theirs)
            missed |= share > bar.error
            said += f"; error {share:.2f} of theirs, at most {bar.error:.2f}"
        yield missed, f"{what}: {said}"


def _share(ours: Row, theirs: Row) -> float:
    if ours.error is None or theirs.error is None:
        return float("inf")
    return ours.error / theirs.error if theirs.error else float(ours.error > 0)


def _contest(
    name: str, bars: list[Bar], options: argparse.Namespace, until: float
) -> Contest | None:
    """What is measured of a workload; None where that isn't done in time."""
    job = speed.job_of(BY_NAME[name], speed.parse([]))
    try:
        contest = hold(
            job,
            engines=list(dict.fromkeys(each for bar in bars for each in (bar.theirs, bar.ours))),
            rounds=options.rounds,
            seconds=options.seconds,
            folder=speed.folder_of(BY_NAME[name], job),
            at_once=2,
            until=until,
        )
    except LoadError:
        if time.monotonic() < until:
            raise
        return None
    return contest if time.monotonic() < until else None


def main(arguments: list[str] | None = None) -> int:
    names = list(dict.fromkeys(bar.workload for bar in BARS))
    options = options_of(
        __doc__,
        arguments,
        only=option([], choices=names),
        rounds=5,
        layers=option(2, "at most"),
        seconds=0.3,
        minutes=5.0,
        anyway=False,
    )
    until = time.monotonic() + 60 * options.minutes
    os.environ["BENCH_LAYERS"] = str(options.layers)
    os.environ.setdefault("BENCH_TINY", "")
    loads, failed, late = [before()], False, ""
    chosen = (options.only or names) if loads[0].is_trusted or options.anyway else []
    for name in chosen:
        bars = [bar for bar in BARS if bar.workload == name]
        contest = _contest(name, bars, options, until)
        if contest is None:
            late = name
            break
        loads.append(contest.load)
        for missed, line in misses(contest, bars):
            failed |= missed
            print(f"{'below' if missed else 'ok':6}{line}", flush=True)
    busy = [load for load in loads if not load.is_trusted]
    if busy:
        print(f"No verdict: {busy[0]} Run it again on a quiet machine.")
        return 2
    if late and not failed:
        print(f"No verdict: {late} was not done after {options.minutes:g} minutes.")
        return 2
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
