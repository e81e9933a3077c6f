"""Compiles the rows of the packages' corpus and writes what came of it.

`python -m tests.corpus.packages [WORD ...]` runs the rows whose names have one of these words, or
all, with attngraph and with torch.onnx.export, or with the `--side` that is named, in processes of
their own. Records are written to bench/results/packages.json as they come, and docs/coverage.md is
made of that file.
"""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from attngraph.sweeping.isolation import isolated, preload
from tests.corpus import sweep
from tests.corpus.operators import operators
from tests.corpus.packages import kit
from tests.corpus.packages.page import RESULTS, packages, read_results
from tests.corpus.packages.trial import attempt, exported
from tests.corpus.page import write_page
from tests.corpus.results import PAGE, commit, environment, write_results

Record = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="parts of the names of rows; all if none is given")
    parser.add_argument("--timeout", type=float, default=300, help="seconds per model")
    parser.add_argument("--side", choices=("attngraph", "exporter"), help="both if not given")
    parser.add_argument("--page", action="store_true", help="only write the page anew")
    options = parser.parse_args()
    preload("torch.export._trace", "onnxruntime", "networkx", "tests.corpus.packages.trial")
    tree = commit()
    for row in [] if options.page else kit.rows():
        if options.words and not any(word in row.label for word in options.words):
            continue
        named = {"package": row.package, "version": _version(row.package), "model": row.name}
        stored = (old for old in read_results()["records"] if _label(old) == row.label)
        record = {**next(stored, {}), **named}
        if options.side != "exporter":
            lost = {"outcome": "crashed"}
            found = isolated(attempt, (row.label,), lost, options.timeout)
            if found.get("error", "").startswith("it took over"):
                found["outcome"] = "unfinished"
            record = {**named, **found, "commit": tree, "exporter": record.get("exporter", {})}
        if options.side != "attngraph":
            lost = {"outcome": "refused"}
            record["exporter"] = isolated(exported, (row.label,), lost, options.timeout)
        store(record)
        said = (record["exporter"].get("outcome", ""), record.get("error", ""))
        print(row.label, record["outcome"], *said, sep=" | ", flush=True)
    write_page(sweep.read_results(), PAGE, [operators(), *packages()])


def store(record: Record) -> None:
    """Writes a record in place of an earlier one of that row; those of rows that are gone go."""
    order = {row.label: place for place, row in enumerate(kit.rows())}
    own = _label(record)
    kept = [old for old in read_results()["records"] if _label(old) != own and _label(old) in order]
    records = sorted([*kept, record], key=lambda each: order[_label(each)])
    write_results(RESULTS, environment(sweep.PACKAGES), records)


def _label(record: Record) -> str:
    return f"{record['package']} {record['model']}"


def _version(package: str) -> str:
    try:
        return version({"segment-anything": "segment_anything"}.get(package, package))
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    main()
