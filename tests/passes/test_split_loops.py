"""States leave a loop where a step is read; what only looks like a recurrence stays in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attngraph.ir import Graph, Remark, clone, interpret, parse, verify
from attngraph.passes.loops.split_loops import SplitLoops

_BODY = """graph @step {
  dim batch = 2 in 1..
  input %conv : f32[batch, 22, 4]
  input %state : f32[batch, 2, 3, 5]
  input %x : f32[batch, 22, 1]
  input %x2 : f32[batch, 22, 1]
  input %g : f32[batch, 2]
  input %p : f32[batch, 2]
  input %h : f32[batch, 2, 3]
  input %b : f32[batch, 2]
  input %there : bool[batch]
  input %w : f32[22, 1, 4]
  %kept = aten.slice.Tensor(%conv) {dim = 2, start = 1}
  %y, %n = attn.causal_conv(%x, %w, none, %kept) {activation = "silu"}
  %q, %k, %v = aten.split_with_sizes(%y) {split_sizes = [6, 6, 10], dim = 1}
  %qt = aten.tanh(%q)
  %kt = aten.tanh(%k)
  %q1 = aten.reshape(%qt) {shape = [batch, 2, 3, 1]}
  %k1 = aten.reshape(%kt) {shape = [batch, 2, 3, 1]}
  %v1 = aten.reshape(%v) {shape = [batch, 2, 5]}
  %ls = aten.log_sigmoid(%g)
  %g1 = aten.reshape(%ls) {shape = [batch, 2, 1, 1]}
  %a = aten.exp(%g1)
  %old = aten.mul.Tensor(%state, %a)
  %m = aten.mul.Tensor(%old, %k1)
  %s = aten.sum.dim_IntList(%m) {dim = [-2]}
  %d = aten.sub.Tensor(%v1, %s)
  %bs = aten.sigmoid(%b)
  %b1 = aten.reshape(%bs) {shape = [batch, 2, 1]}
  %u = aten.mul.Tensor(%d, %b1)
  %u1 = aten.reshape(%u) {shape = [batch, 2, 1, 5]}
  %o = aten.mul.Tensor(%k1, %u1)
  %new = aten.add.Tensor(%old, %o)
  %t4 = aten.reshape(%there) {shape = [batch, 1, 1, 1]}
  %state2 = aten.where.self(%t4, %new, %state)
  %z = aten.mul.Tensor(%new, %q1)
  %r = aten.sum.dim_IntList(%z) {dim = [-2]}
  %t3 = aten.reshape(%there) {shape = [batch, 1, 1]}
  %zero = aten.full() {size = [], fill_value = 0.0, dtype = f32}
  %given = aten.where.self(%t3, %r, %zero)
  %joined = aten.cat(%conv, %x) {dim = 2}
  %moved = aten.slice.Tensor(%joined) {dim = 2, start = -4}
  %conv2 = aten.where.self(%t3, %moved, %conv)
  return %conv2, %state2, %given
}
"""
_SHAPES = {
    "conv": "f32[batch, 22, 4]",
    "state": "f32[batch, 2, 3, 5]",
    "x": "f32[seq, batch, 22, 1]",
    "x2": "f32[seq, batch, 22, 1]",
    "g": "f32[seq, batch, 2]",
    "p": "f32[seq, batch, 2]",
    "h": "f32[seq, batch, 2, 3]",
    "b": "f32[seq, batch, 2]",
    "there": "bool[seq, batch]",
    "w": "f32[22, 1, 4]",
}

Changes = dict[str, str]
_UNMASKED: Changes = {"%conv2, %state2, %given": "%moved, %new, %r"}
_PLAIN: Changes = {"aten.sub.Tensor(%v1, %s)": "aten.add.Tensor(%v1, %v1)"}
_OWN_PAST: Changes = {
    "%conv : f32[batch, 22, 4]": "%conv : f32[batch, 22, 3]",
    "none, %kept)": "none, %conv)",
    "aten.where.self(%t3, %moved, %conv)": "aten.where.self(%t3, %n, %conv)",
}
_OF_FEATURES: Changes = {
    "%ls = aten.log_sigmoid(%g)": "%ls = aten.log_sigmoid(%h)",
    "%g1 = aten.reshape(%ls) {shape = [batch, 2, 1, 1]}": "%g1 = aten.reshape(%ls) "
    "{shape = [batch, 2, 3, 1]}",
}
_STAYED: Changes = {
    "aten.mul.Tensor(%new, %q1)": "aten.mul.Tensor(%state2, %q1)",
    "return %conv2, %state2, %given": "return %moved, %state2, %r",
}
_FROM_OUTSIDE: Changes = {
    "%g1 = aten.reshape(%ls)": "%g1 = aten.reshape(%p)",
    "aten.mul.Tensor(%state, %a)": "aten.mul.Tensor(%state, %g1)",
}
_READ: dict[str, Changes] = {
    "a gated delta rule": {},
    "a gate of the value, and no delta": _PLAIN,
    "a decay of each feature": _OF_FEATURES,
    "features without a delta": _OF_FEATURES | _PLAIN,
    "no decay": {"aten.mul.Tensor(%state, %a)": "aten.alias(%state)"},
    "a decay that is no exponential": {
        "%ls = aten.log_sigmoid(%g)": "%ls = aten.sigmoid(%g)",
        "aten.mul.Tensor(%state, %a)": "aten.mul.Tensor(%state, %g1)",
    },
    "no token hidden": _UNMASKED,
    "a convolution's own past": _OWN_PAST,
    "a decay from outside the loop": _FROM_OUTSIDE,
    "results of states that stayed": _STAYED,
    "a state that is read before its update": {
        "aten.mul.Tensor(%new, %q1)": "aten.mul.Tensor(%state, %q1)"
    },
}
_CORRECTED_FIRST: Changes = {"aten.mul.Tensor(%old, %k1)": "aten.mul.Tensor(%state, %k1)"}
_ONE_LEFT: dict[str, Changes] = {
    "a decay that the state decides": {"%a = aten.exp(%g1)": "%a = aten.sigmoid(%state)"},
    "a state that is read as it decayed": {
        "aten.mul.Tensor(%new, %q1)": "aten.mul.Tensor(%old, %q1)"
    },
    "an update that is cut": {
        "%new = aten.add.Tensor(%old, %o)": "%sum = aten.add.Tensor(%old, %o)"
        "\n  %new = aten.clamp(%sum) {min = -1e3, max = 1e3}"
    },
    "an update whose cube shows where it is large": {
        "%new = aten.add.Tensor(%old, %o)": "%sum = aten.add.Tensor(%old, %o)"
        "\n  %little = aten.mul.Scalar(%sum) {other = 1e-4}"
        "\n  %cube = aten.pow.Tensor_Scalar(%little) {exponent = 3}"
        "\n  %new = aten.add.Tensor(%sum, %cube)"
    },
    "two updates": {
        "%t4 = ": "%h1 = aten.reshape(%h) {shape = [batch, 2, 3, 1]}\n  %more = "
        "aten.mul.Tensor(%h1, %u1)\n  %t4 = ",
        "aten.where.self(%t4, %new, %state)": "aten.add.Tensor(%new, %more)",
    },
    "a decay that may be below 0": {
        "%ls = aten.log_sigmoid(%g)": "%ls = aten.tanh(%g)",
        "aten.mul.Tensor(%state, %a)": "aten.mul.Tensor(%state, %g1)",
    },
    "what a hidden token would have made is read": {
        "return %conv2, %state2, %given": "return %moved, %state2, %r",
    },
    "a hidden token's state counts twice": {
        "return %conv2, %state2, %given": "return %moved, %state2, %r",
        "%z = aten.mul.Tensor(%new, %q1)": "%half = aten.full() {size = [], fill_value = 0.5, "
        "dtype = f32}\n  %less = aten.mul.Tensor(%state2, %half)\n  %least = "
        "aten.where.self(%t4, %state2, %less)\n  %z = aten.mul.Tensor(%least, %q1)",
    },
}
_GIVEN, _MOVED = "%given = aten.where.self(%t3, %r, %zero)", "aten.slice.Tensor(%joined)"
_BOTH_LEFT: dict[str, Changes] = {
    "results where the states stay": {_GIVEN: "%given = aten.alias(%r)"},
    "other rows are hidden": {
        _GIVEN: "%no = aten.logical_not(%t3)\n  %given = aten.where.self(%no, %r, %zero)"
    },
}
_PAST_LEFT: dict[str, Changes] = {
    "another input is kept": {"aten.cat(%conv, %x)": "aten.cat(%conv, %x2)"},
    "the past of another convolution": _OWN_PAST
    | {"none, %kept)": "none, %more)", "%y, %n = ": "%more = aten.tanh(%conv)\n  %y, %n = "},
    "two places further": {"aten.cat(%conv, %x) ": "aten.cat(%conv, %x, %x) "},
    "inputs in another order": {
        "%moved = ": "%flip = aten.flip(%joined) {dims = [2]}\n  %moved = ",
        _MOVED: "aten.slice.Tensor(%flip)",
    },
}


def _split(changes: Changes) -> tuple[Graph, Graph, list[Remark]]:
    body = _BODY
    for old, new in changes.items():
        assert old in body
        body = body.replace(old, new)
    text = body.replace("\n", "\\n").replace('"', '\\"')
    shapes = dict(_SHAPES)
    if "%conv : f32[batch, 22, 3]" in body:
        shapes["conv"] = "f32[batch, 22, 3]"
    inputs = "".join(f"  input %{name} : {kind}\n" for name, kind in shapes.items())
    inputs = inputs.replace("%p :", "%pre :")
    names = ", ".join(f"%{name}" for name in _SHAPES)
    graph = parse(
        "graph @main {\n  dim batch = 2 in 1..\n  dim seq = 3 in 1..\n"
        + inputs
        + "  %p = aten.sigmoid(%pre)\n"
        + f'  %c, %s, %o = attn.scan({names}) {{body = "{text}", carried = 2, scanned = 7}}\n'
        "  return %c, %s, %o\n}\n"
    )
    before = clone(graph)
    remarks = SplitLoops().run(graph)
    verify(graph)
    return before, graph, remarks


def _ops(graph: Graph) -> list[str]:
    return sorted(node.op for node in graph if node.op.startswith("attn."))


def _assert_same(before: Graph, after: Graph, *, hidden_nan: bool = False) -> None:
    random = torch.Generator().manual_seed(0)
    for batch, seq in ((3, 1), (1, 2), (2, 9)):
        sizes = {"batch": batch, "seq": seq}
        inputs = []
        for value in before.inputs:
            shape = [size if isinstance(size, int) else sizes[str(size)] for size in value.shape]
            drawn = torch.randn(shape, generator=random)
            inputs.append(drawn > 0 if value.dtype == torch.bool else drawn)
        if hidden_nan:
            there = inputs[list(_SHAPES).index("there")]
            there[0, -1] = False  # and with one step the row is hidden whole
            for at, name in enumerate(_SHAPES):
                if name in ("x", "g", "h", "b"):
                    inputs[at][~there] = torch.nan
        pairs = zip(interpret(after, inputs), interpret(before, inputs), strict=True)
        for found, expected in pairs:
            assert not expected.isnan().any()
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


_CHEAP = {"a gated delta rule", "a decay that the state decides", "another input is kept"}


def _of(changes: dict[str, Changes]) -> list[Any]:
    slow = pytest.mark.slow
    return [pytest.param(name, marks=() if name in _CHEAP else slow, id=name) for name in changes]


@pytest.mark.parametrize("name", _of(_READ))
def test_both_states_leave(name: str) -> None:
    before, after, remarks = _split(_READ[name])
    assert _ops(after) == ["attn.causal_conv", "attn.linear_attention"]
    assert [remark.code for remark in remarks] == ["reassociated", "recurrence"]
    _assert_same(before, after)
    if _READ[name] not in (_UNMASKED, _STAYED):
        _assert_same(before, after, hidden_nan=True)


def test_a_delta_rule_before_its_decay_is_a_general_one() -> None:
    """Hidden tokens and all: what stands there may be NaN."""
    before, after, remarks = _split(_CORRECTED_FIRST)
    assert _ops(after) == ["attn.causal_conv", "attn.generalized_delta_rule"]
    assert [remark.code for remark in remarks] == ["reassociated", "recurrence"]
    _assert_same(before, after)
    _assert_same(before, after, hidden_nan=True)


@pytest.mark.parametrize("name", _of(_ONE_LEFT))
def test_a_near_miss_of_linear_attention_stays(name: str) -> None:
    before, after, remarks = _split(_ONE_LEFT[name])
    assert "attn.linear_attention" not in _ops(after)
    assert "attn.scan" in _ops(after)
    assert {remark.code for remark in remarks} <= {"reassociated"}
    _assert_same(before, after)


@pytest.mark.parametrize("name", _of(_PAST_LEFT))
def test_a_near_miss_of_a_convolution_stays(name: str) -> None:
    """In a loop of its own, behind which the delta rule is one operator."""
    before, after, remarks = _split(_PAST_LEFT[name])
    assert _ops(after) == ["attn.linear_attention", "attn.scan"]
    assert [remark.code for remark in remarks] == ["reassociated", "recurrence"]
    _assert_same(before, after)


@pytest.mark.parametrize("name", _of(_BOTH_LEFT))
def test_what_isnt_hidden_where_the_states_stay(name: str) -> None:
    before, after, remarks = _split(_BOTH_LEFT[name])
    assert _ops(after) == ["attn.scan"]
    assert not remarks
    _assert_same(before, after)
