"""Distributions are traced without a look at the values of their parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Dirichlet, Distribution, Independent, Normal
from torch.export import Dim

from attngraph import optimize


class Model(nn.Module):
    def __init__(self, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.of = nn.Linear(8, 6), of

    def forward(self, x: Tensor) -> Tensor:
        return self.of(self.linear(x))


def _entropy(logits: Tensor) -> Tensor:
    return Categorical(logits=logits).entropy()


def _checked(logits: Tensor) -> Tensor:
    return Categorical(logits=logits, validate_args=True).probs


def _likelihood(x: Tensor) -> Tensor:
    mean, scale = x.chunk(2, -1)
    return Independent(Normal(mean, nn.functional.softplus(scale)), 1).log_prob(mean + 1)


def _mean(x: Tensor) -> Tensor:
    return Dirichlet(nn.functional.softplus(x) + 0.1).mean


@pytest.mark.parametrize("of", [_entropy, _checked, _likelihood, _mean])
def test_a_distribution_of_what_the_model_computes_is_compiled(
    of: Callable[[Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    report = optimize(
        Model(of).eval(), (torch.randn(3, 8),), dynamic_shapes=({0: Dim("batch")},)
    ).report
    assert report.parity is not None
    assert report.parity.passed


def test_distributions_check_their_values_again_after_a_trace() -> None:
    before = Distribution.__init__
    optimize(Model(_entropy).eval(), (torch.randn(3, 8),))
    assert Distribution.__init__ is before
    with pytest.raises(ValueError, match="Expected parameter probs"):
        # torch.compile turns the default off in its whole process
        Categorical(probs=torch.tensor([-1.0, 2.0]), validate_args=True)
