"""What a parity check has exercised, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from attngraph.errors import counted


@dataclass
class Coverage:
    """What the cases of a check saw.

    `parameters` are those that the graph reads, of which `without` change no output in any case; of
    `unknown` it could not be told. Of `masks` predicates on inputs, `halves` were always true or
    always false. `drawn` counts the sets of inputs that the check made, `rejected` those that the
    model itself fails on. `notes` are sentences on what was not exercised.
    """

    parameters: int = 0
    without: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    masks: int = 0
    halves: list[str] = field(default_factory=list)
    tables: dict[str, tuple[int, int]] = field(default_factory=dict)
    drawn: int = 0
    rejected: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether nothing was left out that was looked for."""
        return not (self.without or self.unknown or self.halves)

    def __str__(self) -> str:
        """`100 % of 53 parameters and 4 masks exercised`."""
        parts = []
        if self.parameters:
            seen = self.parameters - len(self.without) - len(self.unknown)
            share = 100 * seen // self.parameters
            parts.append(f"{share} % of {counted(self.parameters, 'parameter')}")
        if self.masks:
            seen = self.masks - len(self.halves)
            of = "" if seen == self.masks else f"{seen} of "
            parts.append(f"{of}{counted(self.masks, 'mask')}")
        return f"{' and '.join(parts)} exercised" if parts else "nothing to exercise"

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and dicts."""
        return {**asdict(self), "summary": str(self)}
