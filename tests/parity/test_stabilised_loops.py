"""mLSTM's loop over tokens in a session of onnxruntime, beside eager's: numbers, states and NaN."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import attngraph
from tests.passes import divided_loops as written
from tests.passes.divided_loops import HEADS, KEYS, VALUES, WIDTH, Now

_DIMS = {0: Dim("batch", min=1, max=64), 1: Dim("seq", min=1, max=1024)}
_ROUNDINGS = 64  # of the largest number


class Carried(written.Matrix):
    """States in and out, and each token's m."""

    def forward(self, x: Tensor, c: Tensor, n: Tensor, m: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        q, k, v = (each(x).unflatten(-1, (HEADS, -1)) for each in (self.q, self.k, self.v))
        i, f, given, levels = self.i(x), F.logsigmoid(self.f(x)), [], []
        for t in range(x.shape[1]):
            now = Now(q[:, t], k[:, t], v[:, t], i[:, t], f[:, t])
            c, n, m = self.step((c, n, m), now)
            given.append(self.read((c, n, m), now))
            levels.append(m)
        return torch.stack(given, 1), torch.stack(levels, 1), c, n, m


class Gates(written.Matrix):
    """The gates as they are given, before which m is too."""

    def forward(self, x: Tensor, i: Tensor, f: Tensor, m: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        q, k, v = (each(x).unflatten(-1, (HEADS, -1)) for each in (self.q, self.k, self.v))
        (c, n, _), given = self.start(x), []
        for t in range(x.shape[1]):
            now = Now(q[:, t], k[:, t], v[:, t], i[:, t], f[:, t])
            c, n, m = self.step((c, n, m), now)
            given.append(self.read((c, n, m), now))
        return torch.stack(given, 1), c, n, m


class Hidden(written.Matrix):
    """Where a token is hidden, all states stay."""

    def forward(self, x: Tensor, there: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = (each(x).unflatten(-1, (HEADS, -1)) for each in (self.q, self.k, self.v))
        i, f, given = self.i(x), F.logsigmoid(self.f(x)), []
        c, n, m = self.start(x)
        for t in range(x.shape[1]):
            now, on = Now(q[:, t], k[:, t], v[:, t], i[:, t], f[:, t]), there[:, t, None]
            c2, n2, m2 = self.step((c, n, m), now)
            c, n = torch.where(on[..., None, None], c2, c), torch.where(on[..., None], n2, n)
            m = torch.where(on, m2, m)
            given.append(self.read((c, n, m), now))
        return torch.stack(given, 1)


def _near(module: nn.Module, optimized: attngraph.Optimized, inputs: Sequence[Tensor]) -> None:
    given = [x.double() if x.dtype.is_floating_point else x for x in inputs]
    with torch.no_grad():
        wanted = copy.deepcopy(module).double()(*given)
    found = optimized(*inputs)
    pairs = [(found, wanted)] if isinstance(wanted, Tensor) else zip(found, wanted, strict=True)
    for x, y in pairs:
        least = _ROUNDINGS * torch.finfo(torch.float32).eps * float(y.abs().max())
        torch.testing.assert_close(torch.as_tensor(x).double(), y, rtol=0, atol=least)


def _states(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    c = torch.randn(rows, HEADS, KEYS, VALUES)
    return c, torch.randn(rows, HEADS, KEYS), torch.randn(rows, HEADS)


def _codes(optimized: attngraph.Optimized) -> list[tuple[str, str]]:
    return [(site.status, site.code) for site in optimized.report.sites]


@pytest.mark.parametrize("kind", [written.Matrix, written.FromNothing, written.TwoStages])
def test_any_length(kind: type[nn.Module]) -> None:
    module = kind().eval()
    optimized = attngraph.optimize(module, (torch.randn(2, 7, WIDTH),), dynamic_shapes=(_DIMS,))
    assert set(_codes(optimized)) == {("fused", "recurrence")}
    for rows, length in ((2, 7), (1, 1), (3, 2), (2, 150)):
        _near(module, optimized, [torch.randn(rows, length, WIDTH)])


def test_a_fixed_length() -> None:
    module = written.Matrix().eval()
    optimized = attngraph.optimize(module, (torch.randn(2, 24, WIDTH),))
    assert _codes(optimized) == [("fused", "recurrence")]
    _near(module, optimized, [torch.randn(2, 24, WIDTH)])


def test_states_go_in_and_out() -> None:
    module = Carried().eval()
    row = {0: _DIMS[0]}
    inputs = torch.randn(2, 7, WIDTH), *_states(2)
    optimized = attngraph.optimize(module, inputs, dynamic_shapes=(_DIMS, row, row, row))
    assert _codes(optimized) == [("fused", "recurrence")]
    for rows, length in ((2, 7), (1, 1), (3, 40)):
        _near(module, optimized, [torch.randn(rows, length, WIDTH), *_states(rows)])


def test_hidden_tokens_change_no_state() -> None:
    module = Hidden().eval()
    inputs = torch.randn(2, 7, WIDTH), torch.rand(2, 7) > 0.4
    optimized = attngraph.optimize(module, inputs, dynamic_shapes=(_DIMS, _DIMS))
    assert _codes(optimized) == [("fused", "recurrence")]
    for length in (1, 7, 30):
        _near(module, optimized, [torch.randn(2, length, WIDTH), torch.rand(2, length) > 0.4])


@pytest.fixture(scope="module")
def gated() -> tuple[nn.Module, attngraph.Optimized]:
    module = Gates().eval()
    shapes = (_DIMS, _DIMS, _DIMS, {0: _DIMS[0]})
    return module, attngraph.optimize(module, _gates(), dynamic_shapes=shapes)


def _gates() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    i, f = torch.randn(2, 9, HEADS), F.logsigmoid(torch.randn(2, 9, HEADS))
    return torch.randn(2, 9, WIDTH), i, f, torch.full((2, HEADS), -torch.inf)


# (which gates, from which token, become what)
BROKEN: dict[str, list[tuple[str, int, float]]] = {
    "nothing written by the first token": [("i", 0, -torch.inf)],
    "nothing written": [("i", 4, -torch.inf)],
    "nothing kept": [("f", 4, -torch.inf)],
    "neither": [("i", 4, -torch.inf), ("f", 4, -torch.inf)],
    "all written": [("i", 4, torch.inf)],
    "no number": [("i", 4, torch.nan)],
}


@pytest.mark.parametrize("name", BROKEN)
def test_infinite_gates_give_what_they_give_in_eager(
    name: str, gated: tuple[nn.Module, attngraph.Optimized]
) -> None:
    """exp(−∞ − −∞) is NaN from there on, in the head that has it and in no other."""
    module, optimized = gated
    x, i, f, m = _gates()
    for gate, at, number in BROKEN[name]:
        {"i": i, "f": f}[gate][0, at, 0] = number
    with torch.no_grad():
        wanted = module(x, i, f, m)
    found = [torch.as_tensor(each) for each in optimized(x, i, f, m)]
    has_nan = name in ("nothing written by the first token", "neither", "all written", "no number")
    assert has_nan == any(bool(each.isnan().any()) for each in wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6, equal_nan=True)
