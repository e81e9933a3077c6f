"""Heads written one by one, by theme: how they are projected, and how their scores differ."""

from __future__ import annotations

from tests.parity.per_head import projections, scores
from tests.parity.per_head.kit import CASES

__all__ = ["CASES", "projections", "scores"]
