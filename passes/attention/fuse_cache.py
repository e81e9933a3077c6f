"""fuse-cache: keys and values that are joined to a past become an attention's past and presents.

K = cat(past, new) along the key axis, and V likewise: the op takes the past as it lies and gives
back the joined tensors, so that what the caller keeps for the next step costs no copy of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import sympy

from attngraph.analysis.layout.axes import (
    Atom,
    Axes,
    Operand,
    climb,
    fresh_axes,
    regroup,
    resolve,
    top,
)
from attngraph.analysis.masks.masking import masking_of
from attngraph.analysis.masks.terms import magnitude
from attngraph.ir import Builder, Graph, Node, Remark, Value, remark_on
from attngraph.ir.dead import erase_dead
from attngraph.ir.dims import as_dim
from attngraph.ir.loc import fuse_locs
from attngraph.ir.ops import attribute, input_of, inputs_of
from attngraph.ir.slices import depends_on
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.findings import findings_of
from attngraph.passes.rewriting.manager import GraphPass
from attngraph.passes.rewriting.materialize import materialize
from attngraph.passes.rewriting.trials import ATTENTION


class FuseCache(GraphPass, name="fuse-cache", exact=True, bitwise=True):
    """Gives each attention the past that its keys and values begin with."""

    def run(self, graph: Graph) -> list[Remark]:
        build, checked = Builder(graph), Checked(graph, self.name, ATTENTION)
        for site in list(graph):
            if site.op == "attn.attention" and (remark := _fuse(build, checked, site)) is not None:
                checked.remarks.append(remark)
        return checked.remarks


@dataclass(frozen=True, slots=True)
class _Joined:
    """`cat` of a past that lies as (B, G, P, D), and of what is new, which is packed (B, S, G·D).

    `past` and `new` are read along those axes.
    """

    cat: Node
    past: Operand
    new: Operand
    target: Axes
    packed: Axes


def _fuse(build: Builder, checked: Checked, site: Node) -> Remark | None:
    graph = build.graph
    # A causal site without a past aligns its queries with the first keys, which a past would move.
    masking = masking_of(site)
    has_more = any(input_of(site, name) is not None for name in ("sinks", "past_key"))
    if masking.causal or masking.lengths is not None or has_more:
        return None
    key, value = (
        _joined(graph, input_of(site, name), attribute(site, "kv_heads"))
        for name in ("key", "value")
    )
    if key is None or value is None:
        return None
    query, bias, mask = inputs_of(site, "query", "bias", "mask")
    leaves = [query, key.new.value, value.new.value, key.past.value, value.past.value]
    leaves += [operand for operand in (bias, mask) if operand is not None]
    if depends_on(leaves, {key.cat, value.cat}):
        return None
    loc = fuse_locs([key.cat, value.cat, site], site)
    build.at(site, loc)
    fused = build.node(
        "attn.attention",
        query,
        materialize(build, key.new, key.packed),
        materialize(build, value.new, value.packed),
        bias,
        mask,
        None,
        materialize(build, key.past, key.target),
        materialize(build, value.past, value.target),
        **site.attrs,
    )
    *results, keys, values = fused.outputs
    pairs = list(zip(site.outputs, results, strict=True))
    for joined, present in ((key, keys), (value, values)):
        whole = joined.cat.output
        pairs.append((whole, build.reshape(present, whole.shape)))
    infinite = [bias] if bias is not None and math.isinf(magnitude(bias)) else []
    if not checked.replace(pairs, leaves=leaves, biases=infinite):
        return None
    findings_of(graph).became[site.outputs[0].name] = fused.outputs[0].name
    erase_dead(graph, [site])
    graph.sort()
    reason = f"keys and values are joined to a past of {key.past.value.name} inside the op"
    return remark_on(fused, "note", "cache", reason, loc=loc)


def _joined(graph: Graph, value: Value, groups: int) -> _Joined | None:
    """How a (B, T, G·D) operand is a cat of the caller's past and something new."""
    batch, keys, packed = fresh_axes(value.shape)
    split = regroup(packed, [groups, as_dim(sympy.sympify(value.shape[2]) / groups)])
    if split is None or not keys:
        return None
    heads, width = split
    operand: Operand | None = Operand(value, (batch, keys, packed))
    while operand is not None and not _is_cat(operand.value):
        operand = climb(operand)
    if operand is None or operand.value.producer is None:
        return None
    cat = operand.value.producer
    parts, dim = input_of(cat, "tensors"), attribute(cat, "dim") % len(operand.axes)
    if len(parts) != 2 or operand.dims[dim] != resolve(keys):
        return None
    sides = []
    for part in parts:
        along = (Atom(part.shape[dim]),)
        axes = tuple(along if i == dim else index for i, index in enumerate(operand.dims))
        sides.append((Operand(part, axes), along))
    (past, before), (new, after) = sides
    target = (batch, heads, before, width)
    lies = [atom for index in target for atom in resolve(index)]
    if top(past).value not in graph.inputs or list(past.atoms) != lies:
        return None
    if set(new.atoms) != {*resolve((*batch, *heads, *width)), *after}:
        return None
    return _Joined(cat, past, new, target, (batch, after, (*heads, *width)))


def _is_cat(value: Value) -> bool:
    return value.producer is not None and value.producer.op == "aten.cat"
