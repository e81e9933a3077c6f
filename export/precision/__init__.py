"""Half precision: which ops take it, and a graph rewritten to it."""

from __future__ import annotations

from attngraph.export.precision.convert import (
    Converted,
    convert,
    half_inside,
    own_precision,
    stored_bytes,
)
from attngraph.export.precision.policy import DTYPES, Group, Plan, group_of

__all__ = [
    "DTYPES",
    "Converted",
    "Group",
    "Plan",
    "convert",
    "group_of",
    "half_inside",
    "own_precision",
    "stored_bytes",
]
