"""Layers of several models at once, by `vmap` over `functional_call`: of any batch, and fused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.func import functional_call, stack_module_state, vmap

from attngraph import optimize

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:An output with one or more elements was resized"),
]


class Ensemble(nn.Module):
    """Three models of one kind, each with weights of its own."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        models = [make().eval() for _ in range(3)]
        for model in models:
            for weight in model.parameters():
                nn.init.normal_(weight, std=0.5)
        stacked, _ = stack_module_state(models)
        self.kind = [copy.deepcopy(models[0])]
        self.names = {name.replace(".", "_"): name for name in stacked}
        self.weights = nn.ParameterDict(
            {name.replace(".", "_"): nn.Parameter(each.detach()) for name, each in stacked.items()}
        )

    def forward(self, x: Tensor) -> Any:
        def one(weights: dict[str, Tensor], x: Tensor) -> Any:
            return functional_call(self.kind[0], weights, (x,))

        own = {self.names[name]: weight for name, weight in self.weights.items()}
        return vmap(one, in_dims=(0, None))(own, x)


class Attends(nn.Module):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(8, 2, batch_first=True)
        self.kwargs = kwargs

    def forward(self, x: Tensor) -> Any:
        found, weights = self.heads(x, x, x, **self.kwargs)
        return found if weights is None else (found, weights)


class Pixels(nn.Module):
    """Layers of images, of which x is one."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(self.first(x[:, None]))
        return found.mean(1)


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.pairs = nn.RMSNorm(8), nn.Bilinear(8, 8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.pairs(self.norm(x), x)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "heads": lambda: Attends(need_weights=False),
    "heads and their weights": Attends,
    "a layer": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    "groups": lambda: Pixels(nn.GroupNorm(2, 4)),
    "instances": lambda: Pixels(nn.InstanceNorm2d(4, affine=True)),
    "instances alone": lambda: Pixels(nn.InstanceNorm2d(4)),
    "a slope": lambda: nn.Sequential(nn.PReLU(), nn.Linear(8, 8)),
    "slopes": lambda: Pixels(nn.PReLU(4)),
    "pairs": Pairs,
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.wide) for name in KINDS])
@pytest.mark.parametrize("is_open", [False, True])
def test_they_are_what_each_computes(name: str, is_open: bool) -> None:
    model = Ensemble(KINDS[name]).eval()
    dims = ({0: Dim("batch", max=8), 1: Dim("length", max=64)},)
    sizes = [(2, 5), (3, 9), (1, 1), (4, 1)] if is_open else [(2, 5)]
    optimized = optimize(model, (torch.randn(2, 5, 8),), dynamic_shapes=dims if is_open else None)
    for batch, length in sizes:
        x = torch.randn(batch, length, 8)
        torch.testing.assert_close(optimized(x), model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_open", [False, True])
def test_their_attentions_are_fused(is_open: bool) -> None:
    model = Ensemble(KINDS["a layer"]).eval()
    dims = ({0: Dim("batch", max=8), 1: Dim("length", max=64)},)
    x = torch.randn(2, 5, 8)
    optimized = optimize(model, (x,), dynamic_shapes=dims if is_open else None)
    assert [site.status for site in optimized.report.sites] == ["fused"]
    torch.testing.assert_close(optimized(x), model(x), atol=1e-5, rtol=1e-5)
