"""The corpus of transformers' architectures on a GPU: OUT/corpus_PRECISION.json.

Every row that is right on the CPU, with `sdpa` where it has that, in an order that makes any
beginning of the list a sample of all. Each is compiled, checked against eager and placed.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from attngraph.sweeping.isolation import isolated_each, preload
from tests.corpus.sweep import PRELOADED, RESULTS
from tests.corpus.trial import Record, attempt

_LONGEST = 12.0
"""Seconds that a row may have taken on the CPU."""
_PATIENCE = 60.0


def chosen() -> list[tuple[str, str]]:
    """(model, attention) of each row."""
    best: dict[str, str] = {}
    for record in json.loads(RESULTS.read_text())["records"]:
        right = record["outcome"] == "right" and record.get("seconds", 0) <= _LONGEST
        if right and best.get(record["model"]) != "sdpa":
            best[record["model"]] = record["attention"]
    return sorted(best.items(), key=lambda row: hashlib.sha256(row[0].encode()).digest())


def tried(
    out: Path, machine: str, precision: str, *, at_once: int, clock: Any, quick: bool
) -> tuple[int, int]:
    """How many rows were right, of how many. Rows of an earlier call stay as they are."""
    path = out / f"corpus_{precision}.json"
    records: list[Record] = json.loads(path.read_text()) if path.exists() else []
    known = {record["model"] for record in records}
    rows = chosen()[: 2 if quick else None]
    preload(*PRELOADED, "tests.corpus.trial")
    lost = {"outcome": "failed", "stage": "process"}
    trials = [
        (row, {"model": row[0], "attention": row[1], **lost}) for row in rows if row[0] not in known
    ]
    work = functools.partial(attempt, target=machine, precision=precision)
    for record in isolated_each(work, trials, jobs=at_once, timeout=_PATIENCE):
        records.append(record)
        if len(records) % 16 == 0:
            path.write_text(json.dumps(records, indent=1) + "\n")
        if record["outcome"] in ("wrong", "failed") and record["stage"] != "build":
            said = f"{record['outcome']} at {record['stage']}: {record.get('error', '')}"
            print(f"{record['model']} in {precision}: {said[:200]}", flush=True)
        if not clock.at_most(_PATIENCE / 4):
            break
    path.write_text(json.dumps(records, indent=1) + "\n")
    return sum(record["outcome"] == "right" for record in records), len(rows)
