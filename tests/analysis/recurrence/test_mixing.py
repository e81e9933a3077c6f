"""Which axis of a value has the tokens."""

from __future__ import annotations

from attngraph.analysis.recurrence.mixing import Runs, Tokens
from attngraph.ir import parse

PADDED = """
  input %x : f32[2, 8, 4]
  parameter %table : f32[5, 4]
  %wide = aten.pad(%table) {pad = [0, 0, 3, 0]} : f32[8, 4]
  %y = aten.add.Tensor(%x, %wide) : f32[2, 8, 4]
  return %y"""


def test_a_table_that_is_padded_to_the_length_has_tokens_where_it_grew() -> None:
    graph = parse(PADDED)
    padded, _ = graph
    assert Tokens(8).axis(padded.outputs[0]) == 0


CONVOLVED = """
  dim n = 40 in 1..
  input %x : f32[2, 1, n]
  parameter %w : f32[4, 1, 10]
  parameter %v : f32[4, 4, 2]
  %a = aten.conv1d(%x, %w, none) {stride = [10]} : f32[2, 4, n // 10]
  %b = aten.conv1d(%a, %v, none) : f32[2, 4, n // 10 - 1]
  %y = aten.cumsum(%b) {dim = 2} : f32[2, 4, n // 10 - 1]
  return %y"""


def test_what_a_convolution_leaves_of_few_tokens_may_be_nothing() -> None:
    graph = parse(CONVOLVED)
    *_, convolved, summed = graph
    runs = Runs(graph, Tokens(graph.inputs[0].shape[2]))
    given = convolved.outputs, [summed]
    assert runs(*given, 7, seed=0)[summed.outputs[0]] is None
    found = runs(*given, 40, seed=0)[summed.outputs[0]]
    assert found is not None
    assert found.shape == (2, 4, 3)
