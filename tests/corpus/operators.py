"""A section of docs/coverage.md: ATen operators with torch's `core` tag."""

from __future__ import annotations

from tests.corpus.tables import table
from tests.export.lowering.test_core_operators import WITHOUT, core


def operators() -> str:
    """How many have a lowering, and why the others have none; the goal is all."""
    names = core()
    rows = [(reason, len(names & ops)) for reason, ops in WITHOUT.items()]
    lowered = len(names) - sum(count for _, count in rows)
    text = (
        f"{lowered} of the {len(names)} operators that torch tags `core` have a lowering of their "
        "own; the goal is every one that a model at inference can contain. The others are:\n"
    )
    return f"## Core ATen operators\n\n{text}\n{table(('operators that are', 'number'), rows)}"
