"""bound-keys: a mask that gives each query one range of keys becomes the attention's bounds.

A window of a causal attention, and keys before a length of each batch element, are a number and a
(B,) tensor that some kernels take in the place of a mask; where none does, the lowering builds the
mask. A mask that says anything else besides stays whole.
"""

from __future__ import annotations

from dataclasses import replace

import sympy

from attngraph.analysis.masks.masking import Masking, Scores, masking_of, scores_shape
from attngraph.analysis.masks.predicates import KEY, Linear, Predicate, conjuncts, elements
from attngraph.analysis.masks.reading import leaf_test
from attngraph.ir import Graph, Node, Remark, Value
from attngraph.ir.dims import same
from attngraph.ir.effects import dim_definers
from attngraph.passes.attention.mask_building import EarlyBuilder
from attngraph.passes.attention.remasking import Remasking
from attngraph.passes.rewriting.manager import GraphPass


class BoundKeys(GraphPass, name="bound-keys", exact=True):
    """Gives each `attn.attention` whose mask is a window, lengths or both these instead of it."""

    def run(self, graph: Graph) -> list[Remark]:
        maskings = {node: masking_of(node) for node in graph if node.op == "attn.attention"}
        make, remasking = EarlyBuilder(graph, dim_definers(graph)), Remasking(graph)
        found: dict[tuple[object, ...], Masking | None] = {}
        for site, before in maskings.items():
            if before.mask is None or before.is_bounded or before.masked_rows == "mean":
                continue
            key = before, scores_shape(site)
            if key not in found:
                scores = Scores(*key, graph.dims)
                found[key] = _bounded(remasking, make, site, scores)
            after = found[key]
            if after is not None:
                remasking.apply(site, after)
        return []


def _bounded(
    remasking: Remasking, make: EarlyBuilder, site: Node, scores: Scores
) -> Masking | None:
    """The masking with bounds in the place of the mask; None where the mask says more."""
    before, window, lengths = scores.masking, 0, None
    for part in conjuncts(scores.mask):
        width, ends = _window(part, scores), _lengths(part, scores)
        if width and before.causal and not window:
            window = width
        elif ends is not None and lengths is None:
            lengths = ends
        else:
            return None
    if lengths is not None and len(lengths.shape) > 1:
        lengths = make(site.loc, "aten.reshape", lengths, shape=[scores.shape[0]])
    after = replace(before, mask=None, window=window, lengths=lengths)
    if not after.is_bounded:
        return None
    made = {value for node in make.made for value in node.outputs}
    is_leaf = leaf_test(scores.reader, made)
    return None if remasking.proved(scores, after, is_leaf) else after


def _window(part: Predicate, scores: Scores) -> int:
    """w of k > q + P − w; 0 for anything else."""
    if not isinstance(part, Linear) or elements(part.expr):
        return 0
    rest = sympy.expand(part.expr - scores.index[2] + KEY)
    width = sympy.expand(1 + sympy.sympify(scores.masking.past) - rest)
    return int(width) if width.is_Integer and width > 0 else 0


def _lengths(part: Predicate, scores: Scores) -> Value | None:
    """The tensor of k < lengths[b], which has one element for each b."""
    if not isinstance(part, Linear):
        return None
    found = elements(part.expr)
    if len(found) != 1 or sympy.expand(part.expr - KEY + found[0]) != 1:
        return None
    value = scores.reader.integers[found[0].func.__name__]
    batch, size = scores.index[0], scores.shape[0]
    first, *others = found[0].args or (None,)
    if first != batch or any(other != 0 for other in others):
        return None
    whole = same(value.shape[0], size) and all(dim == 1 for dim in value.shape[1:])
    return value if whole else None
