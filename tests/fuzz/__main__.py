"""Draws modules at random, compiles them, and holds what comes out against eager.

`make fuzz` runs a sweep; `python -m tests.fuzz --minutes N` goes on where the last such run ended,
and keeps its counts in bench/results/fuzz.json for docs/fuzz.md, with `--again` after trying what
failed in earlier ones. `python -m tests.fuzz SEED` replays one draw and prints its source, and
`python -m tests.fuzz FILE.py` a source that a sweep kept in out/fuzz.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from tests.fuzz import results
from tests.fuzz.grammars import GRAMMARS
from tests.fuzz.sweep import Seed, of_draw, sweep, table
from tests.fuzz.trial import Record, attempt, of_record

FOLDER = results.ROOT / "out" / "fuzz"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("replayed", nargs="*", help="seeds, or files of earlier sweeps")
    parser.add_argument("--grammar", nargs="+", choices=GRAMMARS, default=[*GRAMMARS])
    parser.add_argument("--draws", type=int, default=200, help="modules of a grammar in a sweep")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first")
    parser.add_argument("--minutes", type=float, help="a sweep of this long, which is kept")
    parser.add_argument("--again", action="store_true", help="try kept failures first")
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="where it is kept")
    parser.add_argument("--jobs", type=int, default=2, help="modules at a time")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for a module")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    if options.replayed:
        return int(sum([_replay(text, options.grammar[0]) for text in options.replayed]) > 0)
    begin, records = time.perf_counter(), []
    kept, commit = results.read(options.results), results.commit()
    if options.again:
        results.again(kept, _attempt_small, commit)
        results.write(kept, options.results)
    for record in sweep(_seeds(options, kept), FOLDER, jobs=options.jobs, timeout=options.timeout):
        records.append(record)
        if of_record(record):
            print(_line(record), flush=True)
        if options.minutes is not None:
            results.add(kept, record, commit)
            results.write(kept, options.results)
    print(f"\n{table(records)}\n{len(records)} in {time.perf_counter() - begin:.0f} s; {FOLDER}")
    return int(any(map(of_record, records)))


def _seeds(options: argparse.Namespace, kept: results.Results) -> Iterator[Seed]:
    """The grammars in turns: as many draws as were asked for, or until the time is over."""
    if options.minutes is None:
        for seed in range(options.first, options.first + options.draws):
            yield from ((name, seed) for name in options.grammar)
        return
    end = time.monotonic() + 60 * options.minutes
    firsts = {name: results.next_seed(kept, name, options.first) for name in options.grammar}
    for turn in count():
        for name, first in firsts.items():
            if time.monotonic() > end:
                return
            yield name, first + turn


def _replay(text: str, name: str) -> bool:
    """Whether it fails."""
    path = Path(text)
    if text.isdigit():
        grammar = GRAMMARS[name]
        path = FOLDER / f"{name}-{text}.py"
        path.write_text(grammar.write(grammar.draw(int(text))))
        print(path.read_text())
    record = attempt(path)
    print(json.dumps(record, indent=2))
    return of_record(record)


def _attempt_small(failure: dict[str, Any]) -> Record:
    """What comes of a kept failure now. Its choices, unlike its seed, mean what they meant."""
    grammar = GRAMMARS[failure["grammar"]]
    path = FOLDER / f"{failure['grammar']}-{failure['seed']}-small.py"
    return of_draw(grammar, grammar.settle(failure["small"]), path)


def _line(record: Record) -> str:
    small = ", ".join(f"{name}: {option}" for name, option in record["small"].items())
    return (
        f"{record['grammar']} {record['seed']}: {record['outcome']}: {record['said']}\n"
        f"    with {small or 'defaults'}"
    )


if __name__ == "__main__":
    sys.exit(main())
