"""Scores and values in parts along the keys: no key is left out, taken twice, or another's."""

from __future__ import annotations

import pytest

from attngraph.analysis.attention.joined import (
    JoinedScores,
    SplitWeights,
    lead_of,
    read_joined_scores,
    read_split_weights,
)
from attngraph.analysis.attention.logits import Bias, Mask
from attngraph.analysis.attention.refusals import Declined, Refusal
from attngraph.ir import parse

_SCORES = """graph @main {
  input %q : f32[2, 3, 4, 8]
  input %q2 : f32[2, 3, 4, 8]
  input %k1 : f32[2, 3, 5, 8]
  input %k2 : f32[2, 3, 7, 8]
  input %table : f32[7, 8]
  input %own : f32[2, 3, 4, 7, 8]
  input %bias : f32[2, 1, 4, 7]
  input %m : bool[2, 1, 1, 7]
  input %heat : f32[2, 3, 4, 1]
  input %by : f32[2, 3, 1, 7]
  %zero = aten.full() {size = [], fill_value = -inf, dtype = f32}
  %t1 = aten.permute(%k1) {dims = [0, 1, 3, 2]}
  %t2 = aten.permute(%k2) {dims = [0, 1, 3, 2]}
  %a = aten.matmul(%q, %t1)
  %b = aten.matmul(%q, %t2)
  %y = aten.cat(%a, %b) {dim = 3}
  return %y
}
"""
_WEIGHTS = """graph @main {
  input %p : f32[2, 3, 4, 12]
  input %other : f32[2, 3, 4, 12]
  input %v1 : f32[2, 3, 5, 6]
  input %v2 : f32[2, 3, 7, 6]
  input %v5 : f32[2, 3, 5, 6]
  input %v6 : f32[2, 3, 6, 6]
  input %last : f32[2, 3, 1, 6]
  input %shared : f32[7, 6]
  %a = aten.slice.Tensor(%p) {dim = 3, start = 0, end = 5}
  %b = aten.slice.Tensor(%p) {dim = 3, start = 5, end = 12}
  %x = aten.matmul(%a, %v1)
  %z = aten.matmul(%b, %v2)
  %y = aten.add.Tensor(%x, %z)
  return %y
}
"""
Changes = dict[str, str]


def _text(text: str, changes: Changes) -> str:
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return text


def _scores(changes: Changes) -> JoinedScores | Declined | None:
    node = parse(_text(_SCORES, changes)).outputs[0].producer
    assert node is not None
    return read_joined_scores(node)


def _weights(changes: Changes) -> SplitWeights | None:
    node = parse(_text(_WEIGHTS, changes)).outputs[0].producer
    assert node is not None
    return read_split_weights(node)


_B = "%b = aten.matmul(%q, %t2)"


def test_the_products_of_one_query_are_joined() -> None:
    found = _scores({})
    assert isinstance(found, JoinedScores)
    assert found.query.value.name == "q"
    assert [(part.operand.value.name, part.size, part.scale) for part in found.parts] == [
        ("k1", 5, 1.0),
        ("k2", 7, 1.0),
    ]
    assert found.dim == 3
    assert (found.outer, found.factors, found.steps) == (None, (), ())
    (features,) = found.features
    for part in found.parts:
        assert part.operand.dims[3] == (features,)
        assert part.operand.dims[2] == part.keys
    assert set(lead_of(found.parts, found.features)) == {*found.axes[0], *found.axes[1]}


def test_each_part_keeps_its_own_scale_and_steps() -> None:
    scaled = "%b0 = aten.matmul(%q, %t2)\n%b1 = aten.mul.Scalar(%b0) {other = -0.5}\n"
    found = _scores(
        {_B: f"{scaled}%b2 = aten.add.Tensor(%b1, %bias)\n%b = aten.where.self(%m, %b2, %zero)"}
    )
    assert isinstance(found, JoinedScores)
    assert [part.scale for part in found.parts] == [1.0, -0.5]
    (nothing, bias), (none, mask) = found.steps
    assert nothing is None
    assert none is None
    assert isinstance(bias, Bias)
    assert isinstance(mask, Mask)
    assert (bias.operand.value.name, mask.operand.value.name) == ("bias", "m")


def test_a_scale_of_the_query_may_be_of_one_part() -> None:
    found = _scores({_B: "%qs = aten.mul.Scalar(%q) {other = 3.0}\n%b = aten.matmul(%qs, %t2)"})
    assert isinstance(found, JoinedScores)
    assert [part.scale for part in found.parts] == [1.0, 3.0]


def test_a_part_may_be_shared_by_rows_and_heads() -> None:
    found = _scores({_B: "%tt = aten.permute(%table) {dims = [1, 0]}\n%b = aten.matmul(%q, %tt)"})
    assert isinstance(found, JoinedScores)
    assert [part.operand.value.name for part in found.parts] == ["k1", "table"]


def test_a_factor_of_the_keys_is_theirs_and_one_of_all_scores_is_theirs() -> None:
    found = _scores({_B: "%b0 = aten.matmul(%q, %t2)\n%b = aten.mul.Tensor(%b0, %by)"})
    assert isinstance(found, JoinedScores)
    assert [len(part.factors) for part in found.parts] == [0, 1]
    assert found.factors == ()
    both = {
        "%a = aten.matmul(%q, %t1)": "%a0 = aten.matmul(%q, %t1)\n%a = aten.mul.Tensor(%a0, %heat)",
        _B: "%b0 = aten.matmul(%q, %t2)\n%b = aten.mul.Tensor(%b0, %heat)",
    }
    found = _scores(both)
    assert isinstance(found, JoinedScores)
    assert len(found.factors) == 1
    assert [part.factors for part in found.parts] == [(), ()]


REFUSED: dict[str, tuple[Changes, Refusal]] = {
    "another query": ({_B: "%b = aten.matmul(%q2, %t2)"}, Refusal.JOINED_QUERIES),
    "the same query in another order": (
        {_B: "%qf = aten.reshape(%q) {shape = [2, 4, 3, 8]}\n%qp = aten.permute(%qf) {dims = "
         "[0, 2, 1, 3]}\n%b = aten.matmul(%qp, %t2)"},
        Refusal.JOINED_QUERIES,
    ),
    "other caps": (
        {_B: "%b0 = aten.matmul(%q, %t2)\n%b1 = aten.div.Scalar(%b0) {other = 30.0}\n"
         "%b2 = aten.tanh(%b1)\n%b = aten.mul.Scalar(%b2) {other = 30.0}"},
        Refusal.JOINED_CAPS,
    ),
    "a temperature of the queries for one part": (
        {_B: "%b0 = aten.matmul(%q, %t2)\n%b = aten.mul.Tensor(%b0, %heat)"},
        Refusal.JOINED_FACTORS,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "refusal"), REFUSED.values(), ids=REFUSED)
def test_what_no_one_product_gives_is_refused(changes: Changes, refusal: Refusal) -> None:
    found = _scores(changes)
    assert isinstance(found, Declined)
    assert found.code == refusal.at(found.node).code


@pytest.mark.parametrize(
    "changes",
    [
        {"aten.cat(%a, %b)": "aten.cat(%a, %bias2)",
         "%y =": "%bias2 = aten.expand(%bias) {size = [2, 3, 4, 7]}\n%y ="},  # no product
        {"aten.cat(%a, %b) {dim = 3}": "aten.cat(%a) {dim = 3}"},  # one part alone
    ],
)  # fmt: skip
def test_what_isnt_joined_scores_is_none(changes: Changes) -> None:
    assert not isinstance(_scores(changes), JoinedScores)


_Z, _ADD = "%z = aten.matmul(%b, %v2)", "%y = aten.add.Tensor(%x, %z)"
SPLIT: dict[str, tuple[Changes, list[str]]] = {
    "two": ({}, ["v1", "v2"]),
    "added the other way": ({_ADD: "%y = aten.add.Tensor(%z, %x)"}, ["v1", "v2"]),
    "by one split": (
        {
            "%a = aten.slice.Tensor(%p) {dim = 3, start = 0, end = 5}\n": "",
            "%b = aten.slice.Tensor(%p) {dim = 3, start = 5, end = 12}": "%a, %b = "
            "aten.split_with_sizes(%p) {split_sizes = [5, 7], dim = -1}",
        },
        ["v1", "v2"],
    ),
    "from the end": ({"start = 5, end = 12": "start = -7, end = 12"}, ["v1", "v2"]),
    "shared by rows and heads": ({_Z: "%z = aten.matmul(%b, %shared)"}, ["v1", "shared"]),
    "a part of one place": (
        {
            "start = 5, end = 12": "start = 5, end = 11",
            _Z: "%c = aten.slice.Tensor(%p) {dim = 3, start = 11, end = 12}\n"
            "%one = aten.mul.Tensor(%c, %last)\n%z0 = aten.matmul(%b, %v6)\n"
            "%z = aten.add.Tensor(%z0, %one)",
        },
        ["v1", "v6", "last"],
    ),
}
OTHER_WEIGHTS: dict[str, Changes] = {
    "a place that is left out": {"start = 0, end = 5": "start = 0, end = 4", "%v1 : f32[2, 3, 5":
                                 "%v1 : f32[2, 3, 4"},
    "a place that is taken twice": {"start = 5, end = 12": "start = 4, end = 11"},
    "the end that is left out": {"start = 5, end = 12": "start = 5, end = 11",
                                 "%b, %v2": "%b, %v6"},
    "one part twice": {_Z: "%z = aten.matmul(%a, %v5)"},
    "every second place": {"%b = aten.slice.Tensor(%p) {dim = 3, start = 5, end = 12}":
                           "%b = aten.slice.Tensor(%p) {dim = 3, start = 0, end = 12, step = 2}",
                           "%b, %v2": "%b, %v6"},
    "other weights": {"aten.slice.Tensor(%p) {dim = 3, start = 5": "aten.slice.Tensor(%other) "
                      "{dim = 3, start = 5"},
    "a difference": {_ADD: "%y = aten.sub.Tensor(%x, %z)"},
    "a factor of one part": {_ADD: "%y = aten.add.Tensor(%x, %z) {alpha = 2}"},
    "a number for one part": {_Z: "%z0 = aten.matmul(%b, %v2)\n"
                              "%z = aten.mul.Scalar(%z0) {other = 0.5}"},
    "one part has a result more": {_ADD: "%w = aten.add.Tensor(%x, %z)\n"
                                   "%y = aten.add.Tensor(%w, %last)"},
    "rows that change places": {"%b = aten.slice.Tensor(%p)": "%r = aten.flip(%p) {dims = [0]}\n"
                                "%b = aten.slice.Tensor(%r)"},
    "heads that change places": {_Z: "%r = aten.reshape(%b) {shape = [3, 2, 4, 7]}\n"
                                 "%r2 = aten.permute(%r) {dims = [1, 0, 2, 3]}\n"
                                 "%z = aten.matmul(%r2, %v2)"},
    "half precision": {"%z =": "%z0 =", _ADD: "%h = aten._to_copy(%z0) {dtype = f16}\n"
                       "%z = aten._to_copy(%h) {dtype = f32}\n%y = aten.add.Tensor(%x, %z)"},
}  # fmt: skip


@pytest.mark.parametrize(("changes", "names"), SPLIT.values(), ids=SPLIT)
def test_parts_that_are_all_of_the_weights_are_one_product(
    changes: Changes, names: list[str]
) -> None:
    found = _weights(changes)
    assert found is not None
    assert (found.weights.name, found.dim) == ("p", 3)
    assert [part.operand.value.name for part in found.parts] == names
    assert sum(part.size for part in found.parts) == 12


@pytest.mark.parametrize("changes", OTHER_WEIGHTS.values(), ids=OTHER_WEIGHTS)
def test_parts_that_are_not_are_none(changes: Changes) -> None:
    assert _weights(changes) is None


@pytest.mark.parametrize(("second", "is_read"), [("n", True), ("n - 1", False)])
def test_open_sizes_follow_one_another(second: str, is_read: bool) -> None:
    graph = parse(
        "graph @main {\n  dim n = 4 in 1..\n  dim m = 3 in 1..\n  input %p : f32[2, n + m]\n"
        "  input %v : f32[n, 6]\n  input %w : f32[m, 6]\n"
        "  %a = aten.slice.Tensor(%p) {dim = 1, start = 0, end = n}\n"
        f"  %b = aten.slice.Tensor(%p) {{dim = 1, start = {second}, end = {second} + m}}\n"
        "  %x = aten.matmul(%a, %v)\n  %z = aten.matmul(%b, %w)\n"
        "  %y = aten.add.Tensor(%x, %z)\n  return %y\n}"
    )
    node = graph.outputs[0].producer
    assert node is not None
    assert (read_split_weights(node) is not None) == is_read
