"""Scores that weigh values as they are, told from other products of activations by their axes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attngraph.analysis.attention.without_softmax import without_softmax
from attngraph.frontend.capture import capture

WIDTH, HEADS, TOKENS = 16, 2, 9


def _codes(module: nn.Module, *args: Tensor) -> list[str]:
    graph = capture(module.eval(), args).graph
    return [declined.code for _, declined in without_softmax(graph)]


class Projected(nn.Module):
    """Three projections of the tokens, each cut into heads, and what is made of them."""

    def __init__(self, make: Callable[..., Tensor], *, normed: bool = False) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH // HEADS) if normed else nn.Identity()
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (HEADS, -1)).transpose(1, 2)

        q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        return self.make(q, self.norm(k), self.norm(v))


ATTENTIONS = {
    "keys with values first": (lambda q, k, v: q @ (k.mT @ v) / TOKENS, "linear-attention"),
    "scores first": (lambda q, k, v: (q @ k.mT / TOKENS) @ v, "no-softmax"),
    "scores in an einsum": (
        lambda q, k, v: torch.einsum("bhts,bhsd->bhtd", torch.einsum("bhtd,bhsd->bhts", q, k), v),
        "no-softmax",
    ),
    "a scale for each head": (
        lambda q, k, v: ((q @ k.mT) * torch.tensor([0.1, 0.2]).view(2, 1, 1)) @ v,
        "no-softmax",
    ),
}


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_an_attention_of_bare_scores_is_named(name: str, normed: bool) -> None:
    make, code = ATTENTIONS[name]
    assert _codes(Projected(make, normed=normed), torch.randn(2, TOKENS, WIDTH)) == [code]


OTHERS: dict[str, Callable[..., Tensor]] = {
    "a Gram matrix": lambda q, k, v: q.mT @ q,
    "two products in a row, of features": lambda q, k, v: (
        q.reshape(2, TOKENS, 4, 4) @ (k.reshape(2, TOKENS, 4, 4) @ v.reshape(2, TOKENS, 4, 4))
    ),
    "a product of two sums over tokens": lambda q, k, v: (q.mT @ k) @ (k.mT @ v),
    "factors of a low rank": lambda q, k, v: (
        k.mean(2)[:, :, :, None] @ (q.mean(2)[:, :, None, :] @ v.mT)
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_products_of_three_are_no_attention(name: str) -> None:
    assert _codes(Projected(OTHERS[name]), torch.randn(2, TOKENS, WIDTH)) == []


class Interest(nn.Module):
    """A network scores each item of a history with the item that is asked about (DIN)."""

    def __init__(self, made: int = 1, *, product: bool = False) -> None:
        super().__init__()
        self.product = product
        self.score = nn.Sequential(nn.Linear(4 * WIDTH, 8), nn.Sigmoid(), nn.Linear(8, made))

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        asked = query[:, None].expand_as(keys)
        found = self.score(torch.cat([asked, keys, asked - keys, asked * keys], -1))
        assert isinstance(found, Tensor)
        return found

    def forward(self, query: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        weights = self.scores(query, keys) * mask[..., None]
        return (weights.mT @ keys).squeeze(1) if self.product else (weights * keys).sum(1)


class Gated(Interest):
    """What is known of an item alone says how much of it is taken: a gate, which has no query."""

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        found = self.score(torch.cat([keys, keys, keys, keys * 2], -1))
        assert isinstance(found, Tensor)
        return found


class Filtered(Interest):
    """A filter for each place of a neighbourhood, as in PointConv: features of its own."""

    def forward(self, query: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        return torch.einsum("btm,btd->bdm", self.scores(query, keys), keys * mask[..., None])


_ARGS = torch.randn(2, WIDTH), torch.randn(2, TOKENS, WIDTH), torch.ones(2, TOKENS)


@pytest.mark.parametrize("product", [False, True])
def test_scores_of_a_network_are_named(product: bool) -> None:
    assert _codes(Interest(product=product), *_ARGS) == ["no-softmax"]


class Dice(nn.Module):
    """The activation of that network: the sigmoid of a normed x says how much of x is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.norm(x.mT).mT.sigmoid()
        return x * (kept + 0.1 * (1 - kept))


@pytest.mark.parametrize("activation", [nn.PReLU(), nn.PReLU(TOKENS), Dice()])
@pytest.mark.parametrize("kind", [Interest, Gated])
def test_a_network_with_learned_activations_is_one_too(
    kind: type[Interest], activation: nn.Module
) -> None:
    module = kind()
    module.score[1] = activation
    assert _codes(module, *_ARGS) == ["no-softmax"] * (kind is Interest)


@pytest.mark.parametrize("module", [Gated(), Filtered(5)], ids=["a gate", "a filter"])
def test_gates_and_filters_are_no_scores(module: nn.Module) -> None:
    assert _codes(module, *_ARGS) == []
