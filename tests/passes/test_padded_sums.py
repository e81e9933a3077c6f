"""A padded residual that is cut off again leaves the tokens of what it is added to."""

from __future__ import annotations

import pytest
import torch

from attngraph.ir import interpret, parse
from attngraph.ir.dims import parse_dim
from attngraph.ir.verifier import verify
from attngraph.passes.attention.padded_sums import cut_padded_sums

_PADDED = "8 * ((seq + 7) // 8)"
_TEXT = """graph @main {
  dim seq = 5 in 1..64
  input %x : f32[2, seq, 4]
  input %y : f32[2, PADDED, 4]
  input %d : f32[4]
  %pad = aten.pad(%x) {pad = [0, 0, BEFORE, AFTER], value = 0.0} : f32[2, PADDED, 4]
  %mul = aten.mul.Tensor(%d, FACTOR) : f32[2, PADDED, 4]
  %add = aten.add.Tensor(%y, TERM) {alpha = ALPHA} : f32[2, PADDED, 4]
  %cut = aten.slice.Tensor(%add) {dim = 1, start = START, end = START + seq} : f32[2, seq, 4]
  return RESULT
}"""


def _text(**changes: str) -> str:
    kept = {
        "AFTER": f"{_PADDED} - seq",
        "BEFORE": "0",
        "FACTOR": "%pad",
        "TERM": "%mul",
        "ALPHA": "1",
        "START": "0",
        "RESULT": "%cut",
    }
    text = _TEXT
    for name, said in {**kept, **changes}.items():
        text = text.replace(name, said)
    return text.replace("PADDED", _PADDED).replace("0 + seq", "seq")


def _ops_after(text: str) -> list[str]:
    graph, before = parse(text), parse(text)
    verify(graph)
    cut_padded_sums(graph, parse_dim("seq"))
    verify(graph)
    for seq in (1, 5, 8, 9):
        x, y, d = torch.randn(2, seq, 4), torch.randn(2, 8 * ((seq + 7) // 8), 4), torch.randn(4)
        found, expected = interpret(graph, [x, y, d]), interpret(before, [x, y, d])
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    return [node.op for node in graph]


@pytest.mark.parametrize("term", ["%mul", "%pad"])
def test_the_padding_is_left_out(term: str) -> None:
    ops = _ops_after(_text(TERM=term))
    assert "aten.pad" not in ops
    assert ops.index("aten.slice.Tensor") < ops.index("aten.add.Tensor")


NEAR_MISSES = {
    "padded in front": {"BEFORE": f"{_PADDED} - seq", "AFTER": "0"},
    "another factor": {"ALPHA": "2"},
    "no padding": {"FACTOR": "%y"},
    "read elsewhere": {"RESULT": "%cut, %add"},
}


@pytest.mark.parametrize("miss", NEAR_MISSES)
def test_any_other_sum_stays(miss: str) -> None:
    ops = _ops_after(_text(**NEAR_MISSES[miss]))
    assert ops[-2:] == ["aten.add.Tensor", "aten.slice.Tensor"]
