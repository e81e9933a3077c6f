"""Sequences that may be empty at some sizes: kernels refuse what eager gives zeros for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attngraph

pytestmark = pytest.mark.wide


class Attends(nn.Module):
    def __init__(self, cut: Callable[[Tensor], tuple[Tensor, Tensor]], *, fused: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.cut, self.fused = cut, fused

    def forward(self, x: Tensor) -> Tensor:
        x, y = self.cut(x)
        q, k, v = self.query(x), self.key(y), self.value(y)
        if self.fused:
            return sdpa(q[:, None], k[:, None], v[:, None])[:, 0]
        return (q @ k.mT / 4).softmax(-1) @ v  # type: ignore[no-any-return]


CUTS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "keys": lambda x: (x, x[:, 1:]),
    "queries": lambda x: (x[:, 1:], x),
    "both": lambda x: (x[:, 1:], x[:, 1:]),
    "half": lambda x: (x, x[:, : x.shape[1] // 2]),
}
SLOW = ("both", "half")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CUTS]
)
@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_queries_or_no_keys(name: str, fused: bool) -> None:
    torch.manual_seed(0)
    module = Attends(CUTS[name], fused=fused).eval()
    shapes = ({0: Dim("batch"), 1: Dim("seq")},)
    optimized = attngraph.optimize(module, (torch.randn(2, 7, 16),), dynamic_shapes=shapes)
    assert [site.status for site in optimized.report.sites] == ["fused"]
    with torch.no_grad():
        for batch, seq in ((1, 1), (2, 2), (3, 9)):
            x = torch.randn(batch, seq, 16)
            torch.testing.assert_close(optimized(x), module(x))
