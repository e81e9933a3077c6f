"""fuse-attention: every softmax over keys and every SDPA node becomes one `attn.attention`.

The reading is in site.py, logits.py, contraction.py and axes.py; here the result is written down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from attngraph.analysis.attention.hidden_nans import nan_of_keys, values_of
from attngraph.analysis.attention.logits import Bias, Factor, Mask
from attngraph.analysis.attention.refusals import Declined, Refusal
from attngraph.analysis.attention.roles import Stage, cheapest
from attngraph.analysis.attention.score_bounds import (
    is_unreached,
    leaves_part,
    may_cancel,
    rounded_otherwise,
    summed_first,
    times_zero,
    weak_fills,
)
from attngraph.analysis.attention.site import SDPA, Site, understand
from attngraph.analysis.attention.terms import broadcastable, decided_by
from attngraph.analysis.attention.without_softmax import without_softmax
from attngraph.analysis.layout.axes import Atom, Axes, Operand, is_symbolic, resolve, top
from attngraph.analysis.layout.cost import cost
from attngraph.analysis.masks.reach import is_scorelike
from attngraph.analysis.values.scalars import is_cast
from attngraph.errors import IRError
from attngraph.ir import Builder, Graph, Node, Remark, Value, remark_on
from attngraph.ir.dead import erase_dead
from attngraph.ir.loc import fuse_locs
from attngraph.ir.slices import depends_on, unmade
from attngraph.ir.traits import SOFTMAX
from attngraph.passes.attention.joined_order import joined_alike
from attngraph.passes.attention.masking import cleared, dtype_for, written
from attngraph.passes.rewriting.evidence import Evidence
from attngraph.passes.rewriting.findings import tally_of
from attngraph.passes.rewriting.labels import reassociated
from attngraph.passes.rewriting.manager import GraphPass
from attngraph.passes.rewriting.materialize import materialize, scaled_by
from attngraph.passes.rewriting.outcomes import Different, NotEvaluated

_NOT_ATTENTION = frozenset(["pooling", "distribution", "linear-attention", "graph-attention"])
"""Named, but without a softmax over an axis of keys: nothing that could have been fused."""
_FAR = -1e6  # scores that come near this have no fraction left in float32
_EXACT_HINT = "--exact leaves such an attention as it is."


class FuseAttention(GraphPass, name="fuse-attention", exact=False):
    """Fuses each attention it can read exactly; every other one gets a reason.

    With `exact_only`, not those whose masked scores hold a number that a score might reach, or
    whose biases may cancel. `no_masked_rows` is the user's word that every query has a key.
    """

    exact_only: bool = False
    no_masked_rows: bool = False

    def run(self, graph: Graph) -> list[Remark]:
        build, evidence = Builder(graph), Evidence(graph)
        remarks = []
        for anchor in list(graph):
            if anchor.graph is None or (anchor.op not in SOFTMAX and anchor.op != SDPA):
                continue
            result, assumed = _fuse(graph, build, evidence, anchor, self)
            if isinstance(result, Declined):
                remarks.append(_declined(anchor, result))
            elif result is not None:
                remarks.append(result)
            remarks += assumed
        return [*remarks, *(_declined(root, why) for root, why in without_softmax(graph))]


def _fuse(
    graph: Graph, build: Builder, evidence: Evidence, anchor: Node, how: FuseAttention
) -> tuple[Remark | Declined | None, list[Remark]]:
    """Fuses every product that a softmax, or a part of it, has with values; one result for all,
    and what is assumed of the scores."""
    first: Remark | Declined | None = None
    assumed: list[Remark] = []
    while True:
        found = understand(anchor)
        result: Remark | Declined | None
        if isinstance(found, Site):
            taken, kept = _taken_for_granted(found, how)
            result = kept or _emitted(graph, build, evidence, found)
            if isinstance(result, Remark):
                assumed = [reassociated(anchor, declined.reason) for declined in taken]
                assumed += _told(anchor, found)
        else:
            result = found
        first = first or result
        if not isinstance(found, Site) or not found.is_part or not isinstance(result, Remark):
            return first, assumed
        erase_dead(graph, [found.root])


def _taken_for_granted(site: Site, how: FuseAttention) -> tuple[list[Declined], Declined | None]:
    """What fusing a site relies on without proof, as reasons not to, and the one for which it
    stays."""
    found, kept = [], None
    weak = weak_fills(site.steps)
    if weak and not is_unreached(site):
        found.append(Refusal.FILL_REACHED.at(site.anchor, fill=weak[0]))
    if (low := rounded_otherwise(site.steps)) is not None:
        found.append(Refusal.FILL_SCALED.at(site.anchor, fill=low))
    if times_zero(site.steps):
        found.append(Refusal.TIMES_INFINITE.at(site.anchor))
    if may_cancel(site.steps):
        found.append(Refusal.BIASES_CANCEL.at(site.anchor))
    low = None if how.no_masked_rows else summed_first(site.steps)
    if low is not None:
        found.append(Refusal.FILL_SUMMED.at(site.anchor, fill=low))
        kept = found[-1] if leaves_part(low) else None
    return found, found[0] if found and how.exact_only else kept


def _told(anchor: Node, site: Site) -> list[Remark]:
    """A note on a fill that scores of a model with large weights might reach."""
    highest = max(weak_fills(site.steps), default=-math.inf)
    low = torch.finfo(anchor.outputs[0].dtype).min
    if highest <= max(_FAR, low) or is_unreached(site):
        return []
    row = Refusal.FILL_REACHED.at(anchor, fill=highest)
    return [Remark("note", row.code, row.reason, anchor.loc, op=anchor.op, hint=_EXACT_HINT)]


def _declined(anchor: Node, declined: Declined) -> Remark:
    status = "named" if declined.code in _NOT_ATTENTION else "declined"
    blamed = declined.node or anchor
    return remark_on(anchor, status, declined.code, declined.reason, declined.hint, blamed=blamed)


def _static_size(atoms: Sequence[Atom]) -> int | None:
    sizes = [atom.size for atom in resolve(atoms)]
    if any(is_symbolic(size) for size in sizes):
        return None
    return math.prod(int(size) for size in sizes)


def _emitted(graph: Graph, build: Builder, evidence: Evidence, site: Site) -> Remark | Declined:
    """As `_emit`; a form that inference rejects is taken back."""
    latest = graph.created
    try:
        return _emit(graph, build, evidence, site)
    except IRError as error:
        for node in reversed(graph):
            if node.number > latest:
                graph.erase(node)
        return Refusal.UNWRITABLE.at(site.root, why=error)


_Placed: TypeAlias = tuple[Operand, Axes]


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a site is written: operands at their stages, and what multiplies which of them.

    `on_keys` are the factors of the keys; `outer` and `inner` multiply the context and the values.
    `sinks` and `terms` are the sink, and each step, with axes that broadcast to the scores.
    """

    kv_heads: int
    heads: int
    operands: tuple[Stage, Stage, Stage]
    scale: float
    on_keys: list[Factor]
    outer: list[Factor]
    inner: list[Factor]
    sinks: _Placed | None
    terms: list[_Placed]


def _planned(site: Site) -> _Plan | Declined:
    roles = site.roles
    kv_heads, groups = _static_size(roles.kv_heads), _static_size(roles.groups)
    if kv_heads is None or groups is None:
        return Refusal.HEADS_DYNAMIC.at()
    chosen = _operands(site)
    if chosen is None:
        return Refusal.AXES.at(why="the operands can't be laid out as heads")
    query, key, _ = chosen
    scale = site.scale * query.factor * key.factor
    if not math.isfinite(scale) or scale == 0:
        return Refusal.SCALE_UNKNOWN.at(scale=f"{scale:g}")
    keys = set(resolve(roles.keys))
    rows = set(resolve((*roles.queries, *roles.groups)))
    on_keys = [factor for factor in site.factors if keys & set(factor.atoms)]
    if any(rows & set(factor.atoms) for factor in on_keys):
        return Refusal.SCALED_BY_PAIRS.at()
    for mask in site.steps:
        if isinstance(mask, Mask) and weak_fills([replace(mask, was=None)]):
            if _bias_after(site.steps, mask):
                return Refusal.FILL_CHANGED.at(fill=mask.fill)
            break
    outer, inner = _gains(site)
    if outer is None or inner is None:
        return Refusal.WEIGHTS_SCALED_BY_PAIRS.at()
    below = [top(stage.operand).value for stage in site.value]
    below += values_of(inner)
    lost = nan_of_keys(site, top(key.operand).value, on_keys, below)
    if lost is not None:
        return Refusal.KEYS_MAY_BE_NAN.at(lost, where=lost.loc)
    if len(site.anchor.output.users) > 1 and depends_on(below, {site.anchor}):
        return Refusal.VALUES_FROM_WEIGHTS.at()
    sinks = broadcastable(site.sinks, roles.scores) if site.sinks is not None else None
    if site.sinks is not None and sinks is None:
        return Refusal.AXES.at(why="the sink has axes that the scores lack")
    places = [broadcastable(step.operand, roles.scores) for step in site.steps]
    terms = [place for place in places if place is not None]
    if len(terms) < len(places):
        return Refusal.AXES.at(why="a bias has axes that the scores lack")
    heads = kv_heads * groups
    return _Plan(kv_heads, heads, chosen, scale, on_keys, outer, inner, sinks, terms)


def _emit(graph: Graph, build: Builder, evidence: Evidence, site: Site) -> Remark | Declined:
    plan = _planned(site)
    if isinstance(plan, Declined):
        return plan
    loc = fuse_locs(site.nodes, site.anchor)
    build.at(site.root, loc)
    operands = [top(stage.operand).value for stage in plan.operands]
    parts = joined_alike(build, site.query, site.key, site.roles)
    if parts is not None:
        scale = site.scale * parts.query.factor * parts.key.factor
        plan = replace(plan, operands=(parts.query, parts.key, plan.operands[2]), scale=scale)
        operands[:2] = parts.leaves
    node = _written(build, site, plan)
    pairs = _replacements(build, site, plan, node)
    terms = [operand.value for operand, _ in plan.terms]
    finite = times_zero(site.steps)
    infinite = [
        value
        for value, step in zip(terms, site.steps, strict=True)
        if (isinstance(step, Mask) or (step.factor > 0 and step not in finite))
        and not is_scorelike(value)
    ]
    factors = (*site.factors, *site.gains)
    others = [top(factor.operand).value for factor in factors if factor.operand is not None]
    others += [top(cut.operand).value for cut in site.cuts]
    drawn = [
        found
        for value, step in zip(terms, site.steps, strict=True)
        for found in (decided_by(step.operand) if isinstance(step, Mask) else [value])
    ]
    leaves = [*operands, *map(_predicate, (*others, *drawn))]
    outcome = evidence.compare(pairs, leaves, infinite)
    # Of y, queries, and 2 · y, values: drawn apart, the one is no longer twice the other.
    if isinstance(outcome, Different) and len(first := unmade(leaves)) < len(leaves):
        outcome = evidence.compare(pairs, first, infinite)
    tally_of(graph).count(outcome)
    if isinstance(outcome, Different):
        return Refusal.UNEQUAL.at(site.root, why=outcome.reason)
    if isinstance(outcome, NotEvaluated):
        return Refusal.NOT_EVALUATED.at(site.root, why=outcome.reason)
    for old, new in pairs:
        graph.replace_uses(old, new)
    if site.weights is not None:
        graph.sort()
    what = _describe(site, plan.heads, plan.kv_heads)
    return remark_on(node, "fused", "attention", what, loc=loc)


def _written(build: Builder, site: Site, plan: _Plan) -> Node:
    """The attention, with its operands laid out and multiplied."""
    roles, (query, key, value) = site.roles, plan.operands
    dtype = max((s.operand.value.dtype for s in plan.operands), key=lambda d: torch.finfo(d).bits)
    dtype = dtype_for(site.steps, dtype)
    q = build.cast(materialize(build, query.operand, roles.query), dtype)
    for factor in site.factors:
        if factor not in plan.on_keys:
            q = scaled_by(build, q, factor, roles.query)
    if plan.scale < 0:
        q = build("aten.neg", q)
    k = build.cast(materialize(build, key.operand, roles.key), dtype)
    for factor in plan.on_keys:
        k = scaled_by(build, k, factor, roles.key)
    v = build.cast(materialize(build, value.operand, roles.value), dtype)
    for gain in plan.inner:
        v = scaled_by(build, v, gain, roles.value)
    masking = written(
        build, roles.scores, q.dtype, site.steps, site.masked_rows, causal=site.causal
    )
    q = cleared(build, roles, q, site.steps)
    sinks = None
    if site.sinks is not None and plan.sinks is not None:
        heads = set(resolve((*roles.kv_heads, *roles.groups)))
        is_per_head = set(site.sinks.atoms) <= heads
        place = (site.sinks, (roles.scores[1],)) if is_per_head else plan.sinks
        sinks = build.cast(materialize(build, *place), q.dtype)
    return build.node(
        "attn.attention",
        q,
        k,
        v,
        masking.bias,
        masking.mask,
        sinks,
        heads=plan.heads,
        kv_heads=plan.kv_heads,
        scale=abs(plan.scale),
        causal=masking.causal,
        softcap=site.softcap,
        masked_rows=masking.masked_rows,
        weights=site.weights is not None,
    )


def _replacements(build: Builder, site: Site, plan: _Plan, node: Node) -> list[tuple[Value, Value]]:
    """(a value of the model, what takes its place): the context, and the weights if they leave."""
    packed = node.outputs[0]
    for cut in site.cuts:
        where = materialize(build, cut.operand, site.roles.context, broadcast=False)
        zero = build.constant(torch.tensor(0.0, dtype=packed.dtype), "zero")
        packed = build("aten.where.self", where, *((packed, zero) if cut.keep else (zero, packed)))
    for gain in plan.outer:
        packed = scaled_by(build, packed, gain, site.roles.context)
    if site.gain != 1.0:
        packed = build("aten.mul.Scalar", packed, other=site.gain)
    context = materialize(build, Operand(packed, site.roles.context), site.output)
    pairs = [(site.root.output, build.cast(context, site.root.output.dtype))]
    if site.weights is not None:
        scores = Operand(node.outputs[1], site.roles.scores)
        weights = materialize(build, scores, site.weights.axes)
        pairs.append((site.weights.value, build.cast(weights, site.weights.value.dtype)))
    return pairs


def _predicate(term: Value) -> Value:
    """The bool tensor that a mask of numbers was cast from: such a mask has no other values."""
    cast = term.producer
    source = cast.inputs[0] if cast is not None and is_cast(cast) else None
    return source if source is not None and source.dtype is torch.bool else term


def _operands(site: Site) -> tuple[Stage, Stage, Stage] | None:
    """The cheapest stages of Q, K and V, all of one type where casts can be left out."""
    value = [stage for stage in site.value if stage.factor == 1.0]
    sides = list(zip((site.query, site.key, value), _targets(site), strict=True))
    wanted = dict.fromkeys(stage.operand.value.dtype for stage in value)
    for dtype in [*wanted, None]:
        found = [
            cheapest([s for s in side if dtype in (None, s.operand.value.dtype)], target)
            for side, target in sides
        ]
        if found[0] is not None and found[1] is not None and found[2] is not None:
            places = zip(found[:2], sides[:2], strict=True)
            query, key = (_beside(stage, *side, found[2]) for stage, side in places if stage)
            return query, key, found[2]
    return None


def _beside(stage: Stage, side: Sequence[Stage], target: Axes, values: Stage) -> Stage:
    """The stage beside that of the values, in what one node computes, where that is as cheap.

    Of packed = 2 · linear(x) the values need the 2: with it in the scale, packed and linear(x)
    would both be computed, and its weights could not be.
    """
    made, most = values.operand.value.producer, cost(stage.operand, target)
    for other in side:
        own = cost(other.operand, target)
        is_beside = made is not None and other.operand.value.producer is made
        if is_beside and own is not None and most is not None and own <= most:
            return other
    return stage


def _gains(site: Site) -> tuple[list[Factor] | None, list[Factor] | None]:
    """What multiplies the weights, as (factors of the context, factors of the values)."""
    keys = set(resolve(site.roles.keys))
    rows = set(resolve((*site.roles.queries, *site.roles.groups)))
    outer = [gain for gain in site.gains if not keys & set(gain.atoms)]
    inner = [gain for gain in site.gains if keys & set(gain.atoms)]
    if any(rows & set(gain.atoms) for gain in inner):
        return None, None
    return outer, inner


def _targets(site: Site) -> tuple[Axes, Axes, Axes]:
    return site.roles.query, site.roles.key, site.roles.value


def _describe(site: Site, heads: int, kv_heads: int) -> str:
    parts = [f"{heads} head{'s' * (heads > 1)}"]
    if kv_heads != heads:
        parts.append(f"{kv_heads} key-value head{'s' * (kv_heads > 1)}")
    if site.causal:
        parts.append("causal")
    biases = sum(isinstance(step, Bias) for step in site.steps)
    masks = len(site.steps) - biases
    parts += [f"{biases} bias{'es' * (biases > 1)}"] * bool(biases)
    parts += [f"{masks} mask{'s' * (masks > 1)}"] * bool(masks)
    parts += ["softcap"] * bool(site.softcap) + ["weights returned"] * bool(site.weights)
    return ", ".join(parts)


def _bias_after(steps: Sequence[Bias | Mask], mask: Mask) -> bool:
    return any(isinstance(step, Bias) for step in steps[steps.index(mask) + 1 :])
