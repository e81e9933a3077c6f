"""Forms of ops that move elements and compute nothing: reshapes, permutes, broadcasts, cuts."""

from __future__ import annotations

from attngraph.analysis.layout.moves import permutation
from attngraph.analysis.values.matching import same_type
from attngraph.ir import Node, Value
from attngraph.ir.dims import Dim, as_dim, at_least, same, same_shape
from attngraph.ir.ops import attribute, input_of
from attngraph.ir.traits import EXPAND, PERMUTE, RESHAPE, SPLIT
from attngraph.ir.types import TensorType
from attngraph.passes.rewriting.rewriter import Replacement, Rewriter, rule


@rule("aten.clone", "aten.contiguous", "aten.alias", "aten.detach", "aten.lift_fresh_copy")
def copy(rewriter: Rewriter, node: Node) -> Replacement:
    """Values have no identity and no strides, so a copy is its source."""
    return node.source


@rule(*RESHAPE)
def reshape(rewriter: Rewriter, node: Node) -> Replacement:
    """Every change of shape is `reshape` with all sizes; one of another one is one."""
    source, shape = node.source, node.output.shape
    inner = above = rewriter.above(source)
    while above is not None and above.op in RESHAPE:
        source = above.source
        above = rewriter.above(source)
    if same_shape(source.shape, shape):
        return source
    merged = source is not node.inputs[0]
    if node.op == "aten.reshape" and not merged and same_shape(node.attrs["shape"], shape):
        return None
    fused = [inner] if merged else []
    return rewriter.emit("aten.reshape", [source], {"shape": list(shape)}, at=node, fused=fused)


@rule(*PERMUTE)
def permute(rewriter: Rewriter, node: Node) -> Replacement:
    """Every change of the order of axes is `permute`; one of another one is one."""
    source, rank = node.source, node.output.tensor_type.rank
    order, inner = permutation(node, rank), rewriter.above(source)
    merged = inner is not None and inner.op == "aten.permute"
    if inner is not None and merged:
        first = permutation(inner, rank)
        source, order = inner.source, [first[dim] for dim in order]
    if order == sorted(order):
        return source
    if node.op == "aten.permute" and not merged and list(node.attrs["dims"]) == order:
        return None
    fused = [inner] if merged else []
    return rewriter.emit("aten.permute", [source], {"dims": order}, at=node, fused=fused)


@rule(*EXPAND, "aten.repeat", "aten.tile")
def expand(rewriter: Rewriter, node: Node) -> Replacement:
    """Every broadcast is `expand` with all sizes; one that only adds axes of 1 is a reshape.

    `repeat` is a broadcast where the axes that it repeats have size 1.
    """
    source, shape = node.source, node.output.shape
    if not _broadcasts(source.shape, shape):
        return None
    inner = rewriter.above(source)
    merged = inner is not None and inner.op == "aten.expand"
    if inner is not None and merged:
        source = inner.source
    if same_shape(source.shape, shape):
        return source
    if same_shape(_wide(source.shape), _wide(shape)):
        return rewriter.emit("aten.reshape", [source], {"shape": list(shape)}, at=node)
    if node.op == "aten.expand" and not merged and attribute(node, "size") == list(shape):
        return None
    fused = [inner] if merged else []
    return rewriter.emit("aten.expand", [source], {"size": list(shape)}, at=node, fused=fused)


def _broadcasts(source: tuple[Dim, ...], shape: tuple[Dim, ...]) -> bool:
    aligned = shape[len(shape) - len(source) :]
    return all(same(a, 1) or same(a, b) for a, b in zip(source, aligned, strict=True))


def _wide(shape: tuple[Dim, ...]) -> list[Dim]:
    return [dim for dim in shape if not same(dim, 1)]


@rule("aten.narrow")
def narrow(rewriter: Rewriter, node: Node) -> Replacement:
    """narrow(x, dim, s, n) is x[s : s + n] along dim, where s isn't counted from the end."""
    start, length = attribute(node, "start"), attribute(node, "length")
    if not at_least(start, 0, rewriter.graph.dims):
        return None
    attrs = {"dim": attribute(node, "dim"), "start": start, "end": as_dim(start + length)}
    return rewriter.emit("aten.slice.Tensor", [node.source], attrs, at=node)


@rule(*SPLIT)
def split(rewriter: Rewriter, node: Node) -> Replacement:
    """Every cut along an axis names the sizes of its parts."""
    source = node.source
    if len(node.outputs) == 1:
        return source if same_shape(source.shape, node.output.shape) else None
    axis = attribute(node, "dim") % source.tensor_type.rank
    sizes = [part.shape[axis] for part in node.outputs]
    if (
        node.op == "aten.split_with_sizes"
        and list(node.attrs["split_sizes"]) == sizes
        and attribute(node, "dim") == axis
    ):
        return None
    attrs = {"split_sizes": sizes, "dim": axis}
    return rewriter.emit("aten.split_with_sizes", [source], attrs, at=node)


@rule("aten.copy")
def copied(rewriter: Rewriter, node: Node) -> Replacement:
    """copy(x, y) is y, in x's type: as a cast it stays, of what has x's shape."""
    source: Value = input_of(node, "src")
    if same_type(source, node.output):
        return source
    shape = list(node.output.shape)
    if source.dtype == node.output.dtype:
        return rewriter.emit("aten.expand", [source], {"size": shape}, at=node)
    if same_shape(source.shape, node.output.shape):
        return None
    types = [TensorType(source.dtype, node.output.shape)]
    (expanded,) = rewriter.emit("aten.expand", [source], {"size": shape}, at=node, types=types)
    return rewriter.emit("aten.copy", [node.inputs[0], expanded], {}, at=node)


LAYOUT_FORMS = [copy, reshape, permute, expand, narrow, split, copied]
