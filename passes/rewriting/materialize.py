"""Emits the layout ops that bring an operand into wanted axes: as few as possible, often none."""

from __future__ import annotations

from collections.abc import Sequence

from attngraph.analysis.attention.logits import Factor
from attngraph.analysis.layout.axes import Atom, Axes, Operand, resolve, size_of
from attngraph.analysis.layout.cost import _Plan
from attngraph.ir import Builder, Dim, Value
from attngraph.ir.dims import same_shape

_MOST_PARTS = 4  # of a packed projection, whose siblings are wanted too; else one slice


def _without_constants(build: Builder, operand: Operand) -> Operand:
    """Slices off leading constants; selects the others."""
    value = operand.value
    dims = [list(dim) for dim in operand.dims]
    for position, dim in enumerate(dims):
        while dim and dim[0].const is not None:
            atom = dim.pop(0)
            step, start = size_of(dim), atom.const or 0
            if isinstance(atom.size, int) and atom.size <= _MOST_PARTS:
                sizes = [step] * atom.size
                parts = build.node("aten.split_with_sizes", value, split_sizes=sizes, dim=position)
                value = parts.outputs[start]
            else:
                end = (start + 1) * step
                value = build("aten.slice.Tensor", value, dim=position, start=start * step, end=end)
    if any(atom.const is not None for dim in dims for atom in dim):
        atoms = [atom for dim in dims for atom in dim]
        value = build("aten.reshape", value, shape=[atom.size for atom in atoms])
        for position in reversed(range(len(atoms))):
            constant = atoms[position].const
            if constant is not None:
                value = build("aten.select.int", value, dim=position, index=constant)
        dims = [[atom] for atom in atoms if atom.const is None]
    return Operand(value, tuple(map(tuple, dims)))


def _blocks(dims: Axes, other: Sequence[Atom]) -> list[list[Atom]]:
    """Runs of one dim's atoms that are neighbours in the other order too: they move as one."""
    place = {atom: index for index, atom in enumerate(other)}
    blocks: list[list[Atom]] = []
    for dim in dims:
        for position, atom in enumerate(dim):
            if position and place[atom] == place[blocks[-1][-1]] + 1:
                blocks[-1].append(atom)
            else:
                blocks.append([atom])
    return blocks


def materialize(build: Builder, operand: Operand, target: Axes, *, broadcast: bool = True) -> Value:
    """The operand's elements as a tensor indexed by `target`.

    Atoms that the operand lacks are expanded; with `broadcast` False a dim none of whose atoms it
    has stays of size 1.
    """
    if not broadcast:
        have = set(operand.atoms)
        resolved = [resolve(dim) for dim in target]
        target = tuple(dim if have & set(dim) else () for dim in resolved)
    operand = _without_constants(build, operand)
    plan = _Plan(operand, target)
    value = operand.value
    if not plan.possible:
        raise ValueError(f"{value!r} has axes that the target lacks.")
    if plan.moves:
        blocks = _blocks(operand.dims, plan.present)
        value = build.reshape(value, [size_of(block) for block in blocks])
        heads = {block[0]: index for index, block in enumerate(blocks)}
        order = [heads[atom] for atom in plan.present if atom in heads]
        value = build("aten.permute", value, dims=order)
    if plan.missing:
        lacking = set(plan.missing)
        ones: list[Dim] = [1 if atom in lacking else atom.size for atom in plan.wanted]
        value = build.reshape(value, ones)
        wanted = [atom.size for atom in plan.wanted]
        if not same_shape(
            value.shape, wanted
        ):  # what is lacking may have size 1, as a single token
            value = build("aten.expand", value, size=wanted)
    return build.reshape(value, plan.shape)


def scaled_by(build: Builder, value: Value, factor: Factor, axes: Axes) -> Value:
    """The value, which is indexed by `axes`, times or divided by the factor."""
    if factor.operand is None:
        op = "aten.div.Scalar" if factor.divides else "aten.mul.Scalar"
        return build(op, value, other=factor.number)
    spread = materialize(build, factor.operand, axes, broadcast=False)
    op = "aten.div.Tensor" if factor.divides else "aten.mul.Tensor"
    return build(op, value, build.cast(spread, value.dtype))
