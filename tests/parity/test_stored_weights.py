"""New weights keep their digits in the dtype that they are stored in."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.compiling.compiler import Model, analyse
from attngraph.export.formats import Precision
from attngraph.ir.traits import SCALE
from attngraph.options import Options
from tests.models.kit import states

pytestmark = pytest.mark.wide


class Faint(nn.Module):
    """A product whose result is scaled down twice: the two factors in one weight underflow."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.up(x) * self.scale * self.scale
        return scaled


@pytest.mark.parametrize(("scale", "left"), [(1e-3, 1), (1e-2, 0)])
def test_no_factor_goes_into_weights_that_halves_do_not_hold(scale: float, left: int) -> None:
    """At 1e-6 a weight of 1 has one digit in float16; at 1e-4 columns and rows keep theirs."""
    torch.manual_seed(0)
    module, x = Faint(scale).eval(), states(2, 16)
    with torch.no_grad():
        module.up.weight.normal_()

    def factors(given: nn.Module, seen: Tensor, precision: Precision | None = None) -> int:
        options = Options(precision=precision)
        graph = analyse(Model(given, None, (seen,), {}, None), options)[0]
        return sum(node.op in SCALE for node in graph)

    assert factors(module, x) == 0
    assert factors(module, x, "fp16") == left
    half = module.half()
    assert factors(half, x.half()) == left
    found, large = attngraph.optimize(half, (x.half(),)), x.half() * 2e4
    exact = copy.deepcopy(half).double()(large.double()).detach()
    off = (found(large).double() - exact).abs().max() / exact.abs().max()
    assert float(off) < 4 * torch.finfo(torch.float16).eps
