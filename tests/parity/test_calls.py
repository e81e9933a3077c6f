"""The result is called as the model is, and returns what it returns."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import BertConfig, BertModel

from attngraph.compiling.compiler import optimize
from attngraph.errors import UsageError
from attngraph.optimized import Optimized

WIDTH = 8


class Source(NamedTuple):
    tokens: Tensor
    mask: Tensor | None


class Nested(nn.Module):
    """Queries over tokens; inputs and outputs in every kind of container."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: Tensor, source: Source, *, extra: dict[str, Any] | None = None, hops: int = 1
    ) -> dict[str, Any]:
        extra = extra or {}
        for _ in range(hops):
            scores = self.project(x) @ source.tokens.mT
            if source.mask is not None:
                scores = scores.masked_fill(~source.mask[:, None], -1e9)
            x = x + extra.get("gain", 1.0) * (scores.softmax(-1) @ source.tokens)
        return {"x": x, "none": None, "hops": hops, "pair": (source.tokens * 2, [x.mean()])}


def _inputs(batch: int, tokens: int) -> tuple[Tensor, Source]:
    mask = torch.arange(tokens) < torch.arange(1, batch + 1)[:, None]
    return torch.randn(batch, 3, WIDTH), Source(torch.randn(batch, tokens, WIDTH), mask)


@pytest.fixture(scope="module")
def nested() -> tuple[nn.Module, Optimized]:
    torch.manual_seed(0)
    module = Nested().eval()
    batch = Dim("batch", max=16)
    tokens = Dim("tokens", max=64)
    shapes: Any = {
        "x": {0: batch},
        "source": Source({0: batch, 1: tokens}, {0: batch, 1: tokens}),
        "extra": {"gain": None},
        "hops": None,
    }
    kwargs = {"extra": {"gain": torch.tensor(0.5)}, "hops": 2}
    return module, optimize(module, _inputs(3, 5), kwargs=kwargs, dynamic_shapes=shapes)


@pytest.mark.parametrize("by_name", [False, True])
def test_containers_numbers_and_none_are_taken_and_returned(
    nested: tuple[nn.Module, Optimized], by_name: bool
) -> None:
    module, optimized = nested
    x, source = _inputs(2, 7)
    kwargs: dict[str, Any] = {"hops": 2, "extra": {"gain": torch.tensor(0.25)}}
    expected = module(x, source, **kwargs)
    found = optimized(source=source, x=x, **kwargs) if by_name else optimized(x, source, **kwargs)
    torch.testing.assert_close(found, expected)


def test_the_tensors_alone_are_enough(nested: tuple[nn.Module, Optimized]) -> None:
    module, optimized = nested
    x, source = _inputs(2, 4)
    gain = torch.tensor(2.0)
    found = optimized(x, source.tokens, source.mask, gain)
    torch.testing.assert_close(found, module(x, source, extra={"gain": gain}, hops=2))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hops": 3}, "Input 'hops' holds 3 where the model was compiled for 2"),
        ({"extra": None}, "Input 'extra' is nested in another way"),
        ({"extra": {"gain": 0.5}}, "Input 'extra' must be a torch.Tensor, not float"),
        ({"more": 1}, "got an unexpected keyword argument 'more'"),
        ({"source": None}, "Input 'source' is nested in another way"),
    ],
)
def test_a_call_that_the_file_does_not_compute_is_refused(
    nested: tuple[nn.Module, Optimized], change: dict[str, Any], says: str
) -> None:
    x, source = _inputs(2, 4)
    kwargs = {"source": source, "hops": 2, "extra": {"gain": torch.tensor(1.0)}, **change}
    with pytest.raises(UsageError, match=says):
        nested[1](x, **kwargs)


def test_a_default_that_was_not_compiled_is_no_default(nested: tuple[nn.Module, Optimized]) -> None:
    x, source = _inputs(2, 4)
    with pytest.raises(UsageError, match="Input 'hops' holds 1 where the model was compiled for 2"):
        nested[1](x, source, extra={"gain": torch.tensor(1.0)})


class Optional(nn.Module):
    """With two inputs that may be left out."""

    def forward(self, x: Tensor, scale: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        y = x.softmax(-1) @ x.mT
        y = y if scale is None else y * scale
        return y if bias is None else y + bias


def test_a_position_that_was_left_out_is_not_the_next_ones() -> None:
    x, bias = torch.randn(2, 3, 4), torch.randn(2, 3, 3)
    optimized = optimize(Optional(), (x,), kwargs={"bias": bias})
    expected = Optional()(x, bias=bias)
    for found in (optimized(x, bias=bias), optimized(x, None, bias), optimized(bias=bias, x=x)):
        torch.testing.assert_close(found, expected)
    with pytest.raises(UsageError, match="one of the tensors is 'scale', which was not given"):
        optimized(x, bias)


def test_a_model_of_transformers_returns_its_own_class() -> None:
    config = BertConfig(
        hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16
    )
    module = BertModel(config).eval()
    ids, mask = torch.randint(0, 99, (2, 6)), torch.ones(2, 6, dtype=torch.int64)
    optimized = optimize(module, (), kwargs={"input_ids": ids, "attention_mask": mask})
    expected, found = module(ids, mask), optimized(input_ids=ids, attention_mask=mask)
    assert type(found) is type(expected)
    assert list(found) == list(expected)
    torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state)


class Sized(nn.Module):
    """A number among the outputs: of sizes, of values, and one that never changes."""

    def forward(self, x: Tensor) -> tuple[Tensor, int, int, float]:
        return x.softmax(-1) @ x.mT, 2 * x.shape[1], 7, x.sum().item()


def test_numbers_that_a_model_returns_are_numbers() -> None:
    shapes = ({0: Dim("batch", max=16), 1: Dim("tokens", max=64)},)
    optimized = optimize(Sized(), (torch.randn(3, 4, 5),), dynamic_shapes=shapes)
    x = torch.randint(-4, 5, (2, 9, 5)).float()  # of which every order of a sum is exact
    found, expected = optimized(x), Sized()(x)
    assert found[1:3] == expected[1:3] == (18, 7)
    assert isinstance(found[3], float)
    torch.testing.assert_close(found, expected)


class Signs(nn.Module):
    """x plus i and minus i of z: buffers in one memory, of which torch reads one with a sign."""

    def __init__(self) -> None:
        super().__init__()
        z = torch.randn(4, WIDTH, dtype=torch.complex64)
        self.register_buffer("plus", z.imag, persistent=False)
        self.register_buffer("minus", z.conj().imag, persistent=False)
        self.register_buffer("zeros", torch._efficientzerotensor((4, WIDTH)), persistent=False)

    def forward(self, x: Tensor, times: float = 2) -> Tensor:
        plus, minus, zeros = (self.get_buffer(name) for name in ("plus", "minus", "zeros"))
        return (x.exp() + plus) * minus * times + zeros


def test_views_with_a_sign_are_read_with_it() -> None:
    model, x = Signs(), torch.randn(3, 4, WIDTH)
    assert model.get_buffer("minus").is_neg()
    compiled = optimize(model, (x,), verify="off")
    torch.testing.assert_close(compiled(x), model(x))
    given = torch.complex(x, x).conj().imag
    assert given.is_neg()
    torch.testing.assert_close(compiled(given), compiled(-x))


def test_what_no_session_takes_is_named() -> None:
    x = torch.randn(3, 4, WIDTH)
    compiled = optimize(Signs(), (x,), verify="off")
    with pytest.raises(UsageError, match="Input 'x' is sparse"):
        compiled(x.to_sparse())
    for times in (torch.tensor(2), torch.tensor([2, 2]), 2.0, True):
        with pytest.raises(UsageError, match=r"'times' holds .* was compiled for 2;"):
            compiled._signature.tensors((x, times), {})  # type: ignore[union-attr]
