"""Rules for tensors written part by part, as a loop over heads does: `out[:, :, h] = …`."""

from __future__ import annotations

from attngraph.analysis.values.matching import same_type
from attngraph.ir import Node, TensorType, Value
from attngraph.ir.ops import attribute, input_of
from attngraph.passes.rewriting.rewriter import Replacement, Rewriter, rule, source_of

_SCATTERS = ("aten.select_scatter", "aten.slice_scatter")


@rule(*_SCATTERS)
def scatters(rewriter: Rewriter, node: Node) -> Replacement:
    """A tensor whose every part along an axis is written is the concatenation of these."""
    kind = node.output.tensor_type
    dim = attribute(node, "dim") % kind.rank
    if node.op == "aten.slice_scatter" and attribute(node, "step") == 1:
        written: Value = input_of(node, "src")
        if attribute(node, "start") in (None, 0) and same_type(written, node.output):
            return written  # from the first place on, as many as there are
    size = kind.shape[dim]
    parts: dict[int, tuple[Value, int]] = {}
    chain: list[Node] = []
    above: Node | None = node
    while above is not None and above.op in _SCATTERS and isinstance(size, int):
        part = _written(above, dim, size)
        if part is None:
            return None
        start, end, source = part
        held = parts.setdefault(start, (source, end))
        if held[1] != end or source.dtype != kind.dtype:
            return None
        chain.append(above)
        if _covers(parts, size):
            return _joined(rewriter, node, dim, [parts[at][0] for at in sorted(parts)], chain[1:])
        above = source_of(above).producer
    return None


def _written(node: Node, dim: int, size: int) -> tuple[int, int, Value] | None:
    """(start, end, source) of what a scatter writes along a dim."""
    if attribute(node, "dim") % len(node.output.shape) != dim:
        return None
    source = input_of(node, "src")
    if node.op == "aten.select_scatter":
        start = attribute(node, "index")
        length = 1
    else:
        start = attribute(node, "start") or 0
        length = source.shape[dim]
        if attribute(node, "step") != 1:
            return None
    if not isinstance(start, int) or not isinstance(length, int):
        return None
    start += size if start < 0 else 0
    return start, start + length, source


def _covers(parts: dict[int, tuple[Value, int]], size: int) -> bool:
    """Whether the parts follow each other from 0 to `size`."""
    at = 0
    for start in sorted(parts):
        if start != at:
            return False
        at = parts[start][1]
    return at == size


def _joined(
    rewriter: Rewriter, node: Node, dim: int, values: list[Value], above: list[Node]
) -> Replacement:
    shape = node.output.shape
    parts = []
    for value in values:
        if len(value.shape) < len(shape):
            wide = (*shape[:dim], 1, *shape[dim + 1 :])
            kind = [TensorType(value.dtype, wide)]
            attrs = {"shape": list(wide)}
            value = rewriter.emit("aten.reshape", [value], attrs, at=node, types=kind)[0]
        parts.append(value)
    return rewriter.emit("aten.cat", parts, {"dim": dim}, at=node, fused=above)


SCATTER_RULES = [scatters]
