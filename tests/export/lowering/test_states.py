"""Short convolutions run on the operator that is fastest for their number of places."""

from __future__ import annotations

import pytest

from tests.export.lowered import check, op_types

_SIZES = [{"batch": 2, "seq": seq, "keys": 1} for seq in (1, 2, 8, 9, 20)]


def _conv(length: str, past: bool, attrs: str = "") -> list[str]:
    operands = ", none, %s" if past else ""
    state = "\n  input %s : f32[batch, 8, 3]" if past else ""
    model = check(
        f"""
  input %x : f32[batch, 8, {length}]
  input %w : f32[8, 1, 4]{state}
  %y, %next = attn.causal_conv(%x, %w{operands}) {{activation = "silu"{attrs}}}
  return %y, %next""",
        sizes=_SIZES,
    )
    return op_types(model)


def test_few_places_are_one_operator() -> None:
    assert _conv("1", True) == ["CausalConvWithState"]
    assert _conv("8", False) == ["CausalConvWithState"]


def test_many_places_are_a_convolution_with_zeros_before_it() -> None:
    found = _conv("9", False)
    assert "CausalConvWithState" not in found
    assert "Conv" in found


@pytest.mark.parametrize("past", [False, True])
def test_a_dynamic_number_of_places(past: bool) -> None:
    """Without a state it is a prompt; with one it may be a step, and a run decides."""
    assert ("If" in _conv("seq", past)) == past
