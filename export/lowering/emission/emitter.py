"""What it takes to emit ONNX nodes: the part of a `LoweringContext` that makes no use of the IR."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

import onnx_ir as ir
import torch


class Emitter(Protocol):
    """Emits nodes and constants into one ONNX graph; `cache` holds what later nodes share."""

    cache: dict[Hashable, Any]

    def op(self, op_type: str, *inputs: ir.Value | None, **attrs: Any) -> ir.Value:
        """The first output of a new node."""

    def ops(
        self, op_type: str, *inputs: ir.Value | None, outputs: int = 1, **attrs: Any
    ) -> tuple[ir.Value, ...]:
        """All outputs of a new node."""

    def constant(
        self, value: Any, dtype: torch.dtype | None = None, *, name: str = "constant"
    ) -> ir.Value:
        """A number, a nested list or a tensor as an initializer."""

    def cast(self, value: ir.Value, dtype: torch.dtype) -> ir.Value:
        """The value in that dtype."""
