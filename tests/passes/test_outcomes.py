"""A rewrite stands on what was seen to be equal: what nothing could tell apart is left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attngraph.ir import Builder, Graph, format_graph, parse
from attngraph.passes import run
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.evidence import Evidence
from attngraph.passes.rewriting.findings import findings_of, recorded, tally_of
from attngraph.passes.rewriting.outcomes import Different, Equal, NotEvaluated, Outcome, Tally
from attngraph.passes.weights import merge_projections
from tests.passes.test_checked import SIBLINGS, graph_of

WITHOUT_DATA = f"graph @main {{\n  dim batch = 3 in 1..\n  dim seq = 5 in 1..64{SIBLINGS}\n}}\n"


def _negated(body: str) -> tuple[Graph, Outcome]:
    """A graph, and how its result compares with the same one negated twice."""
    graph = graph_of(body)
    (old,) = graph.outputs
    build = Builder(graph)
    return graph, Evidence(graph).compare([(old, build("aten.neg", build("aten.neg", old)))], [])


@pytest.mark.parametrize(
    "body",
    [
        # The index is past the table's end.
        """
  input %x : f32[batch, 4]
  %i = aten.full() {size = [2], fill_value = 9, dtype = i64}
  %y = aten.index_select(%x, %i) {dim = 1}
  return %y""",
        # NaN, whatever x is.
        """
  input %x : f32[batch, 4]
  %a = aten.abs(%x)
  %b = aten.add.Scalar(%a) {other = 1.0}
  %c = aten.neg(%b)
  %y = aten.log(%c)
  return %y""",
        # No element.
        """
  input %x : f32[batch, 0]
  %y = aten.abs(%x)
  return %y""",
    ],
)
def test_a_form_that_never_gives_a_number_is_not_evaluated(body: str) -> None:
    _, outcome = _negated(body)
    assert isinstance(outcome, NotEvaluated)


def test_a_rewrite_that_is_not_evaluated_is_left_out_and_told() -> None:
    graph = graph_of("""
  input %x : f32[batch, 4]
  %i = aten.full() {size = [2], fill_value = 9, dtype = i64}
  %y = aten.index_select(%x, %i) {dim = 1}
  return %y""")
    before, (old,) = format_graph(graph), graph.outputs
    checked = Checked(graph, "some-pass")
    with recorded(graph) as found:
        new = Builder(graph)("aten.abs", old)
        assert not checked.replace([(old, new)])
    assert found.tally == Tally(not_evaluated=1)
    assert format_graph(graph) == before
    (remark,) = checked.remarks
    assert (remark.status, remark.code) == ("note", "not-evaluated")


def test_a_proof_stands_where_nothing_can_be_evaluated_but_not_against_what_is() -> None:
    for rows, name, expected in [(9, "aten.abs", Tally(by_proof=1)), (0, "aten.neg", None)]:
        graph = graph_of(f"""
  input %x : f32[batch, 4]
  %i = aten.full() {{size = [2], fill_value = {rows}, dtype = i64}}
  %y = aten.index_select(%x, %i) {{dim = 1}}
  return %y""")
        checked = Checked(graph, "some-pass")
        (old,) = graph.outputs
        with recorded(graph) as found:
            if expected is None:
                with pytest.raises(AssertionError, match="some-pass made something else"):
                    checked.replace([(old, Builder(graph)(name, old))], proved=True)
            else:
                assert checked.replace([(old, Builder(graph)(name, old))], proved=True)
                assert found.tally == expected


def test_weights_without_data_are_merged_as_drawn() -> None:
    graph = parse(WITHOUT_DATA)
    (result,) = run(graph, "merge-projections")
    assert "aten.split_with_sizes" in {node.op for node in graph}
    assert result.tally == Tally(by_evaluation=1)


@pytest.mark.defect
def test_weights_without_data_that_are_merged_wrongly_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stacked = merge_projections.stacked

    def reversed_weights(checked: Checked, weights: Any, rows: Any) -> Any:
        return stacked(checked, weights[::-1], rows[::-1])

    monkeypatch.setattr(merge_projections, "stacked", reversed_weights)
    graph = parse(WITHOUT_DATA)
    before = format_graph(graph)
    (result,) = run(graph, "merge-projections")
    assert [remark.code for remark in result.remarks] == ["unequal"]
    assert result.tally == Tally(different=1)
    assert format_graph(graph) == before


def test_a_new_constant_that_nothing_derives_is_not_evaluated() -> None:
    graph = parse(WITHOUT_DATA)
    (linear, *_) = graph
    kind = graph.constants["one"].tensor_type
    other = graph.add_constant("other", None, kind)
    new = Builder(graph)("aten.linear", linear.inputs[0], other, linear.inputs[2])
    outcome = Evidence(graph).compare([(linear.output, new)], [])
    assert isinstance(outcome, NotEvaluated)
    assert "%other" in outcome.reason


def test_what_a_loop_and_its_graph_count_is_one_tally() -> None:
    graph = graph_of(SIBLINGS)
    with recorded(graph) as outer:
        tally_of(graph).count(Equal())
        with recorded(graph) as inner:
            tally_of(graph).count(Different("it is"))
        findings_of(graph).add(inner, "loop")
    assert outer.tally == Tally(by_evaluation=1, different=1)
    assert outer.tally.left_out == 1
    tally_of(graph).count(Equal())
    assert outer.tally.by_evaluation == 1


def test_the_dtype_in_which_constants_are_drawn_is_the_sources() -> None:
    graph = parse(WITHOUT_DATA)
    checked = Checked(graph, "some-pass")
    one, bias = graph.constants["one"], graph.constants["one.bias"]
    both = checked.derive("both", one.tensor_type, [one], lambda data: data[0] * 2)
    linear = next(node for node in graph if node.op == "aten.linear")
    build = Builder(graph, linear)
    half = build("aten.mul.Scalar", linear.inputs[0], other=0.5)
    assert checked.replace([(linear.output, build("aten.linear", half, both, bias))])
    assert both.data is None
    assert both.dtype == torch.float32
