"""The harness itself: it catches a changed meaning, and its numbers depend on names only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attngraph.errors import IRError
from attngraph.ir import Graph, parse
from attngraph.passes.canonical.constant_fold import ConstantFold
from attngraph.passes.canonical.layout_forms import copy
from attngraph.passes.rewriting.rewriter import Replacement, Rewriter, rule
from tests.passes import fixtures

HEAD = """# claim: nothing happens
# pass: constant-fold{max_bytes = 8}
# range: ids = 3..7
graph @main {
  dim seq = 5 in 1..
  dim other = 5 in 1..6
  input %ids : i64[seq, other]
  input %x : f16[seq, 4]
  parameter %w : f16[5, 4]
"""
FILL = torch.finfo(torch.float16).min


def _graph(*lines: str) -> Graph:
    return fixtures.load(HEAD + "\n".join(lines) + "\n}")


@pytest.fixture
def fixture(tmp_path: Path) -> fixtures.Fixture:
    path = tmp_path / "constant-fold" / "case.ir"
    path.parent.mkdir()
    path.write_text(f"{HEAD}  return %x\n}}\n{fixtures.SEPARATOR}")
    return fixtures.read(path)


def test_options_and_ranges_are_read(fixture: fixtures.Fixture) -> None:
    assert fixture.item == ConstantFold(max_bytes=8)
    assert fixture.ranges == {"ids": (3, 7)}
    fixtures.write(fixture, "graph @main {\n}\n")
    assert fixtures.read(fixture.path).expected == "graph @main {\n}\n"
    assert fixtures.read(fixture.path).before == fixture.before


def test_a_fixture_states_its_claim(fixture: fixtures.Fixture) -> None:
    fixture.path.write_text("graph @main {\n}\n")
    with pytest.raises(ValueError, match="needs a line '# claim"):
        fixtures.read(fixture.path)


def test_sizes_differ_and_stay_in_range(fixture: fixtures.Fixture) -> None:
    graph = _graph("return %x")
    assert fixtures.sizes_of(graph) == [{"seq": 5, "other": 5}, {"seq": 1, "other": 2}]
    ids, x = fixtures.inputs_for(graph, {"seq": 50, "other": 2}, fixture, special=True)
    assert set(ids.reshape(-1).tolist()) == {3, 4, 5, 6}
    assert x.isnan().any()
    assert x.isinf().any()
    again = fixtures.inputs_for(graph, {"seq": 50, "other": 2}, fixture, special=True)
    assert torch.equal(again[1].nan_to_num(), x.nan_to_num())


def test_widening_reaches_weights_casts_and_fills() -> None:
    graph = _graph(
        "constant %c = [0.5] : f16[1]",
        "%a = aten.masked_fill.Scalar(%x, %ids) {value = " + repr(FILL) + "} : f16[seq, 4]",
        "%b = aten._to_copy(%a) {dtype = f32} : f32[seq, 4]",
        "return %b, %c",
    )
    wide = fixtures.widened(graph)
    fill, cast = wide
    assert fill.attrs["value"] == torch.finfo(torch.float64).min
    assert cast.attrs["dtype"] == torch.float64
    weight = wide.constants["w"].data
    assert weight is not None
    assert weight.dtype == torch.float64
    assert wide.constants["c"].dtype == torch.float64


def test_a_changed_meaning_is_caught(fixture: fixtures.Fixture) -> None:
    before = _graph("%a = aten.mul.Scalar(%x) {other = 3.0}", "return %a")
    after = _graph("%a = aten.mul.Scalar(%x) {other = 3.0000000001}", "return %a")
    with pytest.raises(AssertionError, match="not close"):
        fixtures.assert_close_in_float64(fixture, before, after)
    after = _graph("%b = aten.add.Tensor(%x, %x)", "%a = aten.add.Tensor(%b, %x)", "return %a")
    fixtures.assert_close_in_float64(fixture, before, after)


def test_an_exact_pass_may_not_touch_the_sign_of_a_zero(fixture: fixtures.Fixture) -> None:
    before = _graph("%a = aten.add.Scalar(%x) {other = 0.0}", "return %a")
    with pytest.raises(AssertionError, match="sign of a zero"):
        fixtures.assert_identical(fixture, before, _graph("return %x"))
    fixtures.assert_identical(fixture, before, before)


def test_a_rule_that_never_settles_is_named() -> None:
    @rule("aten.relu")
    def again(rewriter: Rewriter, node: object) -> Replacement:
        (here,) = rewriter.graph
        return rewriter.emit("aten.relu", here.inputs, {}, at=here)

    graph = parse("graph @main {\n input %x : f32[2]\n %a = aten.relu(%x)\n return %a\n}")
    with pytest.raises(IRError, match="rule again never settles"):
        Rewriter(graph, [copy, again]).run()


def test_numbers_are_printed_to_twelve_digits_and_fills_in_full() -> None:
    graph = _graph(
        "constant %c.0.1234567890123456 = [0.3333333333333333, 1e-05] : f64[2]",
        "%a = aten.add.Scalar(%x) {other = " + repr(FILL) + "}",
        f"%b = aten.add.Scalar(%a) {{other = {torch.finfo(torch.float32).min}}}",
        "return %b",
    )
    text = fixtures.result_text(graph, [], loc=False)
    assert "%c.0.1234567890123456 = [0.333333333333, 1e-05]" in text
    assert "other = -65504.0}" in text
    assert "other = -3.4028234663852886e+38}" in text


def test_a_number_may_be_one_off_in_its_twelfth_digit_and_nothing_else_may() -> None:
    text = "%a = op(%x.0.5) {scale = 0.333333333333, eps = 1e-05}"
    assert fixtures.agree(text.replace("3333,", "3334,"), text)
    assert not fixtures.agree(text.replace("33333,", "33343,"), text)
    assert not fixtures.agree(text.replace("1e-05", "1e-06"), text)
    assert not fixtures.agree(text.replace("%x", "%y"), text)
    assert not fixtures.agree(text.replace("%x.0.5", "%x.0.50000000000001"), text)
    assert not fixtures.agree(text.replace("333, eps", "333, eps = 1.0, eps"), text)
