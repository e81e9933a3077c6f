"""How a field is told as a flag of the command line (attngraph/cli/flags.py). Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Flag:
    """How the command line shows an option: `--` and its field's name, with this help.

    A `metavar` stands for its value where the type doesn't say, and a `name` for one that is not
    the field's. A number is at `least` so much. A switch that is on by default has a flag `--no-`
    that turns it off.
    """

    help: str
    metavar: str | None = None
    name: str | None = None
    panel: str | None = None
    least: float | None = None
