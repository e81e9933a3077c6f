"""Queries and keys written anew where parts of their features share an order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attngraph.analysis.attention.roles import Roles, Stage, cheapest, stages
from attngraph.analysis.attention.shared_order import shared_order
from attngraph.analysis.layout.axes import Atom, Axes, Operand, resolve
from attngraph.ir import Builder, Dim, Value
from attngraph.ir.ops import attribute
from attngraph.passes.rewriting.materialize import materialize


@dataclass(frozen=True, slots=True)
class Joined:
    """Queries and keys of which parts are stored in an order that they share.

    `leaves` are the values that both are made of.
    """

    query: Stage
    key: Stage
    leaves: tuple[Value, ...]


def joined_alike(
    build: Builder, query: Sequence[Stage], key: Sequence[Stage], roles: Roles
) -> Joined | None:
    """Q and K written anew where both are joined of such parts of their features, else None."""
    tops = query[-1].operand, key[-1].operand
    sides = [_parts(top, roles.features) for top in tops]
    if sides[0] is None or sides[1] is None:
        return None
    sizes = [[size for _, size in side] for side in (sides[0], sides[1])]
    if sizes[0] != sizes[1]:
        return None
    atoms = [Atom(size) for size in sizes[0]]
    chains = [
        [_chain(top, value, part) for (value, _), part in zip(side, atoms, strict=True)]
        for top, side in zip(tops, (sides[0], sides[1]), strict=True)
    ]
    orders = [
        shared_order(ours, theirs, (part,))
        for ours, theirs, part in zip(*chains, atoms, strict=True)
    ]
    if all(order == resolve((part,)) for order, part in zip(orders, atoms, strict=True)):
        return None
    heads = (*roles.kv_heads, *roles.groups), roles.kv_heads
    leads = (roles.batch, roles.queries, heads[0]), (roles.batch, roles.keys, heads[1])
    found: list[list[Operand]] = []
    for lead, side in zip(leads, chains, strict=True):
        chosen = [
            cheapest(chain, (*lead, order)) for chain, order in zip(side, orders, strict=True)
        ]
        if any(stage is None for stage in chosen):
            return None
        found.append([stage.operand for stage in chosen if stage is not None])
    made = [
        _join(build, operands, lead, orders, roles.features)
        for lead, operands in zip(leads, found, strict=True)
    ]
    leaves = tuple(chain[-1].operand.value for side in chains for chain in side)
    return Joined(Stage(made[0], query[-1].factor), Stage(made[1], key[-1].factor), leaves)


def _parts(operand: Operand, features: Sequence[Atom]) -> list[tuple[Value, Dim]] | None:
    """The values that are joined along the features, which are one whole axis, and their sizes."""
    node = operand.value.producer
    if node is None or node.op != "aten.cat":
        return None
    dim = attribute(node, "dim") % len(operand.dims)
    if operand.dims[dim] != tuple(features) or len(features) != 1:
        return None
    parts = node.operands
    same_dtype = all(value.dtype == operand.value.dtype for value in parts)
    return [(value, value.shape[dim]) for value in parts] if same_dtype else None


def _chain(joined: Operand, value: Value, part: Atom) -> list[Stage]:
    """A part on its way up through layout ops alone, with `part` for its features."""
    node = joined.value.producer
    dim = attribute(node, "dim") % len(joined.dims) if node is not None else 0
    axes = (*joined.axes[:dim], (part,), *joined.axes[dim + 1 :])
    found = stages(Operand(value, axes))
    return [s for s in found if s.factor == 1.0 and s.operand.value.dtype == value.dtype]


def _join(
    build: Builder,
    operands: Sequence[Operand],
    lead: Axes,
    orders: Sequence[tuple[Atom, ...]],
    features: tuple[Atom, ...],
) -> Operand:
    values = [
        materialize(build, operand, (*lead, order))
        for operand, order in zip(operands, orders, strict=True)
    ]
    return Operand(build("aten.cat", *values, dim=len(lead)), (*lead, features))
