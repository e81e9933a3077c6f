"""Finds what surrounds a softmax: the product with the values below it, the logits above it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from attngraph.analysis.attention.logits import Bias, Factor, Logits, Mask, narrowed, read_logits
from attngraph.analysis.attention.refusals import Declined, Refusal
from attngraph.analysis.attention.roles import Roles, Stage, assign, pair_of, stages
from attngraph.analysis.attention.shapes import (
    additive,
    escapes,
    of_itself,
    projection,
    renormalised,
    reused,
    synthesizer,
    without_product,
    without_roles,
    without_values,
)
from attngraph.analysis.attention.shared_order import shared_order
from attngraph.analysis.attention.terms import refilled
from attngraph.analysis.attention.weighted_sum import Below, find_below
from attngraph.analysis.layout.axes import (
    Atom,
    Axes,
    Operand,
    broadcast_axes,
    fresh_axes,
    resolve,
    spread,
    top,
)
from attngraph.analysis.layout.contraction import Contraction
from attngraph.analysis.masks.row_policy import of_softmax
from attngraph.analysis.values.scalars import is_binary, keeps_values
from attngraph.analysis.walks import readers
from attngraph.ir import Node, Value
from attngraph.ir.ops import attribute, input_of, inputs_of
from attngraph.ir.traits import SOFTMAX

SINK_SOFTMAX = "attn.sink_softmax"
SDPA = "aten.scaled_dot_product_attention"


@dataclass(frozen=True, slots=True)
class Site:
    """One attention, understood: operands by their stages, roles of the axes, and the terms.

    `cuts` say in which rows the context becomes zero, as those of the weights do in the model.
    `is_part` tells that the softmax serves other products too, each with a part of it.
    """

    anchor: Node
    root: Node
    query: list[Stage]
    key: list[Stage]
    value: list[Stage]
    output: Axes
    roles: Roles
    scale: float
    softcap: float
    factors: tuple[Factor, ...]
    steps: tuple[Bias | Mask, ...]
    causal: bool
    masked_rows: str
    weights: Operand | None
    nodes: tuple[Node, ...]
    gain: float
    gains: tuple[Factor, ...]
    sinks: Operand | None
    is_part: bool = False
    cuts: tuple[Mask, ...] = ()


def understand(anchor: Node) -> Site | Declined | None:
    """The attention at a softmax or SDPA node; None where the softmax is over something else."""
    return _from_sdpa(anchor) if anchor.op == SDPA else _from_softmax(anchor)


def _from_softmax(anchor: Node, *, shared: bool = False) -> Site | Declined | None:
    """The site of a softmax; with `shared`, whatever else reads the scores."""
    source = anchor.inputs[0]
    if source is None or not source.shape:
        return None
    dim = attribute(anchor, "dim") % len(source.shape)
    below = find_below(anchor.output, dim)
    axes = below.probabilities.axes if isinstance(below, Below) else fresh_axes(source.shape)
    keys = resolve(axes[dim])
    values = set(below.value.atoms) if isinstance(below, Below) else set()

    def prefer(product: Contraction) -> int | None:
        pair = pair_of(product, keys)
        if pair is None:
            return None
        is_projected = any(top(side).value.is_constant for side in product.sides)
        return len(set(pair[1].atoms) - values - set(resolve(product.summed))) * 2 + is_projected

    if isinstance(below, Below):
        named = additive(anchor) or of_itself(anchor, below)
        if named is not None:
            return named
    sink = input_of(anchor, "sink") if anchor.op == SINK_SOFTMAX else None
    result = below.root.output.dtype if isinstance(below, Below) else anchor.output.dtype
    logits = read_logits(Operand(source, axes), keys, prefer, shifts=sink is None, result=result)
    if isinstance(logits, Logits) and (twice := renormalised(anchor, axes, logits, keys)):
        return twice
    if not isinstance(below, Below):
        return without_values(anchor, below, logits)
    if isinstance(logits, Declined):
        return without_product(anchor, below, logits, keys)
    pair = pair_of(logits.contraction, keys)
    assert pair is not None
    is_safe = anchor.op == "aten._safe_softmax"
    guarded = is_safe or below.guard is not None
    cuts: tuple[Mask, ...] = ()
    if below.refills:
        cuts = tuple(mask for mask in below.refills if not set(keys) & set(mask.operand.atoms))
        steps = refilled(logits.steps, below.refills, keys)
        if isinstance(steps, tuple):
            logits, guarded, cuts = replace(logits, steps=steps), True, ()
        elif len(cuts) < len(below.refills) or _leaks([anchor, *below.nodes], _inside(below)):
            return steps.at(below.nodes[0])
        else:
            guarded = is_safe or below.nan_to_zero
    elif (again := _masked_again(anchor, below, logits, pair, keys)) is not None:
        below, steps = again
        guarded = guarded or steps != logits.steps
        logits = replace(logits, steps=steps)
    if not keeps_values(source.dtype, anchor.output.dtype) and source.dtype != result:
        return narrowed(anchor, source.dtype)  # the softmax casts its input first
    is_part = any(atom.const is not None for dim in axes for atom in resolve(dim))
    weights = None if is_part else _returned(anchor, below, axes)
    if isinstance(weights, Declined):
        return weights
    if (named := projection(anchor, logits, pair, below.value)) is not None:
        return named
    own = {anchor, below.root}
    if not (is_part or shared) and escapes(logits.node, own | _partners(logits.node, anchor)):
        return synthesizer(logits) or reused(logits.node, anchor)
    sinks = None
    if sink is not None:
        sinks = top(spread(sink, axes, source.shape))
    return _assembled(
        anchor,
        below,
        pair,
        logits,
        keys,
        masked_rows=of_softmax(guarded=guarded or sink is not None),
        nodes=(*logits.nodes, anchor, *below.nodes, below.root),
        weights=weights,
        sinks=sinks,
        is_part=is_part,
        cuts=cuts,
    )


def _partners(scores: Node, anchor: Node) -> set[Node]:
    """Other softmaxes of the scores, such as one over their rows, that are attentions as well.

    The product of queries and keys is then computed by each of their operators, and by no other
    node: that takes less time than to write the scores once and read them twice.
    """
    found: set[Node] = set()
    for other in readers(scores, lambda node: node.op not in SOFTMAX):
        site = (
            _from_softmax(other, shared=True)
            if other.op in SOFTMAX and other is not anchor
            else None
        )
        if isinstance(site, Site) and scores in site.nodes:
            found |= {other, site.root}
    return found


def _masked_again(
    anchor: Node,
    below: Below,
    logits: Logits,
    pair: tuple[Operand, Operand],
    keys: tuple[Atom, ...],
) -> tuple[Below, tuple[Bias | Mask, ...]] | None:
    """Without the factors of 0 and 1 that the scores' own mask is, and the steps then.

    Where it fills with -inf they multiply weights that are 0 already, or the NaN of a row without
    keys. Of a finite fill they leave zeros there.
    """
    rows = set(pair[0].atoms) - set(pair[1].atoms)
    again = [
        Mask(gain.operand, keep=True, fill=0.0)
        for gain in below.gains
        if gain.operand is not None
        and not gain.divides
        and rows & set(gain.atoms)
        and set(keys) & set(gain.atoms)
        and is_binary(gain.operand.value)
    ]
    if not again or _leaks([anchor, *below.nodes], _inside(below)):
        return None
    steps = refilled(logits.steps, again, keys)
    if isinstance(steps, Refusal):
        return None
    if any(isinstance(step, Mask) and step.fill == -math.inf for step in logits.steps):
        steps = logits.steps
    operands = [mask.operand for mask in again]
    gains = tuple(gain for gain in below.gains if gain.operand not in operands)
    return replace(below, gains=gains), steps


def _inside(below: Below) -> set[Node]:
    """The nodes that read the weights on their way to the values."""
    return {*below.nodes, below.root, *(test for node in below.nodes for test in _tests(node))}


def _returned(anchor: Node, below: Below, axes: Axes) -> Operand | Declined | None:
    """The attention weights, if something besides the product with the values reads them."""
    inside = _inside(below)
    if below.guard is None:
        leaks = _leaks([anchor, *below.nodes], inside)
        return Operand(anchor.output, axes) if leaks else None
    after = below.nodes
    if below.guard.value.producer is not None:
        after = below.nodes[: below.nodes.index(below.guard.value.producer) + 1]
    if _leaks([anchor, *below.nodes[len(after) :]], inside):
        return Refusal.WEIGHTS_UNGUARDED.at(anchor)
    return below.guard if _leaks(after, inside) else None


def _tests(node: Node) -> list[Node]:
    """The isnan that a guard reads."""
    producers = [value.producer for value in node.operands]
    return [node for node in producers if node is not None and node.op == "aten.isnan"]


def _leaks(nodes: Iterable[Node], inside: set[Node]) -> bool:
    """Whether a node outside, or the graph's caller, reads a result of these nodes."""
    return any(
        value in (node.graph.outputs if node.graph else ()) or set(value.users) - inside
        for node in nodes
        for value in node.outputs
    )


def _assembled(
    anchor: Node,
    below: Below,
    pair: tuple[Operand, Operand],
    logits: Logits,
    keys: tuple[Atom, ...],
    *,
    masked_rows: str,
    nodes: tuple[Node, ...],
    weights: Operand | None = None,
    causal: bool = False,
    sinks: Operand | None = None,
    is_part: bool = False,
    cuts: tuple[Mask, ...] = (),
) -> Site | Declined:
    """The site, once each of its axes has a part to play."""
    query, key, value = map(stages, (*pair, below.value))
    roles = assign(
        query,
        key,
        value,
        below.probabilities.atoms,
        resolve(keys),
        shared_order(query, key, logits.contraction.summed),
        [atom for dim in below.output for atom in resolve(dim)],
        [step.operand.atoms for step in logits.steps],
    )
    if isinstance(roles, str):
        return without_roles(anchor, logits, below, keys, roles)
    scale, cap = logits.scale, logits.outer
    if cap is not None:
        scale, cap = (scale * abs(cap), abs(cap)) if cap > 0 else (-scale * abs(cap), abs(cap))
    return Site(
        anchor,
        below.root,
        query,
        key,
        value,
        below.output,
        roles,
        scale,
        cap or 0.0,
        logits.factors,
        logits.steps,
        causal,
        masked_rows,
        weights,
        nodes,
        below.gain,
        below.gains,
        sinks,
        is_part,
        cuts,
    )


def _from_sdpa(anchor: Node) -> Site | Declined | None:
    query, key, value = inputs_of(anchor, "query", "key", "value")
    mask = input_of(anchor, "attn_mask")
    output = fresh_axes(anchor.output.shape)
    *batch, rows, features = output
    keys = fresh_axes([key.shape[-2]])[0]
    summed = fresh_axes([query.shape[-1]])[0]
    batch_shape = anchor.output.shape[:-2]
    shared = list(batch)
    if attribute(anchor, "enable_gqa") and batch:
        groups = batch_shape[-1] // key.shape[-3] if key.shape[-3] else 1
        for atom in batch[-1]:
            if groups != 1 and not atom.split(groups):
                return Refusal.AXES.at(anchor, why="the head counts don't divide")
        parts = resolve(batch[-1])
        shared[-1] = parts[:-1] if groups != 1 else parts
    lead = len(batch)

    def operand(value: Value, axes: list[tuple[Atom, ...]], *matrix: tuple[Atom, ...]) -> Operand:
        shape = value.shape[:-2]
        index = broadcast_axes(tuple(axes), shape, [0] * lead)
        index = tuple(() if s == 1 else i for i, s in zip(index, shape, strict=True))
        return Operand(value, (*index, *matrix))

    q = operand(query, list(batch), rows, summed)
    k = operand(key, shared, keys, summed)
    v = operand(value, shared, keys, features)
    scale = attribute(anchor, "scale")
    if scale is None:
        width = query.shape[-1]
        if not isinstance(width, int):
            return Refusal.HEAD_SIZE_UNKNOWN.at(anchor)
        scale = width**-0.5
    scores = (*batch, rows, keys)
    steps: tuple[Bias | Mask, ...] = ()
    if mask is not None:
        shape = (*batch_shape, query.shape[-2], key.shape[-2])
        where = spread(mask, scores, shape)
        is_bool = mask.dtype.is_floating_point is False
        steps = (Mask(where, True, float("-inf")) if is_bool else Bias(where, 1.0),)
    return _assembled(
        anchor,
        Below(anchor, output, Operand(anchor.output, scores), v, keys),
        (q, k),
        Logits(Contraction(q, k, summed), anchor, float(scale), steps=steps),
        keys,
        masked_rows=of_softmax(guarded=True),
        nodes=(anchor,),
        causal=bool(attribute(anchor, "is_causal")),
    )
