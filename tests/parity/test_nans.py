"""A fill that is written over a model's own NaN takes it away, as in eager; no other does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attngraph.compiling.compiler import optimize
from attngraph.errors import ParityError

LOWEST = torch.finfo(torch.float32).min
Step = Callable[["Twice", Tensor, Tensor], Tensor]


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


class Twice(nn.Module):
    """An attention whose queries are what `first` makes, under what `hide` does to its scores."""

    def __init__(self, first: Step, hide: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.first, self.hide = first, hide

    def attend(self, scores: Tensor, x: Tensor) -> Tensor:
        return (scores.softmax(-1) @ _heads(self.v(x))).transpose(1, 2).flatten(2)

    def scores(self, queries: Tensor, x: Tensor) -> Tensor:
        return _heads(self.q(queries)) @ _heads(self.k(x)).mT * 0.4

    def forward(self, x: Tensor, kept: Tensor, seen: Tensor) -> Tensor:
        queries = self.first(self, x, kept)
        return self.attend(self.hide(self.scores(queries, x), seen[:, None, None]), x)


def _empty_rows(model: Twice, x: Tensor, kept: Tensor) -> Tensor:
    scores = model.scores(x, x).masked_fill(~kept[:, None, None], -torch.inf)
    return model.attend(scores, x)


def _mean_of_nothing(model: Twice, x: Tensor, kept: Tensor) -> Tensor:
    return (x * kept[..., None]).sum(1, keepdim=True) / kept.sum(1)[:, None, None]


def _mean_of_some(model: Twice, x: Tensor, kept: Tensor) -> Tensor:
    return (x * kept[..., None]).sum(1, keepdim=True) / kept.sum(1).clamp(min=1)[:, None, None]


def _guarded(model: Twice, x: Tensor, kept: Tensor) -> Tensor:
    return torch.nan_to_num(_empty_rows(model, x, kept))


def _written(scores: Tensor, seen: Tensor) -> Tensor:
    return torch.where(seen, scores, LOWEST)


def _by_head(scores: Tensor, seen: Tensor) -> Tensor:
    """A window that is wider in the second head."""
    q, k = (torch.arange(n) for n in scores.shape[-2:])
    near = q[:, None] + torch.arange(1, 3)[:, None, None] > k
    return scores.masked_fill(~(near & seen), -1e9)


def _written_twice(scores: Tensor, seen: Tensor) -> Tensor:
    causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~seen, -1e9).masked_fill(~causal, -torch.inf)


def _added(scores: Tensor, seen: Tensor) -> Tensor:
    return scores + (~seen) * LOWEST


@pytest.mark.parametrize(
    ("first", "hide", "clears"),
    [
        (_empty_rows, _written, True),
        (_empty_rows, _by_head, True),
        (_empty_rows, _written_twice, True),
        (_empty_rows, _added, False),  # NaN stays NaN
        (_mean_of_nothing, _written, True),
        (_mean_of_some, _written, False),
        (_guarded, _written, False),
    ],
)
def test_what_a_query_of_nan_gives(first: Step, hide: Step, clears: bool) -> None:
    """In elements of the batch: all is kept and seen; neither; nothing is kept; nothing is seen."""
    torch.manual_seed(0)
    model = Twice(first, hide).eval().requires_grad_(False)
    x, kept = torch.randn(4, 5, 8), torch.ones(4, 5, dtype=torch.bool)
    found = optimize(model, (x, kept, kept.clone()))
    seen = kept.clone()
    kept[1:3], seen[1], seen[3] = False, False, False
    eager = model(x, kept, seen)
    torch.testing.assert_close(found(x, kept, seen), eager, equal_nan=True)
    assert eager[2].isnan().all() == (first in (_empty_rows, _mean_of_nothing))
    assert eager[1].isnan().any() == (hide is _added)
    assert clears == any(node.op == "aten.any.dim" for node in found.graph)
    assert all(site.status == "fused" for site in found.report.sites)


class Normalised(nn.Module):
    """Keys over what `size` says of them: of padding, which is zeros, that is 0 unless it adds.

    `where` says what is divided: the keys or the scores; or keys that are the values too, those of
    which padded values are written over by 0, or keys that are written over themselves.
    """

    def __init__(self, size: Callable[[Tensor], Tensor], where: str = "keys") -> None:
        super().__init__()
        self.q, self.v = nn.Linear(8, 8), nn.Linear(8, 8)
        self.k = nn.Linear(8, 8, bias=False)
        self.size, self.where = size, where

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        keys, values = _heads(self.k(x)), _heads(self.v(x))
        size, hidden = self.size(keys), ~seen[:, None, :, None]
        keys = keys if self.where == "scores" else keys / size
        if self.where == "both, written over":
            keys = keys.masked_fill(hidden, 0)
        if self.where not in ("keys", "scores"):
            values = keys
        if self.where == "both, values written over":
            values = values.masked_fill(hidden, 0)
        scores = _heads(self.q(x)) @ keys.mT
        scores = scores / size.mT if self.where == "scores" else scores
        return scores.masked_fill(hidden.mT, -torch.inf).softmax(-1) @ values


def _norm(x: Tensor) -> Tensor:
    return x.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize(
    ("size", "where", "fuses"),
    [
        (_norm, "keys", False),
        (_norm, "scores", False),
        (lambda x: x.std(-1, keepdim=True), "keys", False),
        (lambda x: x.square().sum(-1, keepdim=True).sqrt(), "keys", False),
        (lambda x: _norm(x) + 1e-6, "keys", True),
        (lambda x: _norm(x) + 1e-6, "scores", True),
        (lambda x: _norm(x).clamp_min(1e-6), "keys", True),
        (_norm, "both", True),  # a value of NaN shows in eager as well
        (_norm, "both, values written over", False),
        (_norm, "both, written over", True),
    ],
)
def test_hidden_keys_of_nan_leave_no_trace(
    size: Callable[[Tensor], Tensor], where: str, fuses: bool
) -> None:
    torch.manual_seed(0)
    model = Normalised(size, where).eval().requires_grad_(False)
    x, seen = torch.randn(2, 5, 8), torch.ones(2, 5, dtype=torch.bool)
    seen[1, 3:] = False
    found = optimize(model, (x, seen))
    torch.testing.assert_close(found(x, seen), model(x, seen))
    x[1, 3:] = 0
    eager = model(x, seen)
    assert eager[1].isnan().any() == (where == "both")
    torch.testing.assert_close(found(x, seen), eager, equal_nan=True)
    (site,) = found.report.sites
    assert (site.status == "fused") == fuses
    assert fuses or site.code == "nan-keys"


def test_the_check_sees_what_padding_of_zeros_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hides other rows than the sample does, and holds the floats there at 0."""
    fuse = "attngraph.passes.attention.fuse_attention.nan_of_keys"
    monkeypatch.setattr(fuse, lambda *_: None)
    torch.manual_seed(0)
    model = Normalised(_norm).eval().requires_grad_(False)
    x, seen = torch.randn(2, 5, 8), torch.ones(2, 5, dtype=torch.bool)
    seen[1, 3:] = False
    with pytest.raises(ParityError, match="zeros where they hide"):
        optimize(model, (x, seen))
