"""bound-keys: a mask that gives each query one range of keys becomes the attention's bounds.

A window of a causal attention, and keys before a length of each batch element, are a number and a
(B,) tensor that some kernels take in the place of a mask; where none does, the lowering builds the
mask. A mask that says anything else besides stays whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from attngraph.analysis.layout.index_maps import aligned
from attngraph.analysis.masks.masking import Masking, is_bounded, masking_of, scores_shape
from attngraph.analysis.masks.predicates import (
    BATCH,
    KEY,
    QUERY,
    VARIABLES,
    Domain,
    Linear,
    Predicate,
    conjuncts,
    elements,
)
from attngraph.analysis.masks.reading import Reader, leaf_test
from attngraph.ir import Graph, Node, Remark, Value
from attngraph.ir.dims import same
from attngraph.ir.effects import dim_definers
from attngraph.ir.ops import attribute, input_of
from attngraph.passes.attention.mask_building import EarlyBuilder
from attngraph.passes.attention.remasking import Remasking
from attngraph.passes.rewriting.manager import register


@register
@dataclass(frozen=True)
class BoundKeys:
    """Gives each `attn.attention` whose mask is a window, lengths or both these instead of it."""

    name: ClassVar[str] = "bound-keys"
    exact: ClassVar[bool] = True

    def run(self, graph: Graph) -> list[Remark]:
        sites = [node for node in graph if node.op == "attn.attention"]
        sites = [node for node in sites if _is_candidate(node)]
        make, remasking = EarlyBuilder(graph, dim_definers(graph)), Remasking(graph)
        found: dict[tuple[object, ...], Masking | None] = {}
        for site in sites:
            before, shape = masking_of(site), scores_shape(site)
            key = before, shape
            if key not in found:
                found[key] = _bounded(remasking, make, site, before)
            after = found[key]
            if after is not None:
                remasking.apply(site, after)
        return []


def _is_candidate(site: Node) -> bool:
    averages = attribute(site, "masked_rows") == "mean"
    return input_of(site, "mask") is not None and not is_bounded(site) and not averages


def _bounded(
    remasking: Remasking, make: EarlyBuilder, site: Node, before: Masking
) -> Masking | None:
    """The masking with bounds in the place of the mask; None where the mask says more."""
    shape = scores_shape(site)
    domain = Domain(shape, remasking.graph.dims)
    reader = Reader(domain)
    assert before.mask is not None
    index = tuple(map(domain.index, VARIABLES))
    read = domain.simplify(reader.predicate(before.mask, aligned(before.mask, index)))
    window, lengths = 0, None
    for part in conjuncts(read):
        width, ends = _window(part, before, domain), _lengths(part, reader)
        if width and before.causal and not window:
            window = width
        elif ends is not None and lengths is None:
            lengths = ends
        else:
            return None
    if lengths is not None and len(lengths.shape) > 1:
        lengths = make(site.loc, "aten.reshape", lengths, shape=[shape[0]])
    after = replace(before, mask=None, window=window, lengths=lengths)
    if not (window or lengths is not None):
        return None
    made = {value for node in make.made for value in node.outputs}
    is_leaf = leaf_test(reader, made)
    return None if remasking.proved(before, after, shape, is_leaf) else after


def _window(part: Predicate, masking: Masking, domain: Domain) -> int:
    """w of k > q + P − w; 0 for anything else."""
    if not isinstance(part, Linear) or elements(part.expr):
        return 0
    rest = sympy.expand(part.expr - domain.index(QUERY) + KEY)
    width = sympy.expand(1 + sympy.sympify(masking.past) - rest)
    return int(width) if width.is_Integer and width > 0 else 0


def _lengths(part: Predicate, reader: Reader) -> Value | None:
    """The tensor of k < lengths[b], which has one element for each b."""
    if not isinstance(part, Linear):
        return None
    found = elements(part.expr)
    if len(found) != 1 or sympy.expand(part.expr - KEY + found[0]) != 1:
        return None
    value = reader.integers[found[0].func.__name__]
    batch = reader.domain.index(BATCH)
    size = reader.domain.sizes[BATCH]
    first, *others = found[0].args or (None,)
    if first != batch or any(other != 0 for other in others):
        return None
    whole = same(value.shape[0], size) and all(dim == 1 for dim in value.shape[1:])
    return value if whole else None
