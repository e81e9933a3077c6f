"""join-parts: softmax(cat(Q·K₁ᵀ, Q·K₂ᵀ)) over values in parts becomes one over cat(K₁, K₂).

Global tokens beside a window (PEGASUS-X), memories, prefixes and sinks keep keys of their own,
whose scores are concatenated for the softmax, and whose values meet their part of the weights.

Proof, for all sizes: element (i, j) of ⟨Q, cat(K₁, K₂)⟩ is that of the product whose part j lies
in. A scale or factor of one part is one of its keys; a bias or mask of one part is joined with
zeros, or with what hides nothing, for the others. The weights' product with cat(V₁, V₂) is the sum
over the parts, associated otherwise. An online softmax over blocks of keys is one softmax of the
joined scores (online.py has the proof). It is only made where an attention is then read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attngraph.analysis.attention.activations import is_product, keeps_scores
from attngraph.analysis.attention.joined import (
    JoinedScores,
    Part,
    SplitWeights,
    Terms,
    lead_of,
    read_joined_scores,
    read_split_weights,
)
from attngraph.analysis.attention.logits import Bias
from attngraph.analysis.attention.online import MERGES, Block, read_online
from attngraph.analysis.attention.roles import computed
from attngraph.analysis.attention.site import Site, understand
from attngraph.analysis.attention.weighted_sum import Below, find_below, hands_on
from attngraph.analysis.layout.axes import Atom, Axes, Operand, resolve, size_of, top
from attngraph.analysis.masks.reach import is_scorelike
from attngraph.analysis.walks import readers
from attngraph.ir import Builder, Graph, Node, Remark, Value
from attngraph.ir.dead import erase_dead
from attngraph.ir.loc import fuse_locs
from attngraph.ir.ops import attribute, input_of
from attngraph.ir.traits import ADDITIVE, ADDMM, MATMUL, SHIFT, SOFTMAX
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import GraphPass
from attngraph.passes.rewriting.materialize import materialize, scaled_by
from attngraph.passes.rewriting.trials import ATTENTION, LOGITS

_ONLINE = "The blocks of keys are normalised once, and not rescaled by a running maximum."
_JOINED = "The scores of all parts, and the sums of their values, are one product each."


class JoinParts(GraphPass, name="join-parts", exact=False):
    """Joins keys and values instead of the scores and contexts of their parts."""

    def run(self, graph: Graph) -> list[Remark]:
        build, checked = Builder(graph), Checked(graph, self.name, kinds=LOGITS)
        online = Checked(graph, self.name, kinds=ATTENTION, depth=None)
        merged = any(node.op in MERGES for node in graph)
        if merged or any(node.op == "aten.exp" for node in graph):
            for node in reversed(list(graph)):
                if node.graph is None:
                    continue
                if (found := read_online(node, merged=merged)) is not None:
                    _raise_online(graph, build, (checked, online), node, *found)
        for node in list(graph):
            if node.op != "aten.cat" or not any(map(is_product, input_of(node, "tensors"))):
                continue
            below = readers(node, lambda at: keeps_scores(at) or at.op in SHIFT)
            softmax = next((at for at in below if at.op in SOFTMAX), None)
            scores = None if softmax is None else read_joined_scores(node)
            if softmax is None or not isinstance(scores, JoinedScores):
                continue
            if (pairs := _joined(graph, build, softmax, scores)) is not None:
                checked.replace(pairs, proved=True, reassociates=_JOINED)
        return [*checked.remarks, *online.remarks]


def _raise_online(
    graph: Graph,
    build: Builder,
    checks: tuple[Checked, Checked],
    node: Node,
    blocks: Sequence[Block],
    output: Axes,
) -> None:
    """Writes one softmax over all blocks, if attention is read there and no row has other numbers.

    Where masks may hide all keys of the first blocks from a row, the running maximum is -inf and
    the row NaN, which the softmax isn't: nothing is changed then, nor said but by fuse-attention.
    """
    mark = graph.created
    build.at(node, node.loc)
    rows = [tuple(a for a in b.scores.atoms if a not in resolve(b.keys)) for b in blocks]
    order = max(rows, key=len)
    index = tuple((atom,) for atom in order)
    if any(set(own) - set(order) for own in rows):
        return
    scores = [materialize(build, block.scores, (*index, block.keys)) for block in blocks]
    cat = build.node("aten.cat", *scores, dim=len(order))
    softmax = build.node("aten.softmax.int", cat.output, dim=len(order))
    values = [
        Part(block.value, block.keys, size_of(resolve(block.keys)))
        for block in blocks
        if block.value is not None
    ]
    split = SplitWeights(node, softmax.output, len(order), (*index, ()), tuple(values), output)
    context = build.cast(_context(build, split), node.output.dtype)
    joined = read_joined_scores(cat)
    pairs = _joined(graph, build, softmax, joined) if isinstance(joined, JoinedScores) else None
    if pairs is None or not isinstance(joined, JoinedScores):
        erase_dead(graph, [context.producer], since=mark)
        return
    checked, online = checks
    steps = [term for terms in joined.steps for term in terms]
    biases = [top(step.operand).value for step in steps if isinstance(step, Bias)]
    operands = [part.operand for part in (*joined.parts, *values)]
    leaves = [joined.query.value, *(computed(operand).value for operand in operands)]
    biases = [value for value in biases if not is_scorelike(value)]
    if not online.is_equal([(node.output, context)], leaves, biases):
        erase_dead(graph, [context.producer, *(new.producer for _, new in pairs)], since=mark)
        return
    if checked.replace(pairs, proved=True, reassociates=_JOINED):
        online.replace([(node.output, context)], leaves=leaves, biases=biases, reassociates=_ONLINE)
    erase_dead(graph, [node, context.producer])


def _joined(
    graph: Graph, build: Builder, softmax: Node, joined: JoinedScores
) -> list[tuple[Value, Value]] | None:
    """Both products written anew, if the softmax between them is then read as an attention."""
    sums = [
        found
        for at in readers(softmax, _leads_to_a_sum, limit=None)
        if _sums(at) and (found := read_split_weights(at)) is not None
    ]
    if not sums and not isinstance(find_below(softmax.output, attribute(softmax, "dim")), Below):
        return None
    mark = graph.created
    build.at(joined.node, fuse_locs(joined.nodes, joined.node))
    pairs = [(joined.node.output, _scores(build, joined))]
    for weights in sums:
        build.at(weights.node, weights.node.loc)
        pairs.append((weights.node.output, _context(build, weights)))
    for old, new in pairs:
        graph.replace_uses(old, new)
    is_read = isinstance(understand(softmax), Site)
    for old, new in pairs:
        graph.replace_uses(new, old)
    if is_read:
        return pairs
    erase_dead(graph, [new.producer for _, new in pairs], since=mark)
    return None


def _leads_to_a_sum(node: Node) -> bool:
    return hands_on(node) or _sums(node) or node.op in MATMUL


def _sums(node: Node) -> bool:
    return node.op in ADDITIVE | ADDMM


def _scores(build: Builder, joined: JoinedScores) -> Value:
    """The scores of the query with all keys, in the axes of what joins them."""
    dtype, features = joined.node.output.dtype, resolve(joined.features)
    lead = lead_of(joined.parts, features)
    scale, parts = joined.parts[0].scale, joined.parts
    if any(part.scale != scale for part in parts):
        scale = 1.0
    keys = (Atom(joined.node.output.shape[joined.dim]),)
    key = _concatenated(build, parts, [*lead, *features], features, keys, dtype, scale)
    own = [atom for atom in joined.query.atoms if atom not in (*lead, *features)]
    index = tuple((atom,) for atom in lead)
    query = materialize(build, joined.query, (*index, tuple(own), features), broadcast=False)
    turned = materialize(build, key, (*index, features, keys))
    axes = (*index, tuple(own), keys)
    product = Operand(build("aten.matmul", build.cast(query, dtype), turned), axes)
    target = (*joined.axes[: joined.dim], keys, *joined.axes[joined.dim + 1 :])
    scores = materialize(build, product, target)
    if scale != 1.0:
        scores = build("aten.mul.Scalar", scores, other=scale)
    for factor in joined.factors:
        scores = scaled_by(build, scores, factor, target)
    if joined.outer is not None:
        scores = build("aten.mul.Scalar", build("aten.tanh", scores), other=joined.outer)
    for terms in joined.steps:
        scores = _stepped(build, scores, joined, terms)
    return scores


def _context(build: Builder, split: SplitWeights) -> Value:
    """The weights times all values, in the axes of the sum over the parts."""
    keys = (Atom(split.weights.shape[split.dim]),)
    lead = set(resolve(atom for dim in split.axes for atom in dim))
    whole = max((part.operand for part in split.parts), key=lambda operand: len(operand.atoms))
    every = {atom for part in split.parts for atom in part.operand.atoms}
    order = list(whole.atoms)
    order += [a for p in split.parts for a in p.operand.atoms if a not in order]
    of_keys = {atom for part in split.parts for atom in resolve(part.keys)}
    shared = [atom for atom in order if atom in lead]
    features = tuple(atom for atom in order if atom not in lead and atom not in of_keys)
    value = _concatenated(
        build, split.parts, [*shared, *features], features, keys, split.node.output.dtype, None
    )
    rows = tuple(a for dim in split.axes for a in resolve(dim) if a not in every)
    index = tuple((atom,) for atom in shared)
    axes = (*split.axes[: split.dim], keys, *split.axes[split.dim + 1 :])
    weights = materialize(build, Operand(split.weights, axes), (*index, rows, keys))
    values = materialize(build, value, (*index, keys, features))
    product = build("aten.matmul", build.cast(weights, split.node.output.dtype), values)
    return materialize(build, Operand(product, (*index, rows, features)), split.output)


def _concatenated(
    build: Builder,
    parts: Sequence[Part],
    others: Sequence[Atom],
    features: Sequence[Atom],
    keys: tuple[Atom, ...],
    dtype: torch.dtype,
    scale: float | None,
) -> Operand:
    """The parts' keys, or values, as one tensor: in the order in which that part is stored which
    has all of the `others`, with all `keys` in the place of its own.

    A part of another scale than `scale` is multiplied by what it lacks.
    """
    whole = max(parts, key=lambda part: len(set(part.operand.atoms) & {*others}))
    own = {*resolve(whole.keys)}
    stored = [atom for atom in whole.operand.atoms if atom in {*others, *own}]
    stored += [atom for atom in others if atom not in stored]
    place = next((at for at, atom in enumerate(stored) if atom in own), None)
    rest = [atom for atom in stored if atom not in own]
    if place is None:
        place = len(rest) - len(features)
    made = []
    for part in parts:
        target = (*((a,) for a in rest[:place]), part.keys, *((a,) for a in rest[place:]))
        value = build.cast(materialize(build, part.operand, target), dtype)
        if scale is not None and part.scale != scale:
            value = build("aten.mul.Scalar", value, other=part.scale / scale)
        for factor in part.factors:
            value = scaled_by(build, value, factor, target)
        made.append(value)
    axes = (*((a,) for a in rest[:place]), keys, *((a,) for a in rest[place:]))
    return Operand(build("aten.cat", *made, dim=place), axes)


def _stepped(build: Builder, scores: Value, joined: JoinedScores, terms: Terms) -> Value:
    """The scores after one step, which leaves those parts as they are whose term is None."""
    dim, of_keys = joined.dim, [resolve(part.keys) for part in joined.parts]
    used = {atom for term in terms if term is not None for atom in term.operand.atoms} - {
        atom for keys in of_keys for atom in keys
    }
    axes: list[tuple[Atom, ...]] = [
        index if used & set(resolve(index)) else () for index in joined.axes
    ]
    first = next(term for term in terms if term is not None)
    is_bias = isinstance(first, Bias)
    made = []
    for part, term in zip(joined.parts, terms, strict=True):
        axes[dim] = part.keys
        if term is None:
            sizes = [size_of(resolve(index)) for index in axes]
            neutral = torch.zeros((), dtype=scores.dtype) if is_bias else torch.tensor(True)
            filled = {"fill_value": neutral.item(), "dtype": neutral.dtype}
            made.append(build("aten.full", size=sizes, **filled))
            continue
        value = materialize(build, term.operand, tuple(axes))
        if isinstance(term, Bias):
            value = build.cast(value, scores.dtype)
            if term.factor != 1.0:
                value = build("aten.mul.Scalar", value, other=term.factor)
        elif not term.keep:
            value = build("aten.logical_not", value)
        made.append(value)
    all_parts = build("aten.cat", *made, dim=dim)
    if isinstance(first, Bias):
        return build("aten.add.Tensor", scores, all_parts)
    fill = build.constant(torch.tensor(first.fill, dtype=scores.dtype), "masked")
    return build("aten.where.self", all_parts, scores, fill)
