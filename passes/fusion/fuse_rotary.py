"""fuse-rotary: every spelling of a rotary embedding becomes one `attn.rotary` on packed heads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from attngraph.analysis.attention.roles import Stage, cheapest, stages
from attngraph.analysis.layout.axes import Atom, Axes, Operand, is_symbolic, regroup, resolve
from attngraph.analysis.rotary.reading import Rotation, Table, read_rotation
from attngraph.ir import Builder, Graph, Node, Remark, Value
from attngraph.ir.dead import erase_dead
from attngraph.ir.loc import fuse_locs
from attngraph.ir.slices import backward_slice
from attngraph.passes.fusion.narrow import Narrow
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import GraphPass
from attngraph.passes.rewriting.materialize import materialize


class FuseRotary(GraphPass, name="fuse-rotary", exact=False):
    """Reads rotations of pairs of features, by halves or by neighbours, of all features or some.

    Tables are halved to one angle per pair. Permutes move from above the rotation to below it,
    where they meet the attention's. Several tables that multiply one feature are multiplied with
    each other first; with `exact_only` such a rotation stays as it is.
    """

    exact_only: bool = False

    def run(self, graph: Graph) -> list[Remark]:
        build, checked = Builder(graph), Checked(graph, self.name, exact_only=self.exact_only)
        for node in reversed(list(graph)):
            if node.graph is None or len(node.outputs) != 1:
                continue
            found = read_rotation(node.output)
            if found is not None and checked.allows(_reassociates(found)):
                _fuse(graph, build, checked, node, found)
        return checked.remarks


def _reassociates(rotation: Rotation) -> str:
    """What is said where products are taken in another order than the model's."""
    sides = (rotation.cos, rotation.sin)
    reorders = any(len(side.operands) > 1 or abs(side.factor) != 1.0 for side in sides)
    return "The tables that scale a feature are multiplied before the feature is." * reorders


@dataclass(frozen=True, slots=True)
class _Roles:
    batch: tuple[Atom, ...]
    positions: tuple[Atom, ...]
    heads: tuple[Atom, ...]


def _fuse(graph: Graph, build: Builder, checked: Checked, node: Node, rotation: Rotation) -> bool:
    """Whether the rotation was written down, and is equal."""
    roles = _roles(rotation)
    if roles is None:
        return False
    count = 1
    for atom in roles.heads:
        count *= int(atom.size)
    features, interleaved = _stored(rotation)
    target: Axes = (roles.batch, roles.positions, (*roles.heads, *features))
    stage = cheapest(_plain(rotation.source), target)
    if stage is None:
        return False
    region = backward_slice([node.output], lambda value: value is rotation.source.value)[1]
    build.at(
        node, fuse_locs([inner for inner in region if inner.loc.module == node.loc.module], node)
    )
    narrow = Narrow(build, rotation.pairs)
    table_axes: Axes = (roles.batch, roles.positions, (narrow.pair,))
    cos = _table(build, narrow, rotation.cos, table_axes, node.output.dtype)
    sin = _table(build, narrow, rotation.sin, table_axes, node.output.dtype)
    if cos is None or sin is None:
        return False
    x = build.cast(materialize(build, stage.operand, target), node.output.dtype)
    turned = build("attn.rotary", x, cos, sin, heads=count, interleaved=interleaved)
    result = materialize(build, Operand(turned, target), rotation.output.axes)
    if not checked.replace([(node.output, result)], reassociates=_reassociates(rotation)):
        return False
    erase_dead(graph, [node])
    return True


def _stored(rotation: Rotation) -> tuple[tuple[Atom, ...], bool]:
    """The features as they are stored, and whether pairs are neighbours there.

    A copy that only makes halves of neighbours, or neighbours of halves, is left out; the result
    is reordered instead, which attention may not need.
    """
    features, pairs, interleaved = rotation.features, rotation.pairs, rotation.interleaved
    if any(is_symbolic(atom.size) for atom in resolve(features)):
        return features, interleaved
    stored = [a for a in stages(rotation.source)[-1].operand.atoms if a in set(resolve(features))]
    if math.prod(int(atom.size) for atom in stored) != 2 * pairs or stored == [*resolve(features)]:
        return features, interleaved
    grouped = regroup(features, (pairs, 2) if interleaved else (2, pairs))
    turned = None if grouped is None else (*grouped[1], *grouped[0])
    stored = [leaf for atom in stored for leaf in atom.leaves()]
    if turned is None or [*resolve(turned)] != stored:
        return features, interleaved
    return turned, not interleaved


def _plain(operand: Operand) -> list[Stage]:
    """The points of the source's layout chain, without what scales or converts it."""
    dtype = operand.value.dtype
    found = stages(operand)
    return [s for s in found if s.factor == 1.0 and s.operand.value.dtype == dtype]


def _roles(rotation: Rotation) -> _Roles | None:
    """Which lead axes are heads: static ones that the angles don't depend on, innermost first.

    None where an axis of unknown size would be heads.
    """
    lead = [atom for dim in rotation.output.dims[:-1] for atom in dim if atom.const is None]
    features = set(resolve(rotation.features))
    lead = [atom for atom in lead if atom not in features]
    tables = [table for side in (rotation.cos, rotation.sin) for table in side.operands]
    angled = {atom for table in tables for atom in table.atoms}
    stored = [atom for atom in stages(rotation.source)[-1].operand.atoms if atom in lead]
    depends = [atom for atom in stored if atom in angled]
    free = [atom for atom in stored if atom not in angled]
    if not depends:
        return None
    batch, positions = depends[:-1], depends[-1:]
    heads = free
    if not batch and free and (len(free) > 1 or is_symbolic(free[0].size)):
        batch, heads = free[:1], free[1:]
    if any(is_symbolic(atom.size) for atom in heads):
        return None
    return _Roles(tuple(batch), tuple(positions), tuple(heads))


def _table(
    build: Builder, narrow: Narrow, table: Table, axes: Axes, dtype: torch.dtype
) -> Value | None:
    """(B, S, R/2), one angle's cosine or sine per pair."""
    found: list[Operand | None] = [narrow.operand(operand) for operand in table.operands]
    result: Value | None = None
    for operand in found:
        if operand is None or not set(operand.atoms) <= {a for dim in axes for a in resolve(dim)}:
            return None
        factor = materialize(build, operand, axes, broadcast=False)
        result = factor if result is None else build("aten.mul.Tensor", result, factor)
    if result is None:
        return None
    if table.factor == -1.0:
        result = build("aten.neg", result)
    elif table.factor != 1.0:
        result = build("aten.mul.Scalar", result, other=table.factor)
    result = build.cast(result, dtype)
    present = tuple(dim if size != 1 else () for dim, size in zip(axes, result.shape, strict=True))
    return materialize(build, Operand(result, present), axes)
