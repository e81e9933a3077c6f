"""What unattended runs of the fuzz found, piece by piece: bench/results/fuzz.json, docs/fuzz.md."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz.trial import FAILURES, OUTCOMES, Record, of_record

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "fuzz.json"
Results = dict[str, list[dict[str, Any]]]
"""Pieces are consecutive draws of one grammar at one commit; failures have the choices that their
draws were made small to, and `mended`: the commit at which they were right when tried again.
"""
_RIGHT = [name for name in OUTCOMES if name not in FAILURES and name != "invalid"]


def read(path: Path) -> Results:
    """The results of a file, or none yet."""
    if not path.exists():
        return {"pieces": [], "failures": []}
    found: Results = json.loads(path.read_text("utf-8"))
    return found


def write(results: Results, path: Path) -> None:
    """The file as a whole."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    partial.replace(path)


def commit() -> str:
    """The commit that is checked out, with a plus where files of it were changed, those in which
    results are kept aside.
    """

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    return git("rev-parse", "--short=10", "HEAD") + "+" * bool(
        git("status", "-s", "-uno", "--", ".", ":!bench/results")
    )


def next_seed(results: Results, grammar: str, first: int = 0) -> int:
    """The first seed of a grammar that no piece has, from `first` on."""
    pieces = [piece for piece in results["pieces"] if piece["grammar"] == grammar]
    return max([first, *(piece["first"] + piece["draws"] for piece in pieces)])


def add(results: Results, record: Record, commit: str) -> None:
    """A record, which comes after the others of its grammar, in the piece that it belongs to."""
    grammar, seed = record["grammar"], record["seed"]
    piece = next(
        (
            piece
            for piece in results["pieces"]
            if (piece["grammar"], piece["commit"]) == (grammar, commit)
            and piece["first"] + piece["draws"] == seed
        ),
        None,
    )
    if piece is None:
        piece = {"grammar": grammar, "commit": commit, "first": seed, "draws": 0, "seconds": 0}
        piece |= {"outcomes": {}, "declined": {}, "slowest": {"seconds": 0}}
        results["pieces"].append(piece)
    seconds = record.get("seconds", 0)
    piece["draws"] += 1
    piece["seconds"] = round(piece["seconds"] + seconds, 2)
    for counts, names in (("outcomes", [record["outcome"]]), ("declined", record.get("declined"))):
        for name in names or ():
            piece[counts][name] = piece[counts].get(name, 0) + 1
    if seconds > piece["slowest"]["seconds"]:
        piece["slowest"] = {"seed": seed, "seconds": seconds}
    if of_record(record):
        kept = {name: record[name] for name in ("grammar", "seed", "outcome", "said", "small")}
        results["failures"].append({**kept, "commit": commit, "mended": None})


def again(results: Results, attempt: Callable[[dict[str, Any]], Record], commit: str) -> None:
    """Tries failures that aren't known as mended."""
    for failure in results["failures"]:
        if failure["mended"] is None and not of_record(attempt(failure)):
            failure["mended"] = commit


def page(results: Results | None = None) -> str:
    """The tables of docs/fuzz.md."""
    results = results or read(RESULTS)
    outcomes: Counter[str] = Counter()
    declined: Counter[str] = Counter()
    rows = []
    for piece in results["pieces"]:
        outcomes.update(piece["outcomes"])
        declined.update(piece["declined"])
        found = Counter(piece["outcomes"])
        last = piece["first"] + piece["draws"] - 1
        right = " | ".join(str(found[name]) for name in _RIGHT)
        failed = sum(found.values()) - sum(found[name] for name in _RIGHT)
        slowest = f"{piece['slowest']['seconds']:.1f} s (seed {piece['slowest'].get('seed', '–')})"
        rows.append(
            f"| {piece['grammar']} | {piece['commit']} | {piece['first']}–{last} "
            f"| {piece['draws']} | {right} | {failed} | {slowest} |\n"
        )
    head = ["grammar", "commit", "seeds", "draws", *_RIGHT, "failed", "slowest"]
    still = Counter(each["outcome"] for each in results["failures"] if each["mended"] is None)
    totals = [
        f"| {name} | {count} | {still[name] if name in FAILURES else count} | {OUTCOMES[name]} |\n"
        for name in OUTCOMES
        if (count := outcomes[name])
    ]
    codes = ", ".join(f"`{code}` {count}" for code, count in declined.most_common())
    return "".join(
        [
            f"{sum(outcomes.values())} draws:\n\n",
            *_table("outcome", "draws", "still so", "meaning"),
            *totals,
            f"\nDraws with a site declined as: {codes or 'none'}.\n\n",
            *_table(*head),
            *rows,
            f"\n{_failures(results)}",
        ]
    )


def _failures(results: Results) -> str:
    """What failed, and whether it still does."""
    found = results["failures"]
    open_ = [failure for failure in found if failure["mended"] is None]
    said = f"{len(found)} draws failed when they were first tried; {len(open_)} still do.\n"
    if not found:
        return said
    rows = []
    for failure in found:
        small = ", ".join(f"{name}: {option}" for name, option in failure["small"].items())
        rows.append(
            f"| {failure['grammar']} {failure['seed']} | {failure['outcome']} "
            f"| {small or 'defaults'} | {failure['mended'] or '**no**'} |\n"
        )
    return "".join(
        [said, "\n", *_table("draw", "outcome", "made small", "right when tried again at"), *rows]
    )


def _table(*names: str) -> list[str]:
    return [f"| {' | '.join(names)} |\n", f"|{' --- |' * len(names)}\n"]
