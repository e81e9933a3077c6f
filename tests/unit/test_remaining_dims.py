"""What is left of the dims that a trace narrows."""

from __future__ import annotations

from torch.export import Dim

from attngraph.frontend.tracing.remaining_dims import narrowed

SUGGESTED = """Constraints violated (length)!

Suggested fixes:
  length = Dim('length', min={}, max=28)
"""


def test_a_range_that_ends_in_one_size_is_no_dim() -> None:
    shapes = {"x": {1: Dim("length", min=25, max=28)}}
    some = narrowed(SUGGESTED.format(27), (), shapes, starts=True)
    assert (some["x"][1].min, some["x"][1].max) == (27, 28)
    assert narrowed(SUGGESTED.format(28), (), shapes, starts=True) is None
