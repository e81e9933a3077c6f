"""A trial is told from one whose floats are off by a few roundings of float64."""

from __future__ import annotations

import torch

from attngraph.passes.rewriting.evidence import _NUDGE
from attngraph.passes.rewriting.regions import _nudged


def test_a_nudge_moves_every_float_of_a_trial_and_nothing_else() -> None:
    """In whatever dtype torch makes new tensors: in float32, 1 + 2⁻⁴⁸ is 1."""
    drawn = torch.tensor([1.0, -8.0, 1e14], dtype=torch.float64)
    moved = _nudged(drawn, _NUDGE)
    assert bool((moved != drawn).all())
    assert torch.allclose(moved, drawn, rtol=2 * _NUDGE, atol=0)
    assert torch.equal(_nudged(torch.arange(3), _NUDGE), torch.arange(3))
