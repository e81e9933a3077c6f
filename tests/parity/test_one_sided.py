"""Activations that lie on one side of 0, as a GELU's, take all 255 steps of 8 bits."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.analysis.values.intervals import Intervals
from attngraph.dialect.quantized import row_steps
from attngraph.export.precision.quantize import is_one_sided
from attngraph.frontend.model import Model, trace
from attngraph.optimized import Optimized

WIDTH = 64
EPS = torch.finfo(torch.float32).eps


class Feed(nn.Module):
    """Rows as they are given, through an activation into a linear."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.down = nn.Linear(WIDTH, 48)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "gated":
            hidden = nn.functional.silu(x) * x
        else:
            hidden = getattr(torch, self.kind, getattr(nn.functional, self.kind, None))(x)
        result: Tensor = self.down(hidden)
        return result


def given(*sizes: int) -> Tensor:
    return torch.randn(*sizes, WIDTH, generator=torch.Generator().manual_seed(3))


@functools.cache
def compiled(kind: str, **options: Any) -> Optimized:
    torch.manual_seed(0)
    shapes = ({0: Dim("batch", max=8), 1: Dim("seq", max=16)},)
    return attngraph.optimize(
        Feed(kind).eval(),
        (given(2, 5),),
        dynamic_shapes=shapes,
        weights="int8",
        activations="int8",
        **options,
    )


def exact(model: Optimized, x: Tensor, *, one_sided: bool) -> Tensor:
    """ReLU and the linear by the formula in float64, with the weight that the file stores.

    Its codes have 7 bits on a CPU whose products of 8 would overflow.
    """
    (linear,) = (node for node in model.graph if node.op == "attn.int8_linear")
    codes, scales, bias = (value.data for value in linear.inputs[1:4] if value is not None)
    assert codes is not None
    assert scales is not None
    assert bias is not None
    multiples, step = row_steps(x.double().relu(), one_sided=one_sided)
    stored = codes.double() * scales.double().unsqueeze(-1)
    return multiples.round() * step @ stored.T + bias.double()


KINDS = {
    **dict.fromkeys(("relu", "gelu", "silu", "sigmoid", "hardswish"), True),
    **dict.fromkeys(("tanh", "gated", "sin"), False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_on_one_side_is_told_by_what_makes_it(kind: str) -> None:
    graph = trace(Model(Feed(kind).eval(), None, (given(2, 5),), {}, None), {}).graph
    (linear,) = (node for node in graph if node.op == "aten.linear")
    x = linear.inputs[0]
    assert x is not None
    assert is_one_sided(x, Intervals()) == KINDS[kind]


@pytest.mark.parametrize("kind", ["gelu", "quick"])
def test_what_the_passes_made_of_an_activation_counts(kind: str) -> None:
    """A bias and a GELU are one operator by then, as x · sigmoid(1.702 x) is."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x)
            active = hidden * (hidden * 1.702).sigmoid() if kind == "quick" else None
            result: Tensor = self.down(nn.functional.gelu(hidden) if active is None else active)
            return result

    model = attngraph.optimize(Block().eval(), (given(2, 5),), weights="int8", activations="int8")
    up, down = (node for node in model.graph if node.op == "attn.int8_linear")
    source = down.inputs[0]
    assert source is not None
    assert source.producer is not None
    assert source.producer.op == {"gelu": "attn.bias_gelu", "quick": "attn.quick_gelu"}[kind]
    assert down.attrs.get("one_sided")
    assert not up.attrs.get("one_sided")


def test_rows_take_all_steps_of_their_range_with_half_of_the_error() -> None:
    x = given(2, 7)
    model = compiled("relu", verify="off")  # else the sample chooses the codes
    found = model(x).double()
    near = exact(model, x, one_sided=True)
    far = exact(model, x, one_sided=False)
    torch.manual_seed(0)
    with torch.no_grad():
        truth = Feed("relu").double()(x.double())
    assert float((found - near).abs().max()) <= 64 * EPS * float(near.abs().max())
    assert float((far - near).abs().max()) > 1e-3
    multiples, step = row_steps(x.relu(), one_sided=True)
    assert int(multiples.round().max()) == 255
    assert float((multiples.round() * step - x.relu()).abs().max()) <= float(step.max()) / 2 + EPS
    rounding = row_steps(x.double().relu())[1] / row_steps(x.double().relu(), one_sided=True)[1]
    assert bool((rounding > 2).all())
    assert (found - truth).norm() < truth.norm() * 0.01


@pytest.mark.parametrize("kind", ["gelu", "relu"])
def test_rows_that_are_no_ordinary_rows(kind: str) -> None:
    """Of zeros, of one value, with one large element, and with what isn't finite."""
    torch.manual_seed(0)
    module = Feed(kind).eval()
    x = given(2, 6)
    x[0, 0], x[0, 1], x[0, 2], x[0, 3] = 0.0, 3.0, -0.7, -40.0
    x[1, 0, 5] = 1e4
    plain = compiled(kind)(x)
    with torch.no_grad():
        truth = module(x)
        given_to = getattr(nn.functional, kind)(x).abs()
        weight = module.down.weight.abs()
    # Half a step of each element of x times those of the weight, and the other way round.
    limit = given_to.amax(-1, keepdim=True) * weight.sum(1) + given_to @ weight.amax(1).expand(
        WIDTH, 48
    )
    assert bool(((plain - truth).abs() <= limit * 0.51 / 127 + 1e-6).all())
    for extreme in (torch.nan, torch.inf):
        x[1, 3, 2] = extreme
        found = compiled(kind)(x)
        assert bool(found[1, 3].isnan().all())
        found[1, 3] = plain[1, 3]
        assert torch.equal(found, plain)


@pytest.mark.parametrize("kind", ["gelu", "silu", "hardswish"])
def test_the_least_that_an_activation_gives_is_not_below_its_bound(kind: str) -> None:
    graph = trace(Model(Feed(kind).eval(), None, (given(2, 5),), {}, None), {}).graph
    (linear,) = (node for node in graph if node.op == "aten.linear")
    low, _ = Intervals().of(linear.inputs[0])
    x = torch.linspace(-6, 2, 1 << 16, dtype=torch.float64)
    least = float(getattr(nn.functional, kind)(x).min())
    assert low <= least < low * 0.99
    if kind == "gelu":
        assert low <= float(nn.functional.gelu(x, approximate="tanh").min())


class Normed(nn.Module):
    """A feed-forward part behind a norm, whose rows are NaN as a whole where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 48)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return result


def test_what_is_not_finite_stays_so_behind_a_norm() -> None:
    """No sum over rows looks for NaN there; wherever it stands, its row and no other has it."""
    torch.manual_seed(0)
    module = Normed().eval()
    model = attngraph.optimize(module, (given(5),), weights="int8", activations="int8")
    ops, others = (
        [node.op_type for node in each.model.graph] for each in (model, compiled("gelu"))
    )
    assert "MatMulIntegerToFloat" in ops
    assert "ReduceSum" not in ops
    assert "ReduceSum" in others
    for at in (0, 17, WIDTH - 1):
        x = given(5)
        x[0, at], x[1, at], x[2, at] = torch.nan, torch.inf, -torch.inf
        with torch.no_grad():
            eager = module(x)
        assert eager[:3].isnan().all()
        assert torch.equal(model(x).isfinite(), eager.isfinite())
