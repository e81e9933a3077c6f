"""attngraph: an optimizing compiler from PyTorch attention models to ONNX Runtime."""

from __future__ import annotations

from attngraph import dialect  # registers the ops

__all__ = ["dialect"]
