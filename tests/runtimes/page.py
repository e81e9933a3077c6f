"""The table of docs/runtimes.md: what the tests of `make runtimes` ran."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "runtimes.json"
Ran = dict[str, dict[str, list[str]]]
"""The checks that passed, by runtime with its version and by family of models."""


def merged(one: Ran, other: Ran) -> Ran:
    """What either has, sorted."""
    return {
        runtime: {
            family: sorted({*_of(one, runtime, family), *_of(other, runtime, family)})
            for family in sorted({*one.get(runtime, {}), *other.get(runtime, {})})
        }
        for runtime in sorted({*one, *other})
    }


def renewed(before: Ran, ran: Ran) -> Ran:
    """What passed before, but for the families that a package has now run, in whatever version."""
    anew = {(_package(runtime), family) for runtime, families in ran.items() for family in families}
    kept = {
        runtime: left
        for runtime, families in before.items()
        if (left := {f: c for f, c in families.items() if (_package(runtime), f) not in anew})
    }
    return merged(kept, ran)


def _package(runtime: str) -> str:
    return runtime.rpartition(" ")[0]


def _of(ran: Ran, runtime: str, family: str) -> list[str]:
    return ran.get(runtime, {}).get(family, [])


def page() -> str:
    """A row for each family of models in each runtime."""
    ran: Ran = json.loads(RESULTS.read_text("utf-8"))
    rows = [
        f"| {runtime} | {family} | {', '.join(checks)} |\n"
        for runtime, families in ran.items()
        for family, checks in families.items()
    ]
    return "".join(["| runtime | family | passed |\n", "| --- | --- | --- |\n", *rows])
