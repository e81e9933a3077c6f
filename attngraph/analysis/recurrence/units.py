"""Whether a region adds up nothing but like things, as physics adds up metres to metres.

Each term of a recurrence has a unit of its own: q, k and v any, β that of k⁻², so that a delta
rule's I − β k kᵀ is a number, and the state that of k ⊗ v. Decays are numbers. A formula of these
terms that keeps to units, summand by summand, is the same formula whether they are measured in
metres or in miles. One that doesn't, such as s + (10⁻⁴ · s)³, may look like another one at the
magnitudes that are drawn, and at 10⁶ be something else. Where it keeps to them, what shows at no
magnitude of one term shows at none of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from attngraph.analysis.recurrence.terms import Recurrence
from attngraph.ir import Graph, Node, Value
from attngraph.ir.ops import attribute
from attngraph.ir.slices import backward_slice
from attngraph.ir.traits import (
    ADDITIVE,
    CAST,
    CHOICE,
    FILL,
    JOIN,
    LAYOUT,
    MATMUL,
    MULTIPLICATIVE,
    NEGATION,
    PAD,
    POWER,
    REVERSED,
    RUNNING_SUM,
    SCALE,
    SCATTER,
    SHIFT,
    SUM,
    TRIANGLE,
)

Unit: TypeAlias = tuple[float, float, float] | None
"""Powers of the units of q, k and v. None is that of zeros, which have every unit."""
_NUMBER = 0.0, 0.0, 0.0
_LOOP = "attn.scan"
_SAME = LAYOUT | CAST | NEGATION | SCALE | SUM | TRIANGLE
_ALIKE = ADDITIVE | SHIFT | REVERSED | JOIN | CHOICE | PAD | SCATTER
_NAMED = ("other", "value", "self")  # attributes that are summands or elements
_FEW = 1 << 16  # elements of a constant that is looked at


class _UnlikeError(Exception):
    """Summands of two units, or a function of what isn't a number."""


def units_of(found: Recurrence) -> dict[Value, Unit]:
    """The units of its operands; those that are one value have one."""
    units: dict[Value, Unit] = {}
    own = zip((found.query, found.key, found.value), range(3), strict=True)
    for part, place in own:
        if part is not None:
            units.setdefault(part.value, _power(place))
    key = units[found.key.value]
    value = _NUMBER if found.value is None else units[found.value.value]
    if found.beta is not None:
        units.setdefault(found.beta.value, _raised(key, -2))
    if found.decay is not None and found.decay.operand is not None:
        units.setdefault(found.decay.operand.value, _NUMBER)
    if found.past is not None:
        units[found.past.value] = _product(value, _raised(key, 1 if found.beta is None else -1))
    return units


def unlike(outputs: Iterable[Value], units: Mapping[Value, Unit]) -> Node | None:
    """A node between the operands, whose units are given, and the outputs that adds unlike things,
    or takes another function than a power of what isn't a number; None where there is none.
    """
    known = dict(units)
    leaves, nodes = backward_slice(outputs, known.__contains__)
    _name_leaves(leaves, known)
    for node in nodes:
        try:
            known.update(zip(node.outputs, _made(node, known), strict=True))
        except _UnlikeError:
            return node
    return None


def _name_leaves(leaves: Iterable[Value], known: dict[Value, Unit]) -> None:
    for leaf in leaves:
        if leaf not in known:
            data = leaf.data if leaf.is_constant else None
            is_read = data is not None and not data.is_meta and 0 < data.numel() <= _FEW
            known[leaf] = None if is_read and data is not None and not data.any() else _NUMBER


def _made(node: Node, known: Mapping[Value, Unit]) -> list[Unit]:
    """The units of a node's outputs."""
    if node.op == _LOOP:
        return _looped(node, known)
    return [_one(node, [known[value] for value in node.inputs if value is not None])] * len(
        node.outputs
    )


def _one(node: Node, given: list[Unit]) -> Unit:
    op = node.op
    if op in FILL:
        number = 0 if "zeros" in op else node.attrs.get("fill_value", 1)
        return None if number == 0 else _NUMBER
    if op in _SAME or (op in RUNNING_SUM and "cumsum" in op):
        return given[0]
    if op in MULTIPLICATIVE | MATMUL:
        if "div." in op:
            return _product(given[0], _raised(given[1], -1))
        made: Unit = _NUMBER
        for each in given:
            made = _product(made, each)
        return made
    if op in POWER and len(given) == 1:
        return _raised(given[0], 2 if op == "aten.square" else attribute(node, "exponent"))
    if op in _ALIKE:
        numbers = [value for name in _NAMED if (value := node.attrs.get(name)) is not None]
        return _alike([*_summands(node, given), *(None if n == 0 else _NUMBER for n in numbers)])
    if any(each not in (None, _NUMBER) for each in given):
        raise _UnlikeError
    return _NUMBER


def _summands(node: Node, given: list[Unit]) -> list[Unit]:
    """Those of a node's inputs that are added, or chosen from."""
    if node.op in CHOICE:
        at = 1 if "masked_fill" in node.op else 0
        return [each for place, each in enumerate(given) if place != at]
    if node.op in SCATTER:
        values = [value for value in node.inputs if value is not None]
        pairs = zip(values, given, strict=True)
        return [each for value, each in pairs if value.dtype.is_floating_point]
    return given


def _looped(node: Node, known: Mapping[Value, Unit]) -> list[Unit]:
    """Of a loop whose state has one unit in all steps, that of what is added to it first."""
    body: Graph = attribute(node, "body")
    carried = attribute(node, "carried")
    units: dict[Value, Unit] = {
        inside: None if value is None else known[value]
        for inside, value in zip(body.inputs, node.inputs, strict=True)
    }
    leaves, nodes = backward_slice(body.outputs, units.__contains__)
    _name_leaves(leaves, units)
    for _ in range(carried + 1):
        inside = dict(units)
        for each in nodes:
            inside.update(zip(each.outputs, _made(each, inside), strict=True))
        states = body.inputs[:carried]
        after = [_alike([units[a], inside[b]]) for a, b in zip(states, body.outputs, strict=False)]
        if after == [units[state] for state in states]:
            return [*after, *(inside[value] for value in body.outputs[carried:])]
        units.update(zip(states, after, strict=True))
    raise _UnlikeError


def _power(place: int) -> Unit:
    return float(place == 0), float(place == 1), float(place == 2)


def _product(one: Unit, other: Unit) -> Unit:
    if one is None or other is None:
        return None
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def _raised(unit: Unit, exponent: float) -> Unit:
    if unit is None:
        return _NUMBER if exponent == 0 else None
    return unit[0] * exponent, unit[1] * exponent, unit[2] * exponent


def _alike(given: Iterable[Unit]) -> Unit:
    found = {each for each in given if each is not None}
    if len(found) > 1:
        raise _UnlikeError
    return next(iter(found), None)
