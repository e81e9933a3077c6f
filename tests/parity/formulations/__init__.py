"""Attention as different people write it: each formulation is a small module, by theme."""

from __future__ import annotations

import importlib

from tests.parity.formulations.kit import FORMULATIONS, Formulation

_THEMES = """scale products softmaxes masks biases heads positions kinds outputs refusals
    named spellings papers joined windows"""
for _theme in _THEMES.split():
    importlib.import_module(f"tests.parity.formulations.{_theme}")

__all__ = ["FORMULATIONS", "Formulation"]
