"""A model that draws random numbers is refused in a sentence."""

from __future__ import annotations

import pytest

from attngraph.errors import LoweringError
from attngraph.export.lowering.lower import lower
from tests.export.lowered import graph_of


@pytest.mark.parametrize("op", ["rand_like", "randn_like", "bernoulli", "uniform"])
def test_random_numbers_are_refused_with_what_to_do(op: str) -> None:
    graph = graph_of(f"  input %x : f32[batch, 8]\n  %r = aten.{op}(%x)\n  return %r")
    with pytest.raises(LoweringError, match=r"draws random numbers.*input of the model\.$"):
        lower(graph)
