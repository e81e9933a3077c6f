"""Elements that a step of a loop reads by their places in a list that it appends to: `h[t - 1]`."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """A list of which step t reads the element t + offset, taken for the last one there is, or one
    of the last `depth`.
    """

    name: str
    offset: int
    depth: int


def ahead(index: str, item: ast.expr) -> int | None:
    """By how much a place is ahead of a step's, whose number is `index`; None of others."""
    match item:
        case ast.Name(id=name) if name == index:
            return 0
        case ast.BinOp(
            left=ast.Name(id=name),
            op=ast.Add() | ast.Sub() as sign,
            right=ast.Constant(value=int(count)),
        ) if name == index:
            return count if isinstance(sign, ast.Add) else -count
    return None


def latest(index: str, statements: Sequence[ast.stmt]) -> Mapping[str, int]:
    """By the name of a list, how far ahead of a step the latest element is that statements read at
    a place: that of the step before, unless they read later ones.
    """
    found: dict[str, int] = defaultdict(lambda: -1)
    for each in (each for part in statements for each in ast.walk(part)):
        match each:
            case ast.Subscript(value=ast.Name(id=of), slice=item, ctx=ast.Load()):
                if (offset := ahead(index, item)) is not None:
                    found[of] = max(found[of], offset)
    return found
