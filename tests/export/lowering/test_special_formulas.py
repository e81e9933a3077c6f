"""Special functions, as exact as float32 is where eager is, at their poles and far out."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attngraph.export.lowering.lower import lower
from attngraph.frontend.capture import capture
from tests.export.lowered import module, run, session_of

pytestmark = pytest.mark.wide

POLES = [0.0, -0.0, 1.0, 2.0, -1.0, -2.0, -7.0, math.inf, math.nan]
NEAR = [1e-30, -1e-30, 1 + 1e-6, 2 - 1e-6, 0.5, 1.4616321, -0.5, -2.4570246, -3.9999, 30.5]

FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "lgamma": (torch.lgamma, torch.tensor([*POLES, *NEAR, 1e30, 170.0, -55.3])),
    "digamma": (torch.digamma, torch.tensor([*POLES, *NEAR, 1e30, 170.0, -55.3])),
    "erfinv": (
        torch.erfinv,
        torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0, math.nan, 0.85, -0.8501, 1e-30, 1 - 2**-23, 0.3]),
    ),
    "logit": (torch.logit, torch.tensor([0.0, 1.0, 0.5, 0.999, 1e-20, 2.0, math.nan])),
    "logit-clamped": (
        lambda x: torch.logit(x, 0.2),
        torch.tensor([0.0, 1.0, 0.5, math.nan, math.inf, -math.inf]),
    ),
    "angle": (torch.angle, torch.tensor([1.0, -1.0, 0.0, -0.0, math.nan, -math.inf])),
    "lgamma-of-integers": (torch.lgamma, torch.tensor([1, 2, 3, 40, -3])),
    "angle-of-integers": (torch.angle, torch.tensor([1, -2, 0])),
    "angle-of-bools": (torch.angle, torch.tensor([True, False])),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_function(name: str) -> None:
    function, x = FUNCTIONS[name]
    actual = run(session_of(lower(capture(module(function, 1), (x,)).graph)), (x,))[0]
    exact = function(x.double())
    expected = exact.to(torch.get_default_dtype())
    finite = expected.isfinite()
    torch.testing.assert_close(actual[~finite], expected[~finite], equal_nan=True)
    torch.testing.assert_close(actual[finite], expected[finite], rtol=2e-7, atol=1e-38)
