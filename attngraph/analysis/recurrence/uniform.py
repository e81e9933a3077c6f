"""Whether a region computes one formula at all lengths and of all numbers.

A reading of a recurrence is confirmed on drawn numbers at a few lengths. That says something about
the others only where nothing in the region can switch: an analytic function of the operands that
agrees on drawn numbers agrees everywhere, and code that knows of no length but the chunk sizes that
were crossed does the same beyond them. So the region may hold

- of the operands only analytic functions: sums, products, exponentials, layout, and choices by
  positions; no clamp, comparison or maximum, whose other side the drawn numbers may never reach;
- of positions, where the length is dynamic, only what knows no place but the first and the last:
  comparisons of positions with each other, differences, powers; no table, no `i - j < 100`, no
  slice from a fixed place on.

At a static length positions are constants, and the comparison at that length is of all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import sympy

from attngraph.analysis.recurrence.mixing import Tokens
from attngraph.ir import Node, ScalarType, TensorType, Value
from attngraph.ir.dims import symbols_of
from attngraph.ir.slices import backward_slice
from attngraph.ir.traits import (
    ADDITIVE,
    CAST,
    CHOICE,
    CLAMP,
    COMPARISON,
    EXPONENTIAL,
    FILL,
    JOIN,
    LAYOUT,
    LOGARITHM,
    LOGICAL,
    MAGNITUDE,
    MATMUL,
    MULTIPLICATIVE,
    NEGATION,
    PAD,
    PART,
    POWER,
    RANGE,
    REVERSED,
    RUNNING_SUM,
    SCALE,
    SCATTER,
    SHIFT,
    SUM,
    TRIANGLE,
)

_SUMS = ADDITIVE | SHIFT | NEGATION | REVERSED
_ANALYTIC = _SUMS | MULTIPLICATIVE | SCALE | EXPONENTIAL | LOGARITHM | POWER | MATMUL | SUM
_MOVED = LAYOUT | JOIN | PAD
_OF_BOTH = _ANALYTIC | _MOVED | CAST | RUNNING_SUM | TRIANGLE | CHOICE
_OF_OPERANDS = _OF_BOTH | SCATTER
_OF_POSITIONS = _OF_BOTH | RANGE | FILL | COMPARISON | LOGICAL | MAGNITUDE | CLAMP
_PLAIN = _SUMS | LAYOUT | JOIN | CAST | RANGE | FILL
_DECIDES = COMPARISON | CLAMP | TRIANGLE
_SWITCHES = ("Max", "Min", "Piecewise")
_BEYOND = 1 << 31  # what stands for the end of an axis


def switch_in(output: Value, operands: Collection[Value], tokens: Tokens) -> Node | None:
    """A node between the operands and the output that may compute something else of other numbers
    or at other lengths than were tried; None where there is none.
    """
    leaves, nodes = backward_slice([output], operands.__contains__)
    fixed: set[Value] = {leaf for leaf in leaves if _is_fixed_leaf(leaf)}
    entering = [leaf for leaf in leaves if leaf not in fixed and leaf not in operands]
    for node in nodes:
        if any(value in entering for value in node.inputs):
            return node
        given = [value for value in node.inputs if value is not None]
        if all(value in fixed for value in given):
            fixed.update(node.outputs)
            if _is_dynamic(node, tokens) and not _knows_no_place(node, tokens):
                return node
        elif not _is_analytic(node, fixed) or (
            _is_dynamic(node, tokens) and not _cuts_no_place(node, tokens)
        ):
            return node
    return None


def _is_fixed_leaf(leaf: Value) -> bool:
    return leaf.is_constant or isinstance(leaf.type, ScalarType)


def _is_dynamic(node: Node, tokens: Tokens) -> bool:
    """Whether the number of tokens, which isn't known, is among a node's sizes."""
    if isinstance(tokens.dim, int):
        return False
    sizes = (*node.inputs, *node.outputs)
    return any(value is not None and tokens.is_in(value) for value in sizes)


def _is_analytic(node: Node, fixed: Collection[Value]) -> bool:
    if node.op not in _OF_OPERANDS:
        return False
    if node.op in CAST:
        return all(_is_float(value) for value in (*node.inputs, *node.outputs))
    if node.op in CHOICE:
        at = 1 if "masked_fill" in node.op else 0
        return node.inputs[at] in fixed
    if node.op in SCATTER:  # by places that are fixed
        return all(_is_float(v) or v in fixed for v in node.inputs if v is not None)
    return True


def _knows_no_place(node: Node, tokens: Tokens) -> bool:
    """Of positions: whether a node treats all of them alike, but for the first and the last."""
    if node.op not in _OF_POSITIONS or _switches(node):
        return False
    if node.op in _DECIDES:
        if not _near(_numbers(node.attrs.values())):
            return False
        given = [value for value in node.inputs if value is not None]
        _, above = backward_slice(given, lambda value: False)
        made_of: list[Node | Value] = [*above, *_constants(given)]
        return node.op in TRIANGLE or all(map(_is_plain, made_of))
    return _cuts_no_place(node, tokens)


def _cuts_no_place(node: Node, tokens: Tokens) -> bool:
    """Whether no fixed place along the tokens is cut, or padded, but the first or the last."""
    if _switches(node):
        return False
    if node.op not in PART | PAD | TRIANGLE:
        return True
    source = node.inputs[0]
    assert source is not None
    dim = node.attrs.get("dim")
    if node.op in PART and isinstance(dim, int) and isinstance(source.type, TensorType):
        size = source.shape[dim]
        if not symbols_of(size) & symbols_of(tokens.dim):
            return True
    return _near(
        number
        for name, number in node.attrs.items()
        if name not in ("dim", "step", "value", "length", "split_size", "chunks", "mode", "pad")
        for number in _numbers([number])
    )


def _is_plain(what: Node | Value) -> bool:
    """Whether it is a difference of positions, give or take one."""
    if isinstance(what, Value):
        data = what.data
        return data is not None and data.numel() == 1 and abs(float(data)) <= 1
    is_layout = what.op in LAYOUT
    numbers = [] if is_layout else _numbers(what.attrs.values())
    scalars = _constants([value for value in what.inputs if value is not None])
    return what.op in _PLAIN and _near(numbers) and all(map(_is_plain, scalars))


def _constants(values: Iterable[Value]) -> list[Value]:
    return [value for value in values if value.is_constant]


def _switches(node: Node) -> bool:
    """Whether a size in it is one of several expressions, by the number of tokens."""
    sizes = [size for value in node.outputs for size in getattr(value.type, "shape", ())]
    parts = [*sizes, *_numbers(node.attrs.values())]
    return any(
        part.func.__name__ in _SWITCHES
        for size in parts
        if isinstance(size, sympy.Basic)
        for part in sympy.preorder_traversal(size)
    )


def _near(numbers: Iterable[object]) -> bool:
    return all(
        abs(number) <= 1 or number >= _BEYOND
        for number in numbers
        if isinstance(number, (int, float))
    )


def _numbers(values: Iterable[object]) -> list[object]:
    found: list[object] = []
    for value in values:
        found += _numbers(value) if isinstance(value, (list, tuple)) else [value]
    return found


def _is_float(value: Value | None) -> bool:
    is_tensor = value is not None and isinstance(value.type, TensorType)
    return is_tensor and value is not None and value.dtype.is_floating_point
