"""Rules for ops that move elements and compute nothing: reshape, permute, expand, copies."""

from __future__ import annotations

from attngraph.ir import Node
from attngraph.ir.dims import Dim, same, same_shape
from attngraph.ir.ops import attribute
from attngraph.passes.canonical.canonicalize_values import source_of
from attngraph.passes.rewriting.rewriter import Replacement, Rewriter, rule

_RESHAPES = (
    "aten.reshape",
    "aten.view",
    "aten._unsafe_view",
    "aten.view_as",
    "aten.reshape_as",
    "aten.squeeze",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.unsqueeze",
    "aten.flatten.using_ints",
    "aten.unflatten.int",
    "aten.ravel",
)
_SWAPS = {
    "aten.transpose.int": ("dim0", "dim1"),
    "aten.swapdims": ("dim0", "dim1"),
    "aten.swapaxes": ("axis0", "axis1"),
}
_MOVES = ("aten.movedim.int", "aten.movedim.intlist", "aten.moveaxis.int", "aten.moveaxis.intlist")
_EXPANDS = ("aten.expand", "aten.expand_as", "aten.broadcast_to", "aten.repeat", "aten.tile")


@rule("aten.clone", "aten.contiguous", "aten.alias", "aten.detach", "aten.lift_fresh_copy")
def copy(rewriter: Rewriter, node: Node) -> Replacement:
    """Values have no identity and no strides, so a copy is its source."""
    return source_of(node)


@rule(*_RESHAPES)
def reshape(rewriter: Rewriter, node: Node) -> Replacement:
    """reshape(reshape(x)) is one reshape; to x's own shape, it is x."""
    source, shape = source_of(node), node.output.shape
    inner = source.producer
    while source.producer is not None and source.producer.op in _RESHAPES:
        source = source_of(source.producer)
    if same_shape(source.shape, shape):
        return source
    merged = source is not node.inputs[0]
    if node.op == "aten.reshape" and not merged and list(node.attrs["shape"]) == list(shape):
        return None
    fused = [inner] if merged else []
    return rewriter.emit("aten.reshape", [source], {"shape": list(shape)}, at=node, fused=fused)


def _permutation(node: Node) -> list[int]:
    rank = node.output.tensor_type.rank
    order = list(range(rank))
    if node.op == "aten.permute":
        return [dim % rank for dim in node.attrs["dims"]]
    if node.op in _SWAPS:
        first, second = (node.attrs[name] % rank for name in _SWAPS[node.op])
        order[first], order[second] = order[second], order[first]
    elif node.op == "aten.mT":
        order[-2:] = reversed(order[-2:])
    elif node.op in _MOVES:
        ends = [node.attrs["source"], node.attrs["destination"]]
        sources, targets = ([end] if isinstance(end, int) else end for end in ends)
        moved = {to % rank: at % rank for at, to in zip(sources, targets, strict=True)}
        rest = iter([dim for dim in order if dim not in moved.values()])
        order = [moved[dim] if dim in moved else next(rest) for dim in range(rank)]
    else:
        order.reverse()
    return order


@rule("aten.permute", "aten.t", "aten.mT", "aten.numpy_T", *_SWAPS, *_MOVES)
def permute(rewriter: Rewriter, node: Node) -> Replacement:
    """permute(permute(x)) is one permute; one that keeps the order is x."""
    source = source_of(node)
    if node.output.tensor_type.rank == 0:
        return source
    order, inner = _permutation(node), source.producer
    merged = inner is not None and inner.op == "aten.permute"
    if inner is not None and merged:
        first = _permutation(inner)
        source, order = source_of(inner), [first[dim] for dim in order]
    if order == sorted(order):
        return source
    if node.op == "aten.permute" and not merged and list(node.attrs["dims"]) == order:
        return None
    fused = [inner] if merged else []
    return rewriter.emit("aten.permute", [source], {"dims": order}, at=node, fused=fused)


@rule(*_EXPANDS)
def expand(rewriter: Rewriter, node: Node) -> Replacement:
    """A broadcast of a broadcast is one; one that only adds axes of size 1 is a reshape.

    `repeat` is a broadcast where the axes that it repeats have size 1.
    """
    source, shape = source_of(node), node.output.shape
    if not _broadcasts(source.shape, shape):
        return None
    inner = source.producer
    merged = inner is not None and inner.op == "aten.expand"
    if inner is not None and merged:
        source = source_of(inner)
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


LAYOUT_RULES = [copy, reshape, permute, expand]
