"""Draws attention modules at random, compiles them, and holds what comes out against eager.

`make fuzz` runs a sweep; `python -m tests.fuzz SEED` replays one draw and prints its source, and
`python -m tests.fuzz FILE.py` replays a source that a sweep kept in out/fuzz.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from tests.fuzz.choices import draw
from tests.fuzz.source import write
from tests.fuzz.sweep import of_record, sweep, table
from tests.fuzz.trial import Record, attempt

FOLDER = Path(__file__).parents[2] / "out" / "fuzz"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("replayed", nargs="*", help="seeds, or files of earlier sweeps")
    parser.add_argument("--draws", type=int, default=200, help="modules in a sweep")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first")
    parser.add_argument("--jobs", type=int, default=2, help="modules at a time")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for a module")
    options = parser.parse_args()
    if options.replayed:
        return int(sum(map(_replay, options.replayed)) > 0)
    begin, records = time.perf_counter(), []
    seeds = range(options.first, options.first + options.draws)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "records.jsonl").open("w") as kept:
        for record in sweep(seeds, FOLDER, jobs=options.jobs, timeout=options.timeout):
            records.append(record)
            kept.write(json.dumps(record) + "\n")
            kept.flush()
            if of_record(record):
                print(_line(record), flush=True)
    print(f"\n{table(records)}\n{len(records)} in {time.perf_counter() - begin:.0f} s; {FOLDER}")
    return int(any(map(of_record, records)))


def _replay(text: str) -> bool:
    """Whether it fails."""
    path = Path(text)
    if text.isdigit():
        FOLDER.mkdir(parents=True, exist_ok=True)
        path = FOLDER / f"{text}.py"
        path.write_text(write(draw(int(text))))
        print(path.read_text())
    record = attempt(path)
    print(json.dumps(record, indent=2))
    return of_record(record)


def _line(record: Record) -> str:
    small = ", ".join(f"{name}: {option}" for name, option in record["small"].items())
    return (
        f"{record['seed']}: {record['outcome']}: {record['said']}\n    with {small or 'defaults'}"
    )


if __name__ == "__main__":
    sys.exit(main())
