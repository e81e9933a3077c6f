"""Lowering to ONNX, sessions and parity.

`to_onnx` and `register_lowering` are loaded on first use: they bring onnxscript along, which
nothing else here needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attngraph.export.lowering.emission.registry import register_lowering
    from attngraph.export.lowering.lower import lower as to_onnx

_HOMES = {
    "register_lowering": ("attngraph.export.lowering.emission.registry", "register_lowering"),
    "to_onnx": ("attngraph.export.lowering.lower", "lower"),
}

__all__ = ["register_lowering", "to_onnx"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'attngraph.export' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)
