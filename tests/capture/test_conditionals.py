"""`torch.cond`: both sides are computed, and one is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.export import Dim

import attngraph
from attngraph.errors import CaptureError

X = torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(0))
AUTO = {0: Dim.AUTO, 1: Dim.AUTO}


class Two(nn.Module):
    """What a function makes of the module and x (B, S, 8)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def _attends(self: Two, x: Tensor) -> Tensor:
    def causal(x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(self.q(x), x, x, is_causal=True)

    def whole(x: Tensor) -> Tensor:
        return (self.k(x) @ x.mT).softmax(-1) @ x

    found: Tensor = torch.cond(x.sum() > 0, causal, whole, (x,))
    return found


def _pairs(self: Two, x: Tensor) -> Any:
    """A condition of one element, which is no bool; a side that writes into its own tensor."""

    def first(x: Tensor) -> Any:
        return {"a": self.q(x), "b": x.sum()}

    def second(x: Tensor) -> Any:
        y = x * 1
        y.masked_fill_(y > 0, 1.0)
        return {"a": self.k(y), "b": y.mean()}

    return torch.cond((x.sum() > 0).long().reshape(1), first, second, (x,))


def _nan(self: Two, x: Tensor) -> Tensor:
    found: Tensor = torch.cond(x.min() > 0, lambda x: x.log(), lambda x: self.q(x), (x,))
    return found


def _sizes(self: Two, x: Tensor) -> Tensor:
    asked: Any = (x.shape[1] > 4) & (x.shape[1] != 9)
    found: Tensor = torch.cond(asked, lambda x: self.q(x), lambda x: self.k(x), (x,))
    return found


def _nested(self: Two, x: Tensor) -> Tensor:
    """Each side has a constant of its own."""

    def inner(x: Tensor) -> Tensor:
        side: Tensor = torch.cond(
            x.mean() > 0.1, lambda x: x + torch.tensor([1.0, 2.0] * 4), lambda x: self.q(x), (x,)
        )
        return side

    found: Tensor = torch.cond(x.sum() > 0, inner, lambda x: x * torch.tensor(3.0), (x,))
    return found


def _in_a_loop(self: Two, x: Tensor) -> Tensor:
    def step(state: Tensor, x: Tensor) -> Any:
        state = torch.cond(
            x.sum() > 0, lambda s, x: s * 0.5 + torch.tensor([1.0] * 8) + x, torch.sub, (state, x)
        )
        return state, state.clone()

    found: Tensor = scan(step, x[:, 0] * 0, x, dim=1)[1]
    return found


@pytest.mark.parametrize("function", [_attends, _pairs, _nan, _sizes, _nested, _in_a_loop])
def test_the_side_that_is_taken_shows(function: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    module = Two(function).eval()
    optimized = attngraph.optimize(module, (X,), dynamic_shapes=(AUTO,))
    sites = [site.status for site in optimized.report.sites]
    assert sites == ["fused"] * (2 if function is _attends else 0)
    (note,) = (note for note in optimized.report.notes if "Both sides of torch.cond" in note)
    assert "test_conditionals.py" in note
    with torch.no_grad():
        for x in (X, -X, X.abs(), -X.abs(), X[:, :4], X.repeat(1, 2, 1)[:1, :9]):
            torch.testing.assert_close(optimized(x), module(x))


def test_sides_that_differ_in_dtype_are_refused() -> None:
    def function(self: Two, x: Tensor) -> Tensor:
        found: Tensor = torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x.long(), (x,))
        return found

    with pytest.raises(CaptureError, match="cond") as refused:
        attngraph.optimize(Two(function).eval(), (X,))
    assert "\n" not in str(refused.value)
