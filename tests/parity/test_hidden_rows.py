"""A row whose keys are all hidden is what eager makes of it, whatever hides them.

The samples hide nothing, so no check of the compiler sees such a row: that the result is right
follows from the formulas alone.
"""

from __future__ import annotations

import pytest
import torch

from attngraph.compiler import optimize
from tests.parity.hidden_rows import Case, cases, dynamic_shapes, few, hidden, sample

# Logits of a few units next to a fill of 1e4 keep 10 bits behind the point: 5e-4, relative.
_ROUNDING = {"rtol": 2e-3, "atol": 2e-4}
_STRICT = {"rtol": 1e-4, "atol": 1e-5}


def _check(case: Case, *, exact: bool = False) -> None:
    module = case.module()
    optimized = optimize(
        module, sample(), dynamic_shapes=dynamic_shapes(), verify="off", exact=exact
    )
    tolerance = _ROUNDING if case.fill == "-1e4" else _STRICT
    for name, inputs in hidden():
        found = optimized.run(inputs)
        for source, ours, eager in zip(case.sources, found, module(*inputs), strict=True):
            same = torch.allclose(torch.as_tensor(ours), eager, equal_nan=True, **tolerance)
            assert same, f"{source}: {name}"


@pytest.mark.parametrize("case", few(), ids=str)
def test_a_hidden_row_is_what_eager_makes_of_it(case: Case) -> None:
    _check(case)


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
@pytest.mark.parametrize("case", cases(), ids=str)
def test_a_hidden_row_is_what_eager_makes_of_it_however_it_is_written(
    case: Case, exact: bool
) -> None:
    _check(case, exact=exact)
