"""Which axis of a value has the tokens."""

from __future__ import annotations

from attngraph.analysis.recurrence.mixing import Tokens
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
