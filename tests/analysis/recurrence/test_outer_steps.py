"""A step S' = A S + k ⊗ v: what is read of it holds for numbers and sizes that were never drawn."""

from __future__ import annotations

import pytest
import torch

from attngraph.analysis.recurrence.outer_proof import proven
from attngraph.analysis.recurrence.outer_step import read_outer_step
from attngraph.analysis.recurrence.outer_terms import OuterStep, Runs, StateStep
from attngraph.analysis.values.intervals import Intervals
from attngraph.ir import Graph, Value, interpret, parse
from attngraph.ir.slices import forward_slice

HEADS, KEYS, VALUES = 2, 3, 4
_BODY = """graph @step {
  dim batch = 2 in 1..
  input %s : f32[batch, 2, 3, 4]
  input %q : f32[batch, 2, 3]
  input %k : f32[batch, 2, 3]
  input %v : f32[batch, 2, 4]
  input %k2 : f32[batch, 2, 3]
  input %g : f32[batch, 2, 1]
  input %gk : f32[batch, 2, 3]
  input %gv : f32[batch, 2, 4]
  input %there : bool[batch, 1, 1, 1]
  constant %u = [[0.5, 2.0, -1.0], [3.0, 0.25, 1.5]] : f32[2, 3]
  constant %fixed = [[[0.5]], [[0.75]]] : f32[2, 1, 1]
  %k1 = aten.unsqueeze(%k) {dim = 3}
  %v1 = aten.unsqueeze(%v) {dim = 2}
  %q1 = aten.unsqueeze(%q) {dim = 3}
  %kv = aten.mul.Tensor(%k1, %v1)
  %kept = aten.alias(%s)
  %new = aten.add.Tensor(%kept, %kv)
  %read = aten.mul.Tensor(%q1, %new)
  %z = aten.sum.dim_IntList(%read) {dim = [2]}
  return %new, %z
}
"""
Changes = dict[str, str]
_KEPT = "%kept = aten.alias(%s)"


def _gate(name: str, how: str, axis: int) -> Changes:
    return {
        _KEPT: f"%a = {how.format(f'%{name}')}\n%a1 = aten.unsqueeze(%a) {{dim = {axis}}}\n"
        "%kept = aten.mul.Tensor(%s, %a1)"
    }


def _beside(lines: str) -> Changes:
    """Something else happens to the next state before it is read."""
    return {"%new = aten.add.Tensor(%kept, %kv)": f"%sum = aten.add.Tensor(%kept, %kv)\n{lines}"}


def _faint(name: str) -> str:
    """`name`1 to 5, each a thousandth of the one before: factors that show, one by one."""
    names = [name, *(f"{name}{at}" for at in range(1, 6))]
    pairs = zip(names[1:], names, strict=False)
    return "\n".join(f"%{new} = aten.mul.Scalar(%{old}) {{other = 0.001}}" for new, old in pairs)


_LOG = "aten.exp({0})"
_DELTA: Changes = {
    "%kv = aten.mul.Tensor(%k1, %v1)\n": "",
    "%new = aten.add.Tensor(%kept, %kv)": "%ks = aten.mul.Tensor(%kept, %k1)\n"
    "%had = aten.sum.dim_IntList(%ks) {dim = [2]}\n%off = aten.sub.Tensor(%v, %had)\n"
    "%rate = aten.sigmoid(%g)\n%by = aten.mul.Tensor(%off, %rate)\n"
    "%by1 = aten.unsqueeze(%by) {dim = 2}\n%kv = aten.mul.Tensor(%k1, %by1)\n"
    "%new = aten.add.Tensor(%kept, %kv)",
}
_BEFORE: Changes = {"aten.mul.Tensor(%q1, %new)": "aten.mul.Tensor(%q1, %s)"}
_BONUS: Changes = {
    "aten.mul.Tensor(%q1, %new)": "aten.mul.Tensor(%q1, %more)",
    "%read =": "%u1 = aten.unsqueeze(%u) {dim = 2}\n%own = aten.mul.Tensor(%u1, %kv)\n"
    "%more = aten.add.Tensor(%s, %own)\n%read =",
}
_GENERAL: Changes = _DELTA | {
    "%ks = aten.mul.Tensor(%kept, %k1)": "%k21 = aten.unsqueeze(%k2) {dim = 3}\n"
    "%ks = aten.mul.Tensor(%kept, %k21)"
}
READ: dict[str, Changes] = {
    "sums": {},
    "a delta rule by another key": _GENERAL,
    "another key, under a decay": _gate("gk", _LOG, 3) | _GENERAL,
    "a decay of each head": _gate("g", _LOG, 3),
    "a decay of each key feature": _gate("gk", _LOG, 3),
    "a decay that is a number": _gate("g", "aten.sigmoid({0})", 3),
    "a decay that is known": {_KEPT: "%kept = aten.mul.Tensor(%s, %fixed)"},
    "a delta rule": _DELTA,
    "a delta rule behind a decay": _DELTA | _gate("gk", _LOG, 3),
    "a rate of the value": {
        "%v1 = aten.unsqueeze(%v)": "%rv = aten.mul.Tensor(%v, %g)\n%v1 = aten.unsqueeze(%rv)"
    },
    "a query that is scaled": {
        "%q1 = aten.unsqueeze(%q)": "%qs = aten.mul.Scalar(%q) {other = -0.25}\n"
        "%q1 = aten.unsqueeze(%qs)"
    },
    "a state that is read before": _BEFORE,
    "a bonus of the token itself": _BONUS | _gate("gk", _LOG, 3),
    "one tensor for keys and queries": {"%q1 = aten.unsqueeze(%q)": "%q1 = aten.unsqueeze(%k)"},
}
OTHERS: dict[str, Changes] = {
    "a decay of each value feature": _gate("gv", _LOG, 2),
    "a decay that may be below 0": _gate("g", "aten.tanh({0})", 3),
    "a decay by the state": {_KEPT: "%t = aten.tanh(%s)\n%kept = aten.mul.Tensor(%s, %t)"},
    "heads that change places": {_KEPT: "%kept = aten.flip(%s) {dims = [1]}"},
    "rows that change places": {_KEPT: "%kept = aten.flip(%s) {dims = [0]}"},
    "keys that change places": {_KEPT: "%kept = aten.flip(%s) {dims = [2]}"},
    "values that change places": {_KEPT: "%kept = aten.flip(%s) {dims = [3]}"},
    "a second product": {
        "%new = aten.add.Tensor(%kept, %kv)": "%k21 = aten.unsqueeze(%k2) {dim = 3}\n"
        "%kv2 = aten.mul.Tensor(%k21, %v1)\n%both = aten.add.Tensor(%kv, %kv2)\n"
        "%new = aten.add.Tensor(%kept, %both)"
    },
    "a delta rule by another key, and all features, faintly": _GENERAL
    | {
        "%new = aten.add.Tensor(%kept, %kv)\n": "%sum = aten.add.Tensor(%kept, %kv)\n"
        f"%f = aten.flip(%s) {{dims = [2]}}\n{_faint('f')}\n"
        "%new = aten.add.Tensor(%sum, %f5)\n"
    },
    "another key, and a cut that no drawn number meets": _GENERAL
    | {
        "%off = aten.sub.Tensor(%v, %had)": "%low = aten.clamp(%had) {min = -1e6, max = 1e6}\n"
        "%off = aten.sub.Tensor(%v, %low)"
    },
    "a number that is added": _beside("%new = aten.add.Scalar(%sum) {other = 1e-12}"),
    "all rows, faintly": _beside(
        "%m = aten.sum.dim_IntList(%sum) {dim = [0], keepdim = true}\n"
        f"{_faint('m')}\n{_faint('m5')}\n%new = aten.add.Tensor(%sum, %m55)"
    ),
    "other keys that are read, faintly": {
        "%z = aten.sum.dim_IntList(%read) {dim = [2]}": "%other = aten.flip(%new) {dims = [2]}\n"
        f"%m = aten.mul.Tensor(%q1, %other)\n{_faint('m')}\n"
        "%both = aten.add.Tensor(%read, %m5)\n%z = aten.sum.dim_IntList(%both) {dim = [2]}"
    },
    "a cut that no drawn number meets": _beside(
        "%new = aten.clamp(%sum) {min = -1e6, max = 1e6}"
    ),
    "a cube that shows where it is large": _beside(
        f"{_faint('sum')}\n%c = aten.pow.Tensor_Scalar(%sum2) {{exponent = 3}}\n"
        "%new = aten.add.Tensor(%sum, %c)"
    ),
    "NaN that is taken away": _beside("%new = aten.nan_to_num(%sum)"),
    "half precision": _beside(
        "%f = aten._to_copy(%sum) {dtype = f16}\n%new = aten._to_copy(%f) {dtype = f32}"
    ),
    "a choice that a row makes": _beside(
        "%h = aten.mul.Scalar(%sum) {other = 0.5}\n%new = aten.where.self(%there, %sum, %h)"
    ),
    "a result beside what is read": {
        "return %new, %z": "%zs = aten.amax(%new) {dim = [2]}\nreturn %new, %zs"
    },
}  # fmt: skip
SIZED: dict[str, Changes] = {
    # in a trial with two rows each is 1
    "rows as a factor": _beside("%new = aten.mul.Scalar(%sum) {other = batch - 1}"),
    "half the rows as a factor": _beside("%new = aten.mul.Scalar(%sum) {other = batch / 2}"),
    "rows under a result": {
        "aten.sum.dim_IntList(%read)": "aten.sum.dim_IntList(%less)",
        "%z =": "%less = aten.div.Scalar(%read) {other = batch}\n%z =",
    },
    "rows as a tensor": _beside(
        "%n = aten.full() {size = [], fill_value = batch - 1, dtype = f32}\n"
        "%new = aten.mul.Tensor(%sum, %n)"
    ),
}


def _parsed(changes: Changes) -> Graph:
    text = _BODY
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return parse(text)


def _read(body: Graph) -> OuterStep | None:
    state = body.inputs[0]
    reached = forward_slice([state], body)
    known = [value for value in body.inputs if value is not state]
    known += [value for node in body for value in node.outputs if value not in reached]

    def least(value: Value) -> float:
        return Intervals().of(value)[0]

    given = known, {}, lambda value: value.data, least
    return read_outer_step(StateStep(body, state, body.outputs[0], body.outputs[1:], *given))


def _given(
    body: Graph, found: OuterStep, rows: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What the step makes of large numbers, and what was read of it does."""
    sizes = {"f32": torch.float64}
    assert sizes
    inputs = []
    for value in body.inputs:
        shape = [size if isinstance(size, int) else rows for size in value.shape]
        x = torch.randn(shape) * (30 if value.name in "qkvs" else 1)
        inputs.append(torch.ones(shape).bool() if value.dtype == torch.bool else x)
    seen: dict[Value, torch.Tensor] = dict(zip(body.inputs, inputs, strict=True))
    made = interpret(body, inputs, observe=lambda value, x: seen.update({value: x}))
    seen.update((value, value.data) for value in found.operands if value.data is not None)
    operands = {
        value: seen[value].double().reshape(1 if value is found.bonus else rows, found.heads, -1)
        for value in found.operands
    }
    state = inputs[0].double().reshape(rows, found.heads, *inputs[0].shape[-2:])
    after, z = found.run(operands, state.mT if found.turned else state)
    return [x.double() for x in made], [after.mT if found.turned else after, z]


@pytest.mark.parametrize("changes", READ.values(), ids=READ)
@pytest.mark.parametrize("rows", [1, 3])
def test_what_is_read_is_the_step(changes: Changes, rows: int) -> None:
    body = _parsed(changes)
    found = _read(body)
    assert found is not None
    assert (found.heads, found.keys, found.features) == (HEADS, KEYS, VALUES)
    made, expected = _given(body, found, rows)
    for x, y in zip(made, expected, strict=True):
        assert float((x - y.reshape(x.shape)).abs().max() / y.abs().max()) < 1e-5


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_what_is_nearly_one_is_none(changes: Changes) -> None:
    assert _read(_parsed(changes)) is None


@pytest.mark.parametrize("changes", SIZED.values(), ids=SIZED)
def test_a_size_is_no_number(changes: Changes) -> None:
    assert _read(_parsed(changes)) is None


def test_the_axis_that_is_summed_over_has_the_keys() -> None:
    turned = {
        "f32[batch, 2, 3, 4]": "f32[batch, 2, 4, 3]",
        "%k1 = aten.unsqueeze(%k) {dim = 3}": "%k1 = aten.unsqueeze(%k) {dim = 2}",
        "%v1 = aten.unsqueeze(%v) {dim = 2}": "%v1 = aten.unsqueeze(%v) {dim = 3}",
        "%q1 = aten.unsqueeze(%q) {dim = 3}": "%q1 = aten.unsqueeze(%q) {dim = 2}",
        "%z = aten.sum.dim_IntList(%read) {dim = [2]}": "%z = aten.sum.dim_IntList(%read) "
        "{dim = [3]}",
    }
    body = _parsed(turned)
    found = _read(body)
    assert found is not None
    assert found.turned
    made, expected = _given(body, found, 3)
    assert float((made[1] - expected[1]).abs().max() / expected[1].abs().max()) < 1e-5


def test_terms_that_are_exchanged_are_not_proven() -> None:
    """The proof asks of itself: not only of what the search proposes."""
    body = _parsed({})
    found = _read(body)
    assert found is not None
    runs = Runs(body, body.inputs[0], body.outputs, [], lambda value: value.data)
    assert proven(found, runs, {}, None) is not None
    names = {value.name: value for value in body.inputs}
    terms = {"heads": HEADS, "keys": KEYS, "features": VALUES, "turned": False}
    q, k, v, g = (names[name] for name in ("q", "k", "v", "g"))
    seen = body.outputs[1]
    for wrong in (
        OuterStep(k, q, v, seen, **terms),
        OuterStep(q, k, v, seen, **terms, scale=1 + 1e-9),
        OuterStep(q, k, v, seen, **terms, decay=g),
        OuterStep(q, k, v, seen, **terms, beta=g),
        OuterStep(q, k, v, seen, **terms, reads_before=True),
        OuterStep(q, k, names["gv"], seen, **terms),
    ):
        assert proven(wrong, runs, {}, None) is None
