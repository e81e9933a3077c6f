"""Where in the user's code a node comes from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


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


class Located(Protocol):
    """A node, of which only this matters here."""

    @property
    def loc(self) -> Loc: ...


def fuse_locs(nodes: Iterable[Located], anchor: Located) -> Loc:
    """The anchor's location, remembering every distinct location it was fused from."""
    leaves = (leaf for node in nodes for leaf in node.loc.fused or (node.loc,))
    locs = tuple(dict.fromkeys(leaf for leaf in leaves if leaf != UNKNOWN))
    if not locs:
        return UNKNOWN
    place = locs[0] if anchor.loc == UNKNOWN else anchor.loc
    return Loc(place.file, place.line, place.module, locs if len(locs) > 1 else ())
