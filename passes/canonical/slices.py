"""Rules for slices and concatenations that say more than they do."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attngraph.analysis.layout.moves import Cut, counted_start, move_of
from attngraph.analysis.values.matching import same_type
from attngraph.ir import Dim, Node, Value
from attngraph.ir.dims import as_dim, same, same_shape
from attngraph.ir.ops import attribute, input_of
from attngraph.passes.rewriting.rewriter import Replacement, Rewriter, rule


@rule("aten.slice.Tensor")
def slice_of_all(rewriter: Rewriter, node: Node) -> Replacement:
    """A slice as long as its source is its source: a longer step would have made it shorter."""
    source = node.source
    return source if same_shape(source.shape, node.output.shape) else None


@rule("aten.slice.Tensor")
def slice_of_arange(rewriter: Rewriter, node: Node) -> Replacement:
    """arange(a, b)[s:e] is arange(a + s, a + s + length), for integers."""
    inner = node.source.producer
    if inner is None or inner.op not in ("aten.arange", "aten.arange.start"):
        return None
    start, step = attribute(node, "start") or 0, attribute(node, "step")
    if inner.output.dtype != torch.int64 or step != 1 or not isinstance(start, int) or start < 0:
        return None
    first = inner.attrs.get("start", 0)
    if isinstance(first, float) or isinstance(inner.attrs["end"], float):
        return None
    first = as_dim(first + start)
    attrs = {"start": first, "end": as_dim(first + node.output.shape[0]), "dtype": torch.int64}
    return rewriter.emit("aten.arange.start", [], attrs, at=node, fused=[inner])


@rule("aten.cat")
def cat_of_nothing(rewriter: Rewriter, node: Node) -> Replacement:
    """cat([x]) is x; a part without elements adds none, as a new cache has."""
    parts: Sequence[Value] = input_of(node, "tensors")
    kept = [part for part in parts if 0 not in part.shape and part.dtype == node.output.dtype]
    if len(kept) == 1 and same_shape(kept[0].shape, node.output.shape):
        return kept[0]
    dropped = [part for part in parts if part not in kept]
    if not kept or not dropped or any(0 not in part.shape for part in dropped):
        return None
    return rewriter.emit("aten.cat", kept, {"dim": attribute(node, "dim")}, at=node)


@rule("aten.cat")
def cat_of_all_parts(rewriter: Rewriter, node: Node) -> Replacement:
    """Parts of one tensor that follow one another from its first place to its last are it."""
    parts: Sequence[Value] = input_of(node, "tensors")
    dim = attribute(node, "dim") % len(node.output.shape)
    end: Dim = 0
    whole: Value | None = None
    for part in parts:
        cut = move_of(part)
        if not isinstance(cut, Cut) or cut.single or cut.dim != dim or cut.step != 1:
            return None
        if not same(counted_start(cut), end) or (whole is not None and cut.source is not whole):
            return None
        whole, end = cut.source, as_dim(end + part.shape[dim])
    return whole if whole is not None and same_type(whole, node.output) else None


SLICE_RULES = [slice_of_all, slice_of_arange, cat_of_nothing, cat_of_all_parts]
