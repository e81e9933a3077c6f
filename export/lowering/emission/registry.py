"""Which function lowers which op. A user's custom op registers here exactly as our own do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import onnx_ir as ir

from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.ir import Node

Lowered: TypeAlias = "ir.Value | Sequence[ir.Value] | None"
Lowering: TypeAlias = Callable[[LoweringContext, Node], Lowered]

_LOWERINGS: dict[str, Lowering] = {}


def register_lowering(*ops: str) -> Callable[[Lowering], Lowering]:
    """Decorator: the function lowers the named ops, such as "aten.linear" or "mylib.myop".

    It gets a `LoweringContext` and the IR node, emits ONNX nodes through the context, and returns
    one ONNX value per output of the node, or None where the op's own evaluation, taken apart into
    smaller ops, does as well. A later registration replaces an earlier one.
    """

    def register(function: Lowering) -> Lowering:
        for op in ops:
            _LOWERINGS[op] = function
        return function

    return register


def registered(op: str) -> Lowering | None:
    """The lowering registered for an op, or None."""
    return _LOWERINGS.get(op)
