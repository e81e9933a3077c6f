"""Finds what surrounds a softmax: the product with the values below it, the logits above it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from attngraph.analysis.attention.context import Below, find_below, hands_on
from attngraph.analysis.attention.decline import (
    additive,
    convolved,
    is_mixture,
    is_product,
    joined,
    mixed_heads,
    pairs_activations,
    pointer,
    pooling,
    projection,
    renormalised,
    synthesizer,
)
from attngraph.analysis.attention.explain import explain
from attngraph.analysis.attention.logits import (
    Bias,
    Declined,
    Factor,
    Logits,
    Mask,
    narrowed,
    read_logits,
)
from attngraph.analysis.attention.reuse import escapes, reused
from attngraph.analysis.attention.roles import Roles, Stage, assign, stages
from attngraph.analysis.attention.shared_order import shared_order
from attngraph.analysis.attention.terms import refilled
from attngraph.analysis.layout.axes import (
    Atom,
    Axes,
    Operand,
    broadcast_axes,
    fresh_axes,
    resolve,
    top,
)
from attngraph.analysis.layout.contraction import Contraction, read_contraction
from attngraph.analysis.masks.row_policy import of_softmax
from attngraph.analysis.values.scalars import is_cast, keeps_values, widens
from attngraph.ir import Node, Value
from attngraph.ir.ops import attribute, input_of

SINK_SOFTMAX = "attn.sink_softmax"
SOFTMAXES = frozenset(["aten.softmax.int", "aten._softmax", "aten._safe_softmax", SINK_SOFTMAX])
SDPA = "aten.scaled_dot_product_attention"


@dataclass(frozen=True, slots=True)
class Site:
    """One attention, understood: operands by their stages, roles of the axes, and the terms.

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


_FAR = 64  # nodes between a softmax and the product with its values


def understand(anchor: Node) -> Site | Declined | None:
    """The attention at a softmax or SDPA node; None where the softmax is over something else."""
    return _from_sdpa(anchor) if anchor.op == SDPA else _from_softmax(anchor)


def _from_softmax(anchor: Node) -> Site | Declined | None:
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
        return len(set(pair[1].atoms) - values - set(resolve(product.summed)))

    if isinstance(below, Below) and (named := additive(anchor)) is not None:
        return named
    sink = input_of(anchor, "sink") if anchor.op == SINK_SOFTMAX else None
    result = below.root.output.dtype if isinstance(below, Below) else anchor.output.dtype
    logits = read_logits(Operand(source, axes), keys, prefer, shifts=sink is None, result=result)
    if isinstance(logits, Logits) and (twice := renormalised(anchor, axes, logits, keys)):
        return twice
    if not isinstance(below, Below):
        return _without_values(anchor, below, logits)
    if isinstance(logits, Declined):
        return explain(anchor, below, logits, keys)
    guarded = below.guard is not None or anchor.op == "aten._safe_softmax"
    if below.refills:
        steps = refilled(logits.steps, below.refills)
        if isinstance(steps, str):
            return Declined(
                "weights-masked",
                steps,
                below.nodes[0],
                "Mask the scores before the softmax instead.",
            )
        logits, guarded = replace(logits, steps=steps), True
    if not keeps_values(source.dtype, anchor.output.dtype) and source.dtype != result:
        return narrowed(anchor, source.dtype)  # the softmax casts its input first
    pair = pair_of(logits.contraction, keys)
    assert pair is not None
    is_part = any(atom.const is not None for dim in axes for atom in resolve(dim))
    weights = None if is_part else _returned(anchor, below, axes)
    if isinstance(weights, Declined):
        return weights
    if (named := projection(anchor, logits, pair, below.value)) is not None:
        return named
    if not is_part and escapes(logits.node, {anchor, below.root}):
        return synthesizer(logits, anchor) or reused(logits.node, anchor)
    sinks = None
    if sink is not None:
        sinks = top(Operand(sink, broadcast_axes(axes, sink.shape, source.shape)))
    return _assemble(
        anchor,
        below.root,
        (pair[0], pair[1], below.value),
        logits,
        Operand(anchor.output, axes),
        keys,
        below.output,
        masked_rows=of_softmax(guarded=guarded or sink is not None),
        weights=weights,
        nodes=(*logits.nodes, anchor, *below.nodes, below.root),
        gain=below.gain,
        gains=below.gains,
        sinks=sinks,
        is_part=is_part,
    )


def _returned(anchor: Node, below: Below, axes: Axes) -> Operand | Declined | None:
    """The attention weights, if something besides the product with the values reads them."""
    inside = {*below.nodes, below.root, *(test for node in below.nodes for test in _tests(node))}
    if below.guard is None:
        leaks = _leaks([anchor, *below.nodes], inside)
        return Operand(anchor.output, axes) if leaks else None
    after = below.nodes
    if below.guard.value.producer is not None:
        after = below.nodes[: below.nodes.index(below.guard.value.producer) + 1]
    if _leaks([anchor, *below.nodes[len(after) :]], inside):
        return Declined(
            "weights-unguarded",
            "The attention weights are returned before their NaN rows are replaced.",
            anchor,
            "Return the weights after the guard.",
        )
    return below.guard if _leaks(after, inside) else None


def _tests(node: Node) -> list[Node]:
    """The isnan that a guard reads."""
    producers = [value.producer for value in node.inputs if value is not None]
    return [node for node in producers if node is not None and node.op == "aten.isnan"]


def _leaks(nodes: Iterable[Node], inside: set[Node]) -> bool:
    """Whether a node outside, or the graph's caller, reads a result of these nodes."""
    return any(
        value in (node.graph.outputs if node.graph else ()) or set(value.users) - inside
        for node in nodes
        for value in node.outputs
    )


def pair_of(product: Contraction, keys: tuple[Atom, ...]) -> tuple[Operand, Operand] | None:
    """(Q, K): the side that has the key axis is K; None where both or neither have it."""
    wanted = set(resolve(keys))
    sides = (stages(side)[-1].operand for side in (product.left, product.right))
    left, right = (wanted & set(side.atoms) for side in sides)
    if right == wanted and not left:
        return product.left, product.right
    if left == wanted and not right:
        return product.right, product.left
    return None


def _without_values(
    anchor: Node, below: Declined | None, logits: Logits | Declined
) -> Declined | None:
    """Scores of two activations without values are worth a remark; a classifier is not."""
    if (mixed := convolved(anchor)) is not None:
        return mixed
    if isinstance(logits, Declined):
        source = anchor.inputs[0]
        stray = below if source is not None and is_product(source) else None
        return joined(anchor) or stray or pointer(anchor) or _mixture(anchor, below)
    # Talking heads mix such scores with weights before the softmax, and the probabilities after it.
    inner = () if below is None else _inner(logits.contraction)
    if not any(map(pairs_activations, (logits.contraction, *inner))):
        return pointer(anchor) or _mixture(anchor, below)
    return (
        below
        or _changed(anchor)
        or Declined(
            "no-values",
            "The attention weights are not multiplied with values over the key axis.",
            anchor,
            "Only the weights are used: there is no attention to fuse.",
        )
    )


def _mixture(anchor: Node, below: Declined | None) -> Declined | None:
    """Weights that meet activations in another way than an attention's do; else a classifier's."""
    return None if below is None and _changed(anchor) is None else pooling(anchor)


def _changed(anchor: Node) -> Declined | None:
    """Weights that pass through some function before a product with values."""
    queue: list[tuple[Node, Node | None]] = [(anchor, None)]
    seen: set[Node] = set()
    while queue and len(seen) < 2 * _FAR:
        node, function = queue.pop(0)
        for user in node.output.users:
            if len(user.outputs) != 1 or user in seen:
                continue
            seen.add(user)
            product = read_contraction(user, fresh_axes(user.output.shape))
            if product is not None and function is not None and pairs_activations(product):
                if function.op in ("aten.tril", "aten.triu"):
                    return Declined(
                        "weights-masked",
                        "The attention weights outside of a triangle are set to zero, where the "
                        "scores were not masked.",
                        function,
                        "Mask the scores before the softmax instead.",
                    )
                return Declined(
                    "weights-changed",
                    f"The attention weights go through {function.op} before they meet the values.",
                    function,
                    "Multiply the weights with the values as they come from the softmax.",
                )
            is_known = (hands_on(user) and not _rounds(user)) or function is not None
            if product is None and (is_known or user.output.shape == anchor.output.shape):
                queue.append((user, function if is_known else user))
    return None


def _rounds(node: Node) -> bool:
    return is_cast(node) and not widens(node)


def _inner(product: Contraction) -> Iterator[Contraction]:
    """The contractions that a contraction's sides are."""
    for side in (product.left, product.right):
        operand = stages(side)[-1].operand
        node = operand.value.producer
        inner = None if node is None else read_contraction(node, operand.axes)
        if inner is not None:
            yield inner


def _assemble(
    anchor: Node,
    root: Node,
    operands: tuple[Operand, Operand, Operand],
    logits: Logits,
    scores: Operand,
    keys: tuple[Atom, ...],
    output: Axes,
    *,
    masked_rows: str,
    weights: Operand | None,
    nodes: tuple[Node, ...],
    causal: bool = False,
    gain: float = 1.0,
    gains: tuple[Factor, ...] = (),
    sinks: Operand | None = None,
    is_part: bool = False,
) -> Site | Declined | None:
    query, key, value = map(stages, operands)
    roles = assign(
        query,
        key,
        value,
        scores.atoms,
        resolve(keys),
        shared_order(query, key, logits.contraction.summed),
        [atom for dim in output for atom in resolve(dim)],
        [step.operand.atoms for step in logits.steps],
    )
    if isinstance(roles, str):
        if is_mixture(logits, stages(operands[2]), scores, keys):
            return pooling(anchor)
        named = mixed_heads(logits, roles) or synthesizer(logits, anchor)
        return named or Declined("axes-not-attention", f"This is no attention op: {roles}.", anchor)
    scale, cap, steps = logits.scale, logits.outer, logits.steps
    if cap is not None:
        scale, cap = (scale * abs(cap), abs(cap)) if cap > 0 else (-scale * abs(cap), abs(cap))
    return Site(
        anchor,
        root,
        query,
        key,
        value,
        output,
        roles,
        scale,
        cap or 0.0,
        logits.factors,
        steps,
        causal,
        masked_rows,
        weights,
        nodes,
        gain,
        gains,
        sinks,
        is_part,
    )


def _from_sdpa(anchor: Node) -> Site | Declined | None:
    query, key, value = (input_of(anchor, name) for name in ("query", "key", "value"))
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
                return Declined("axes-not-attention", "The head counts don't divide.", anchor)
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
            return Declined("scale-unknown", "The head size is only known at run time.", anchor)
        scale = width**-0.5
    scores = (*batch, rows, keys)
    steps: tuple[Bias | Mask, ...] = ()
    if mask is not None:
        shape = (*batch_shape, query.shape[-2], key.shape[-2])
        where = Operand(mask, broadcast_axes(scores, mask.shape, shape))
        is_bool = mask.dtype.is_floating_point is False
        steps = (Mask(where, True, float("-inf")) if is_bool else Bias(where, 1.0),)
    return _assemble(
        anchor,
        anchor,
        (q, k, v),
        Logits(Contraction(q, k, summed), anchor, float(scale), steps=steps),
        Operand(anchor.output, scores),
        keys,
        output,
        masked_rows=of_softmax(guarded=True),
        weights=None,
        nodes=(anchor,),
        causal=bool(attribute(anchor, "is_causal")),
    )
