"""Compiles every architecture of the corpus and writes what came of it.

`python -m tests.corpus.sweep` runs the rows of both lists with eager and with sdpa attention; rows
restrict it to some. Each row has a process of its own, so that a crash or a hang costs no other.
Records are written to bench/results/corpus.json as they come, next to those of earlier runs, and
docs/coverage.md is made of that file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

from attngraph.sweeping.isolation import isolated_each, preload
from tests.corpus.operators import operators
from tests.corpus.packages.page import packages
from tests.corpus.page import write_page
from tests.corpus.results import PAGE, ROOT, commit, environment, write_results
from tests.corpus.rows import LISTS, rows
from tests.corpus.trial import Record, attempt

RESULTS = ROOT / "bench" / "results" / "corpus.json"
ATTENTION = ("eager", "sdpa")
PACKAGES = ("torch", "transformers", "onnxruntime", "onnxruntime-gpu", "onnx", "onnx-ir")
# What a trial imports as it runs, beside what tests.corpus.trial imports.
PRELOADED = ("transformers", "onnxruntime", "networkx", "torch.export._trace")


def sweep(trials: Iterable[tuple[str, str]], *, jobs: int, timeout: float) -> Iterator[Record]:
    """A record per (model, attention), in the order in which they finish."""
    preload(*PRELOADED, "tests.corpus.trial")
    lost = {"outcome": "failed", "stage": "process"}
    each = [(trial, {"model": trial[0], "attention": trial[1], **lost}) for trial in trials]
    yield from isolated_each(attempt, each, jobs=jobs, timeout=timeout)


def corpus() -> list[str]:
    """The rows of every list."""
    return [text for name in LISTS for text in rows(name)]


def read_results() -> dict[str, Any]:
    """The stored results, or empty ones."""
    if RESULTS.exists():
        stored: dict[str, Any] = json.loads(RESULTS.read_text())
        return stored
    return {"environment": {}, "records": []}


def store(record: Record) -> None:
    """Writes a record in place of an earlier one of that row; those of rows that are gone go."""
    order = {text: place for place, text in enumerate(corpus())}
    kept = [
        old
        for old in read_results()["records"]
        if _key(old) != _key(record) and old["model"] in order
    ]
    records = sorted([*kept, record], key=lambda row: (order[row["model"]], row["attention"]))
    write_results(RESULTS, environment(PACKAGES), records)


def _key(record: Record) -> tuple[str, str]:
    return record["model"], record["attention"]


def _line(record: Record) -> str:
    head = f"{record['model']} {record['attention']}: {record['outcome']}"
    declined = ", ".join(f"{count} {code}" for code, count in record.get("declined", {}).items())
    sites = f", {record['fused']} fused" if "fused" in record else ""
    sites += f", declined {declined}" if declined else ""
    error = f" at {record['stage']}: {record['error']}" if "error" in record else ""
    return f"{head}{sites}{error} ({record.get('seconds', 0)} s)"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", help="rows of the lists; all of them if none is given")
    parser.add_argument("--list", choices=LISTS, help="the rows of one list")
    parser.add_argument("--attention", choices=ATTENTION, help="both if not given")
    parser.add_argument("--jobs", type=int, default=2, help="models at a time")
    parser.add_argument("--timeout", type=float, default=180, help="seconds per model")
    parser.add_argument("--page", action="store_true", help="only write the page anew")
    options = parser.parse_args()
    chosen = options.rows or (rows(options.list) if options.list else corpus())
    if unknown := set(chosen) - {*corpus()}:
        parser.error(f"not in the corpus: {', '.join(sorted(unknown))}")
    if not options.page:
        kinds = (options.attention,) if options.attention else ATTENTION
        trials = [(text, kind) for text in chosen for kind in kinds]
        tree, begin = commit(), time.perf_counter()
        for record in sweep(trials, jobs=options.jobs, timeout=options.timeout):
            store({**record, "commit": tree})
            print(_line(record), flush=True)
        print(f"{len(trials)} in {time.perf_counter() - begin:.0f} s")
    write_page(read_results(), PAGE, [operators(), *packages()])
    if wrong := defects(read_results()["records"], chosen):
        raise SystemExit("\n".join(wrong))


def defects(records: Iterable[Record], chosen: Iterable[str]) -> list[str]:
    """A line for each rewrite of these rows that was wrong, and so taken back."""
    models = set(chosen)
    return [
        f"{record['model']} {record['attention']}: {said}"
        for record in records
        if record["model"] in models
        for said in record.get("unequal", ())
    ]


if __name__ == "__main__":
    main()
