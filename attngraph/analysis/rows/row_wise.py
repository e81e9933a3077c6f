"""Ops that compute row (b, t) of their results from row (b, t) of their operands alone.

A value has rows where its first two dims are (B, T). What two rows share, a weight or a table of
positions, is no row: it is read by all of them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from attngraph.analysis.layout.axes import RESHAPES
from attngraph.analysis.layout.element_ids import is_pointwise
from attngraph.ir import Dim, Node, TensorType, Value
from attngraph.ir.dims import same, same_shape
from attngraph.ir.effects import is_function
from attngraph.ir.ops import attribute

Rows: TypeAlias = tuple[Dim, Dim]
"""(B, T): elements of a batch, and positions."""

_FIRST = frozenset(["aten.linear", "attn.rms_norm", "attn.bias_gelu", "attn.quick_gelu"])
_ALIKE = frozenset(["attn.skip_layer_norm", "attn.skip_rms_norm"])
_NORMS = frozenset(["aten.layer_norm", "aten.rms_norm"])
_ALONG = """softmax.int _softmax log_softmax.int split_with_sizes split.Tensor chunk slice.Tensor
    select.int unbind.int cat glu cumsum"""
_ALONG_ONE = frozenset(f"aten.{name}" for name in _ALONG.split())
_REDUCTIONS = frozenset(["aten.mean.dim", "aten.sum.dim_IntList", "aten.amax", "aten.amin"])
_ROTARY = "attn.rotary"


def has_rows(value: Value | None, rows: Rows) -> bool:
    """Whether the first two dims are those of the rows."""
    if value is None or not isinstance(value.type, TensorType):
        return False
    return len(value.shape) >= 2 and same_shape(value.shape[:2], rows)


def lead(value: Value, rank: int) -> Rows | None:
    """The first two dims once a value is broadcast to that rank; None where it has more."""
    missing = rank - len(value.shape)
    if missing < 0 or rank < 2:
        return None
    shape = (1,) * missing + tuple(value.shape)
    return shape[0], shape[1]


def broadcasts(node: Node) -> bool:
    """Whether operands may be one for all rows along B, along T or both."""
    return is_pointwise(node) or node.op == _ROTARY


def row_operands(node: Node, rows: Rows) -> list[Value] | None:
    """The operands with rows that a node reads row by row; None where it isn't row-wise.

    The other operands are read by every row, as they are or at the row's own place along B or T.
    """
    if not node.outputs or not is_function(node):
        return None
    if not all(has_rows(value, rows) for value in node.outputs):
        return None
    found = _operands(node, rows)
    return found or None


def _operands(node: Node, rows: Rows) -> list[Value] | None:
    given = [value for value in node.inputs if value is not None]
    if any(not isinstance(value.type, TensorType) for value in given) or not given:
        return None
    rank, first = len(node.outputs[0].shape), given[0]
    if node.op == "aten.embedding":
        return given[1:] if len(given[1].shape) == 2 and has_rows(given[1], rows) else None
    if node.op == "aten.matmul":
        return _matrices(given, rows, rank)
    if broadcasts(node):
        return _broadcast(given, rows, rank)
    if node.op in _ALIKE:
        pair = given[:2]
        return pair if rank > 2 and all(has_rows(value, rows) for value in pair) else None
    if node.op == "aten.cat":
        alike = all(has_rows(value, rows) for value in given)
        return given if alike and attribute(node, "dim") % rank >= 2 else None
    if not has_rows(first, rows) or not _keeps_rows(node, len(first.shape), rank):
        return None
    return [first]


def _keeps_rows(node: Node, inner: int, outer: int) -> bool:
    """Whether an op of one operand with rows leaves each row where it is, and by itself."""
    if node.op in _FIRST:
        return inner > 2
    if node.op in _NORMS:
        return len(attribute(node, "normalized_shape")) <= inner - 2
    if node.op in _ALONG_ONE:
        return bool(attribute(node, "dim") % inner >= 2)
    if node.op in _REDUCTIONS:
        dims = attribute(node, "dim")
        return bool(dims) and all(dim % inner >= 2 for dim in dims)
    if node.op in RESHAPES:
        return True  # the dims behind B and T have as many elements as before
    if node.op == "aten.permute":
        return [dim % inner for dim in attribute(node, "dims")[:2]] == [0, 1]
    return node.op == "aten.expand" and inner == outer


def _matrices(given: Sequence[Value], rows: Rows, rank: int) -> list[Value] | None:
    left, right = given
    if not has_rows(left, rows) or len(left.shape) != rank:
        return None
    if len(right.shape) == 2 and rank > 2:
        return [left]
    alike = len(right.shape) == rank > 3 and has_rows(right, rows)
    return [left, right] if alike else None


def _broadcast(given: Sequence[Value], rows: Rows, rank: int) -> list[Value] | None:
    """Each operand has the rows, or is one for all of them along B, along T or both."""
    found = []
    for value in given:
        place = lead(value, rank)
        if place is None:
            return None
        if len(value.shape) == rank and same_shape(place, rows):
            found.append(value)
        elif not all(
            same(dim, size) or same(dim, 1) for dim, size in zip(place, rows, strict=True)
        ):
            return None
    return found
