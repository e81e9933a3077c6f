"""The names of dims: the caller's, else those of the first input that has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram

from attngraph.errors import CaptureError
from attngraph.frontend.interface.shapes import Request
from attngraph.frontend.sizes.program_dims import asserted_sizes, user_placeholders
from attngraph.frontend.sizes.symbols import Symbols
from attngraph.ir.dims import DimInfo

_UNBOUNDED = 2**31
"""An upper bound from here on is torch's way of writing none."""


def name_dims(
    program: ExportedProgram,
    leaves: Sequence[Any],
    requests: Sequence[Request],
    symbols: Symbols,
    names: Mapping[sympy.Symbol, str],
) -> None:
    """Names every symbol of the inputs' shapes, the user's names first.

    `names` are those that were given to a program, whose dims have their ranges already.
    """
    nodes = user_placeholders(program)
    samples = [*leaves, *[None] * (len(nodes) - len(leaves))]
    shapes = [
        tuple(value.shape) if isinstance(value := node.meta.get("val"), torch.Tensor) else ()
        for node in nodes
    ]
    given: dict[sympy.Symbol, str] = {}
    dims: dict[str, str] = {}
    for request in requests:
        size = shapes[request.leaf][request.axis]
        expr = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
        if not isinstance(expr, sympy.Symbol) or request.name is None:
            continue
        if given.setdefault(expr, request.name) != request.name:
            raise CaptureError(
                f"The model needs {request} to equal dim {given[expr]!r}; give both the same Dim."
            )
        if not symbols.is_new(expr):
            continue
        if request.name in dims:  # torch keeps two symbols for a Dim where it needn't solve p + s
            symbols.equate(expr, dims[request.name])
            continue
        info = DimInfo(max(request.low or 1, 1), request.high, request.size)
        dims[request.name] = symbols.name(expr, request.name, info)
    for request in requests:
        size = shapes[request.leaf][request.axis]
        if request.root and isinstance(size, torch.SymInt):
            for original in symbols.unnamed([size.node.expr]):
                symbols.name(original, request.root, _info(program, original, None, size))
    for original, expr in asserted_sizes(program):
        symbols.define(original, expr)
    for node, shape, sample in zip(nodes, shapes, samples, strict=True):
        for axis, size in enumerate(shape):
            if not isinstance(size, torch.SymInt):
                continue
            actual = sample.shape[axis] if isinstance(sample, torch.Tensor) else None
            is_plain = isinstance(size.node.expr, sympy.Symbol)
            for original in symbols.unnamed([size.node.expr]):
                info = _info(program, original, actual if is_plain else None, size)
                symbols.name(original, names.get(original, f"{node.name}_{axis}"), info)


def _info(
    program: ExportedProgram, original: sympy.Symbol, actual: int | None, size: torch.SymInt
) -> DimInfo:
    bounds = program.range_constraints.get(original)
    low = 2 if bounds is None else max(int(bounds.lower), 1)
    high = None if bounds is None or bounds.upper > _UNBOUNDED else int(bounds.upper)
    if actual is None:
        values = size.node.shape_env.backed_var_to_val if size.node.shape_env else {}
        actual = int(values.get(original, max(low, 8)))
    return DimInfo(low, high, actual)
