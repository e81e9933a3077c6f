"""Where in the user's code a node comes from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Loc:
    """Where a node comes from: the user's source line and the module path that ran it."""

    file: str = ""
    line: int = 0
    module: str = ""
    fused: tuple[Loc, ...] = ()

    def __str__(self) -> str:
        place = self.place or "unknown source"
        return f"{place} ({self.module})" if self.module else place

    @property
    def place(self) -> str:
        """`file:line`; empty where that isn't known."""
        return f"{self.file}:{self.line}" if self.file else ""


UNKNOWN = Loc()
