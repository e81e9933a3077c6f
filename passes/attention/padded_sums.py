"""A sum of padded tokens whose padding is cut off again, as a sum of the tokens alone.

What pads to whole chunks adds the residual to the padded result, `(chunks + d * pad(x))[:, :n]`.
The result of the chunks has no axis of tokens there; cut by itself it has one, and what was padded
is x.
"""

from __future__ import annotations

from attngraph.ir import Builder, Dim, Graph, Node, Value
from attngraph.ir.dead import eliminate_dead_code
from attngraph.ir.dims import same
from attngraph.ir.loc import fuse_locs
from attngraph.ir.ops import attribute


def cut_padded_sums(graph: Graph, tokens: Dim) -> None:
    """Cuts the terms of each such sum instead of the sum. What is computed stays the same."""
    for node in list(graph):
        if node.op == "aten.slice.Tensor" and same(node.output.shape[_axis(node)], tokens):
            _cut(graph, node, _axis(node))
    eliminate_dead_code(graph)


def _axis(node: Node) -> int:
    rank = len(node.output.shape)
    return int(attribute(node, "dim")) % rank if rank else 0


def _cut(graph: Graph, node: Node, axis: int) -> None:
    total = node.inputs[0].producer if node.inputs[0] is not None else None
    if total is None or total.op != "aten.add.Tensor":
        return
    if len(total.output.users) != 1 or total.output in graph.outputs:
        return
    if attribute(node, "start") not in (None, 0) or attribute(node, "step") != 1:
        return
    terms = total.operands
    if attribute(total, "alpha") != 1 or any(
        _is_spread(term, total.output, axis) for term in terms
    ):
        return
    build = Builder(graph, node, fuse_locs([total, node], node))
    bare = [_unpadded(build, term, axis, node.output.shape[axis]) for term in terms]
    if sum(value is not None for value in bare) != 1:
        return
    parts = [
        build("aten.slice.Tensor", term, **node.attrs) if value is None else value
        for term, value in zip(terms, bare, strict=True)
    ]
    graph.replace_uses(node.output, build("aten.add.Tensor", *parts))


def _is_spread(value: Value, total: Value, axis: int) -> bool:
    """Whether a term has no axis of its own there."""
    behind = len(total.shape) - axis
    return len(value.shape) < behind or not same(value.shape[-behind], total.shape[axis])


def _unpadded(build: Builder, value: Value, axis: int, size: Dim) -> Value | None:
    """The first tokens of a padded tensor, or of its product with what all tokens share."""
    node = value.producer
    behind = len(value.shape) - axis
    if node is None:
        return None
    if node.op == "aten.pad":
        (source,) = node.operands
        ends = list(attribute(node, "pad"))
        others = [end for at, end in enumerate(ends) if at != 2 * behind - 1]
        fits = same(source.shape[-behind], size) and all(same(end, 0) for end in others)
        return source if fits and attribute(node, "mode") == "constant" else None
    if node.op != "aten.mul.Tensor":
        return None
    factors = node.operands
    own = [each for each in factors if not _is_spread(each, value, axis)]
    shared = [each for each in factors if len(each.shape) < behind or each.shape[-behind] == 1]
    if len(own) != 1 or len(shared) != len(factors) - 1:
        return None
    bare = _unpadded(build, own[0], len(own[0].shape) - behind, size)
    if bare is None:
        return None
    return build("aten.mul.Tensor", *(bare if each is own[0] else each for each in factors))
