"""Several updates of a state in one step: each is read by itself, and all of them are the step."""

from __future__ import annotations

import pytest
import torch

from attngraph.analysis.recurrence.outer_chain import read_outer_steps
from attngraph.analysis.recurrence.outer_terms import OuterStep, StateStep
from attngraph.analysis.values.intervals import Intervals
from attngraph.ir import Graph, Value, interpret, parse
from attngraph.ir.slices import forward_slice

_BODY = """graph @step {
  dim batch = 2 in 1..
  input %s : f32[batch, 2, 4, 4]
  input %q : f32[batch, 2, 4]
  input %k : f32[batch, 2, 4]
  input %v : f32[batch, 2, 4]
  input %k2 : f32[batch, 2, 4]
  input %v2 : f32[batch, 2, 4]
  input %g : f32[batch, 2, 1]
  input %r : f32[batch, 2, 1]
  input %r2 : f32[batch, 2, 1]
  input %there : bool[batch, 1, 1, 1]
  %q1 = aten.unsqueeze(%q) {dim = 3}
  %k1 = aten.unsqueeze(%k) {dim = 3}
  %k21 = aten.unsqueeze(%k2) {dim = 3}
  %a = aten.exp(%g)
  %a1 = aten.unsqueeze(%a) {dim = 3}
  %kept = aten.mul.Tensor(%s, %a1)
  %ks = aten.mul.Tensor(%kept, %k1)
  %had = aten.sum.dim_IntList(%ks) {dim = [2]}
  %off = aten.sub.Tensor(%v, %had)
  %by = aten.mul.Tensor(%off, %r)
  %by1 = aten.unsqueeze(%by) {dim = 2}
  %kv = aten.mul.Tensor(%k1, %by1)
  %mid = aten.add.Tensor(%kept, %kv)
  %then = aten.alias(%mid)
  %ks2 = aten.mul.Tensor(%then, %k21)
  %had2 = aten.sum.dim_IntList(%ks2) {dim = [2]}
  %off2 = aten.sub.Tensor(%v2, %had2)
  %by2 = aten.mul.Tensor(%off2, %r2)
  %by21 = aten.unsqueeze(%by2) {dim = 2}
  %kv2 = aten.mul.Tensor(%k21, %by21)
  %new = aten.add.Tensor(%then, %kv2)
  %read = aten.mul.Tensor(%q1, %new)
  %z = aten.sum.dim_IntList(%read) {dim = [2]}
  return %new, %z
}
"""
Changes = dict[str, str]
_THEN = "%then = aten.alias(%mid)"
_READ_MID: Changes = {"aten.mul.Tensor(%q1, %new)": "aten.mul.Tensor(%q1, %mid)"}
_PLAIN: Changes = {
    "%off2 = aten.sub.Tensor(%v2, %had2)": "%off2 = aten.alias(%v2)",
    "%by2 = aten.mul.Tensor(%off2, %r2)": "%by2 = aten.alias(%off2)",
}
READ: dict[str, Changes] = {
    "two corrections behind a decay": {},
    "without a decay": {"%kept = aten.mul.Tensor(%s, %a1)": "%kept = aten.alias(%s)"},
    "a decay of each correction": {_THEN: "%then = aten.mul.Tensor(%mid, %a1)"},
    "a number that the second decays by": {_THEN: "%then = aten.mul.Scalar(%mid) {other = 0.5}"},
    "what is read between them": _READ_MID,
    "what is read before them": {"aten.mul.Tensor(%q1, %new)": "aten.mul.Tensor(%q1, %s)"},
    "two sums": {
        **_PLAIN,
        "%off = aten.sub.Tensor(%v, %had)": "%off = aten.alias(%v)",
    },
    "one key": {"%k21 = aten.unsqueeze(%k2)": "%k21 = aten.unsqueeze(%k)"},
    "a copy of what is left": {"return %new, %z": "%copy = aten.clone(%new)\nreturn %copy, %z"},
}
OTHERS: dict[str, Changes] = {
    "a correction and a sum": _PLAIN,
    "the first error in the second one": {
        "%by2 = aten.mul.Tensor(%off2, %r2)": "%o2 = aten.add.Tensor(%off2, %off)\n"
        "%by2 = aten.mul.Tensor(%o2, %r2)"
    },
    "both of the state before": {"aten.mul.Tensor(%then, %k21)": "aten.mul.Tensor(%kept, %k21)"},
    "a rate of the state": {
        "%by2 = aten.mul.Tensor(%off2, %r2)": "%m = aten.mean.dim(%mid) {dim = [2]}\n"
        "%by2 = aten.mul.Tensor(%off2, %m)"
    },
    "values that change places between them": {_THEN: "%then = aten.flip(%mid) {dims = [3]}"},
    "a state that is turned between them": {
        _THEN: "%then = aten.transpose.int(%mid) {dim0 = 2, dim1 = 3}"
    },
    "a cut that no drawn number meets": {_THEN: "%then = aten.clamp(%mid) {min = -1e6, max = 1e6}"},
    "a number that is added, faintly": {_THEN: "%then = aten.add.Scalar(%mid) {other = 1e-12}"},
    "half precision between them": {
        _THEN: "%f = aten._to_copy(%mid) {dtype = f16}\n%then = aten._to_copy(%f) {dtype = f32}"
    },
    "rows as a factor between them": {_THEN: "%then = aten.mul.Scalar(%mid) {other = batch - 1}"},
    "a product of what is left and what is between": {
        "aten.mul.Tensor(%q1, %new)": "aten.mul.Tensor(%mid, %new)"
    },
    "a sum of both under one query": {
        "aten.mul.Tensor(%q1, %new)": "aten.mul.Tensor(%q1, %both)",
        "%read =": "%both = aten.add.Tensor(%mid, %new)\n%read =",
    },
    "a result beside what is read": {
        "return %new, %z": "%zs = aten.amax(%mid) {dim = [2]}\n%y = aten.add.Tensor(%z, %zs)\n"
        "return %new, %y"
    },
    "a result of another size": {
        "return %new, %z": "%m = aten.mean.dim(%mid) {dim = [2, 3]}\nreturn %new, %z, %m"
    },
    "nothing that is read": {"return %new, %z": "return %new, %v"},
}  # fmt: skip
_STAYS = "%all = aten.where.self(%there, %new, %s)"
HIDDEN: dict[str, Changes] = {
    "what stayed is read": {
        "%read = aten.mul.Tensor(%q1, %new)": f"{_STAYS}\n%read = aten.mul.Tensor(%q1, %all)",
        "return %new": "return %all",
    },
}
UNLIKE: dict[str, Changes] = {
    "another state where it stays": {
        "%read = aten.mul.Tensor(%q1, %new)": _STAYS.replace("%s)", "%kept)")
        + "\n%read = aten.mul.Tensor(%q1, %all)",
        "return %new": "return %all",
    },
    "what was before is read beside it": {
        "%read = aten.mul.Tensor(%q1, %new)": f"{_STAYS}\n"
        "%f = aten.mul.Scalar(%s) {other = 1e-12}\n%more = aten.add.Tensor(%all, %f)\n"
        "%read = aten.mul.Tensor(%q1, %more)",
        "return %new": "return %all",
    },
    "what would have been is read": {"return %new": f"{_STAYS}\nreturn %all"},
}


def _parsed(changes: Changes) -> Graph:
    text = _BODY
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return parse(text)


def _read(body: Graph, shown: Value | None = None) -> list[OuterStep]:
    state = body.inputs[0]
    reached = forward_slice([state], body)
    known = [value for value in body.inputs if value is not state]
    known += [value for node in body for value in node.outputs if value not in reached]
    given = known, {}, lambda value: value.data, lambda value: Intervals().of(value)[0]
    return read_outer_steps(
        StateStep(body, state, body.outputs[0], body.outputs[1:], *given, shown)
    )


def _assert_same(body: Graph, found: list[OuterStep], rows: int, *, there: bool = True) -> None:
    """What the step makes of large numbers is what was read of it, update by update."""
    inputs = []
    for value in body.inputs:
        shape = [size if isinstance(size, int) else rows for size in value.shape]
        x = torch.randn(shape) * (30 if value.name in ("s", "q", "v", "v2") else 1)
        inputs.append(torch.full(shape, there) if value.dtype == torch.bool else x)
    seen: dict[Value, torch.Tensor] = dict(zip(body.inputs, inputs, strict=True))
    made = interpret(body, inputs, observe=lambda value, x: seen.update({value: x}))
    state = inputs[0].double()
    state = state.mT if found[0].turned else state
    for step in found:
        given = {each: seen[each].double().reshape(rows, 2, -1) for each in step.operands}
        state, *z = step.run(given, state)
        for x in z:
            assert step.seen is not None
            torch.testing.assert_close(seen[step.seen].double(), x, rtol=1e-4, atol=1e-2)
    state = state.mT if found[0].turned else state
    torch.testing.assert_close(made[0].double(), state, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("changes", READ.values(), ids=READ)
@pytest.mark.parametrize("rows", [1, 3])
def test_what_is_read_is_the_step(changes: Changes, rows: int) -> None:
    torch.manual_seed(0)
    body = _parsed(changes)
    found = _read(body)
    assert len(found) == 2
    _assert_same(body, found, rows)


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_what_is_nearly_one_is_none(changes: Changes) -> None:
    assert not _read(_parsed(changes))


@pytest.mark.parametrize("changes", HIDDEN.values(), ids=HIDDEN)
def test_a_step_that_may_leave_the_state_is_read_where_it_does_not(changes: Changes) -> None:
    torch.manual_seed(0)
    body = _parsed(changes)
    found = _read(body, body.inputs[-1])
    assert len(found) == 2
    _assert_same(body, found, 3)


@pytest.mark.parametrize("changes", UNLIKE.values(), ids=UNLIKE)
def test_where_it_stays_it_is_the_state(changes: Changes) -> None:
    body = _parsed(changes)
    assert not _read(body, body.inputs[-1])


def test_updates_without_what_reads_them_have_no_query() -> None:
    """The tokens of the operator that nothing reads are left out of what it gives."""
    first, second = _read(_parsed({}))
    assert (first.query, first.seen) == (None, None)
    assert second.query is not None
    assert second.query.name.startswith("q")
    first, second = _read(_parsed(_READ_MID))
    assert first.query is not None
    assert second.query is None
