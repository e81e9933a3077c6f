"""Whether a region adds only quantities of one unit, as physics adds metres to metres.

Each term of a recurrence has a unit: q, k, v and a rate that v is multiplied by one of their own,
β that of k⁻², so that a delta rule's I − β k kᵀ is a number, and the state that of what is added to
it. Decays are numbers. A formula of these terms that keeps to units, summand by summand, is the
same whether they are measured in metres or in miles. One that doesn't, such as s + (10⁻⁴ · s)³, may
look like another one at the magnitudes that are drawn, and at 10⁶ be something else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from attngraph.ir import Graph, Node, Value
from attngraph.ir.ops import attribute
from attngraph.ir.slices import backward_slice
from attngraph.ir.traits import (
    ADDITIVE,
    ADDMM,
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
    SOLVE,
    SUM,
    TRIANGLE,
)

Unit: TypeAlias = tuple[float, ...] | None
"""Powers of the units of q, k, v, a rate and two others. None is that of zeros, which have each."""
_OTHERS = 2
_NUMBER = (0.0,) * (4 + _OTHERS)
_LOOP = "attn.scan"
_SAME = LAYOUT | CAST | NEGATION | SCALE | SUM | TRIANGLE
_ALIKE = ADDITIVE | SHIFT | REVERSED | JOIN | CHOICE | PAD | SCATTER
_NAMED = ("other", "value", "self")  # attributes that are summands or elements
_FEW = 1 << 16  # elements of a constant that is looked at


class _UnlikeError(Exception):
    """Summands of two units, or a function of what isn't a number."""


def units_of(
    query: Value | None,
    key: Value,
    value: Value | None,
    *,
    rate: Value | None = None,
    beta: Value | None = None,
    decay: Value | None = None,
    state: Value | None = None,
) -> dict[Value, Unit]:
    """The units of a recurrence's operands; those that are one value have one."""
    units: dict[Value, Unit] = {}
    for place, part in enumerate((query, key, value, rate)):
        if part is not None:
            units.setdefault(part, tuple(float(at == place) for at in range(len(_NUMBER))))
    written = _NUMBER if value is None else units[value]
    written = _product(written, _NUMBER if rate is None else units[rate])
    if beta is not None:
        units.setdefault(beta, _raised(units[key], -2))
    if decay is not None:
        units.setdefault(decay, _NUMBER)
    if state is not None:
        units[state] = _product(written, _raised(units[key], 1 if beta is None else -1))
    return units


def units_of_general(
    query: Value | None,
    key: Value,
    value: Value,
    factors: Sequence[Value],
    *,
    rate: Value | None,
    decay: Value | None,
    state: Value,
) -> dict[Value, Unit] | None:
    """The units where S is multiplied by a number that is the product of these factors too.

    The last factor that isn't there twice, and is none of q, k, v and the decay, has the inverse of
    what the others have, which have each their own. None where there is no such factor, or there
    are more than there are units.
    """
    known = units_of(query, key, value, rate=None if rate in factors else rate, decay=decay)
    free = [each for each in dict.fromkeys(factors) if each not in known]
    once = [each for each in free if list(factors).count(each) == 1]
    if not once or len(free) > 1 + _OTHERS:
        return None
    for place, each in enumerate((each for each in free if each is not once[-1]), 4):
        known[each] = tuple(float(at == place) for at in range(len(_NUMBER)))
    whole: Unit = _NUMBER
    for each in factors:
        whole = whole if each is once[-1] else _product(whole, known[each])
    known[once[-1]] = _raised(whole, -1)
    written = known[value] if rate is None else _product(known[value], known[rate])
    known[state] = _product(written, known[key])
    return known


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
    if op in ADDMM:
        return _alike([given[0], _product(given[1], given[2])])
    if op in SOLVE:
        return _product(given[1], _raised(given[0], -1))
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


def _product(one: Unit, other: Unit) -> Unit:
    if one is None or other is None:
        return None
    return tuple(a + b for a, b in zip(one, other, strict=True))


def _raised(unit: Unit, exponent: float) -> Unit:
    if unit is None:
        return _NUMBER if exponent == 0 else None
    return tuple(power * exponent for power in unit)


def _alike(given: Iterable[Unit]) -> Unit:
    found = {each for each in given if each is not None}
    if len(found) > 1:
        raise _UnlikeError
    return next(iter(found), None)
