"""fold-masks: what masks an attention becomes its causal attribute, one bool mask, or nothing.

Every mask and every term of a bias is read as a predicate over (b, h, q, k). What is provably true
vanishes, j ≤ i becomes the attribute, the rest is built once as a bool tensor of the smallest
shape. A rewrite must also give the same probabilities at several sizes, or it is not made.

The proof for all sizes is the algebra's (predicates.py): reading replaces a tensor by what each of
its elements is as a function of its index, simplifying only drops what holds at every index for all
sizes in the dims' ranges, and building writes the predicate down element by element. So before and
after are one function of the masks' sources, whatever these are. It stands where trials leave a
condition constant; tests/analysis/masks/test_predicates.py holds the algebra against brute force.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from attngraph.analysis.masks import row_policy
from attngraph.analysis.masks.description import describe
from attngraph.analysis.masks.masking import (
    NO_MASKED_ROWS,
    Masking,
    Scores,
    masking_of,
    scores_shape,
)
from attngraph.analysis.masks.predicates import TRUE, Predicate, conjunction, conjuncts, variables
from attngraph.analysis.masks.reading import leaf_test
from attngraph.analysis.masks.terms import Fill, Splitter, Tree, magnitude
from attngraph.analysis.values.value_numbering import number_values
from attngraph.ir import Graph, Node, Remark, Value, remark_on
from attngraph.ir.dead import erase_dead
from attngraph.ir.effects import dim_definers
from attngraph.passes.attention.mask_building import EarlyBuilder, Unbuildable, build, rebuild
from attngraph.passes.attention.remasking import Remasking
from attngraph.passes.rewriting.findings import findings_of
from attngraph.passes.rewriting.manager import GraphPass


class FoldMasks(GraphPass, name="fold-masks", exact=True):
    """Folds the mask and the masking bias of each `attn.attention`.

    `no_masked_rows` is the user's word that every query has a key: then a finite fill is -inf.
    """

    no_masked_rows: bool = False

    def run(self, graph: Graph) -> list[Remark]:
        maskings = {node: masking_of(node) for node in graph if node.op == "attn.attention"}
        sites = {node: masking for node, masking in maskings.items() if not masking.is_bounded}
        if not sites:
            return []
        definers = dim_definers(graph)
        replaced = [value for masking in sites.values() for value in masking.values]
        numbers = number_values(graph, replaced, definers)
        make, remasking = EarlyBuilder(graph, definers), Remasking(graph)
        folded: dict[Hashable, Folded] = {}
        remarks = []
        for site, masking in sites.items():
            shape = scores_shape(site)
            key = (
                *(None if v is None else numbers[v] for v in (masking.bias, masking.mask)),
                masking.causal,
                masking.masked_rows,
                masking.past,
                shape,
            )
            if key not in folded:
                scores = Scores(masking, shape, graph.dims)
                folded[key] = _fold(remasking, make, site, scores, assume=self.no_masked_rows)
            found = folded[key]
            if found.after is not None:
                remasking.apply(site, found.after)
            findings_of(graph).assumed += [NO_MASKED_ROWS] * found.assumed
            remarks.append(remark_on(site, "note", "mask", found.reason))
        unread = [value.producer for value in replaced if value.producer is not None]
        erase_dead(graph, [*make.made, *unread], definers=definers)
        return remarks


@dataclass(frozen=True, slots=True)
class Folded:
    """What to put in place of a masking (None: it stays), and what to say about it.

    `assumed`: it relies on the user's word that no row is fully masked.
    """

    after: Masking | None
    reason: str
    assumed: bool = False


@dataclass(frozen=True, slots=True)
class _Plan:
    """What masks (a query attends where `allowed` holds), which terms of the bias are in it, what
    is left of the bias, and what a query without keys gets."""

    allowed: Predicate
    taken: frozenset[Value]
    rest: Tree
    masked_rows: str


def _fold(
    remasking: Remasking, make: EarlyBuilder, site: Node, scores: Scores, *, assume: bool
) -> Folded:
    splitter = Splitter(scores.reader)
    plan = _decide(splitter, scores)
    assumed = False
    if assume:
        proved, plan = plan, _decide(splitter, scores, assume=True)
        assumed = plan != proved
    before = after = scores.masking
    problem = ""
    try:
        after = _build(make, site, plan, scores)
    except Unbuildable:
        problem = "kept as it is"
    if after != before:
        made = {value for node in make.made for value in node.outputs}
        is_leaf = leaf_test(scores.reader, made | splitter.inner)
        differs = remasking.proved(scores, after, is_leaf, every_row=not assumed)
        if differs:
            problem = f"kept as it is: {differs}"
    reason = describe(plan.allowed, scores, after, plan.rest)
    if problem:
        return Folded(None, f"{reason}; {problem}")
    if assumed:
        reason += "; assumed that no row is fully masked"
    return Folded(after if after != before else None, reason, assumed)


def _decide(splitter: Splitter, scores: Scores, *, assume: bool = False) -> _Plan:
    domain, bias, given_mask = scores.domain, scores.masking.bias, scores.visible
    split = None if bias is None else splitter.split(bias, scores.at(bias))
    fills = [
        replace(fill, predicate=domain.simplify(fill.predicate))
        for fill in (split.fills if split else ())
    ]

    def plan(taken: Sequence[Fill], masked_rows: str) -> _Plan:
        sources = frozenset(fill.source for fill in taken)
        rest = splitter.split(bias, scores.at(bias), sources).rest if bias else None
        allowed = domain.simplify(conjunction(given_mask, *(fill.predicate for fill in taken)))
        if assume or (math.isfinite(magnitude(rest)) and domain.always_a_key(allowed)):
            masked_rows = "zero"
        return _Plan(allowed, sources, rest, masked_rows)

    rows = scores.masking.masked_rows
    if rows == "mean" and given_mask == TRUE:
        rows = "nan"  # nothing is filled, so a row of -inf stays one
    vain = [fill for fill in fills if fill.predicate == TRUE]
    hard = [fill for fill in fills if fill.number == -math.inf and fill not in vain]
    soft = [fill for fill in fills if fill not in hard and fill not in vain]
    if rows == "mean" and not assume:
        if fills:
            return _Plan(given_mask, frozenset(), bias, "mean")
        return plan([], "mean")
    every = plan([*vain, *hard, *soft], rows)
    if not soft:
        return every
    assert bias is not None
    weakest = max(fill.number for fill in soft)
    policy = row_policy.of_mask(
        every.masked_rows,
        masked=given_mask != TRUE,
        infinite=len(hard),
        finite=len(soft),
        absorbs=row_policy.absorbs(weakest, magnitude(every.rest), bias.dtype),
        has_key=assume or (every.masked_rows == "zero" and domain.always_a_key(every.allowed)),
    )
    if policy is None:
        return plan([*vain, *hard], rows)
    return replace(every, masked_rows=policy)


def _build(make: EarlyBuilder, site: Node, plan: _Plan, scores: Scores) -> Masking:
    """The masking of a plan; equal to the one before where there is nothing to gain."""
    before, parts = scores.masking, list(conjuncts(plan.allowed))
    is_causal = scores.lower in parts and plan.masked_rows != "mean"
    if is_causal:
        parts.remove(scores.lower)
    wanted = conjunction(*parts)
    mask: Value | None = None
    if wanted != TRUE:
        mask = before.mask
        if mask is None or not _is_built(mask, wanted, scores):
            mask = build(make, site.loc, wanted, scores.reader)
    rest = rebuild(make, site.loc, plan.rest)
    return replace(before, bias=rest, mask=mask, causal=is_causal, masked_rows=plan.masked_rows)


def _is_built(mask: Value, wanted: Predicate, scores: Scores) -> bool:
    """Whether a tensor is this predicate already, in the smallest shape."""
    used = {symbol for place in scores.at(mask) for symbol in place.free_symbols}
    held = scores.holds(mask)
    return used <= variables(wanted) and set(conjuncts(held)) == set(conjuncts(wanted))
