"""Branches on values whose sides differ: the file computes both, and takes what the model takes."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

import attngraph
from attngraph.checks import both_sides
from attngraph.errors import CaptureError
from attngraph.frontend.model import trace

X = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(12).reshape(3, 4)
AUTO = {0: Dim.AUTO, 1: Dim.AUTO}


class Normalises(nn.Module):
    """The rest of the model is after the branch, once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 1:
            x = x / x.max()
        attended: Tensor = self.inner(x, x, x, need_weights=False)[0]
        return attended


class ChoosesBias(nn.Module):
    def forward(self, x: Tensor, far: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        bias = (places[:, None] - places).abs().float()
        bias = -bias if far else bias * 0.5
        return (x @ x.mT * 0.25 + bias).softmax(-1) @ x


class DividesBy(nn.Module):
    """Without what it asks first, a run would divide by 0."""

    def forward(self, ids: Tensor, number: Tensor) -> Tensor:
        return (ids // number).float() if number > 0 else ids * 2.0


class LooksUp(nn.Module):
    """Without what it asks first, a run would look beyond the table's end."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 4, generator=torch.Generator().manual_seed(0)))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[ids] if ids.max() < 5 else self.table[ids % 5] * 2


class Remembers(nn.Module):
    """What the first branch leaves in Python shows where the second one is taken too."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        times = 2.0 if y.sum() > 0 else 3.0
        if x.sum() > 0:
            x = x * times
        return x


class TwoConditions(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        count = (y > 0).sum().item()
        if count > 100 and x.sum() > 0:
            return x * 2
        if count == 0:
            return x - 1
        return x.tanh()


class WritesInPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        if x.mean() > 0:
            y[:, 1:] += 1
            y.clamp_(max=2.0)
        return y + 1


class LeavesEarly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
            found: Tensor = self.head(x)
            if found.max() > 1.5:
                return found
        return found


class LeavesLate(nn.Module):
    """Most inputs leave after the last layer, where leaving is going on; few leave before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Parameter(functional.layer_norm(torch.randn(5, 16), (16,)) / 4)

    def forward(self, x: Tensor) -> Tensor:
        for at, layer in enumerate(self.layers):
            found = functional.layer_norm(x, (16,)) @ self.head.T
            if found.max() > (1.5 if at == 2 else 3.8):  # 4 where a row is along the head's
                return found
            x = layer(x)
        return found


class OneFlag(nn.Module):
    """Each layer asks the same."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(12))

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh() if flag else layer(x) * 0.5
        return x


class RareDeviation(nn.Module):
    """No usual input takes its other side."""

    def forward(self, x: Tensor) -> Tensor:
        mean, deviation = x.mean(), x.std()
        if deviation > 1e-6:
            return (x - mean) / deviation
        return x - mean + 7


class TwoNumbers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() if x[0, 0, 0] * 3 == x[0, 0, 1] + 1 else x * 2


class CountsSelected(nn.Module):
    """Sizes that only a run tells are others on each side, and gone where the sides meet."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[x > 0] if x.mean() > 0 else x[x < -1]
        return chosen.sum() + chosen.shape[0]


class LeavesOutAMask(nn.Module):
    """Of the mask's sizes nothing is known on one of its sides."""

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        x = x.masked_fill(hidden[..., None], 0.0) + 1 if hidden.any() else x
        if x.isfinite().all():
            return x
        return x.nan_to_num() * 2


class LargestOfSome(nn.Module):
    """Of no rows there is no largest one."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return x[keep].amax(0) if keep.any() else x.sum(0)


class FirstOfSome(nn.Module):
    """Of no rows there is no first one; their number is asked for."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        rows = x[keep]
        return rows[0] * 2 if rows.shape[0] > 0 else x.sum(0)


class KeepsItsMean(nn.Module):
    """A run doesn't change what the next one begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            self.mean.copy_(x.mean((0, 1)))
        return x - self.mean


SOME = torch.tensor([False, True, False, True, True, False])
YES, NO = torch.tensor(True), torch.tensor(False)
MODELS: dict[str, tuple[nn.Module, tuple[Tensor, ...], Sequence[tuple[Tensor, ...]]]] = {
    "bias": (ChoosesBias(), (X, YES), [(X, NO), (X[:, :3], YES), (X[:1], NO)]),
    "division": (DividesBy(), (IDS, torch.tensor(3)), [(IDS, torch.tensor(n)) for n in (0, -2)]),
    "table": (LooksUp(), (IDS % 5,), [(IDS,), (IDS % 3,)]),
    "memory": (Remembers(), (X, X), [(X * a, X * b) for a in (1, -1) for b in (1, -1)]),
    "two": (TwoConditions(), (X, X), [(X * a, y) for a in (1, -1) for y in (-X.abs(), X.abs())]),
    "in place": (WritesInPlace(), (X,), [(X.abs(),), (-X.abs(),)]),
    "early": (LeavesEarly(), (X,), [(X * times,) for times in (0.0, 0.5, 1.0, 2.0, 9.0)]),
    "late": (LeavesLate(), (X,), [(X * 2,), (LeavesLate().head[:4].expand(2, 4, 16) * 3,)]),
    "flag": (OneFlag(), (X, YES), [(X, NO), (-X, NO)]),
    "rare": (RareDeviation(), (X,), [(X * 0 + 3,), (X * 1e-9,)]),
    "mask": (
        LeavesOutAMask(),
        (X, X[..., 0] > 9),
        [(X, X[..., 0] > 0), (X[:1, :2] / 0, X[:1, :2, 0] > 9)],
    ),
    "largest": (LargestOfSome(), (X[0], SOME), [(X[0], SOME & False), (X[1], ~SOME)]),
    "first": (FirstOfSome(), (X[0], SOME), [(X[0], SOME & False), (X[1], ~SOME)]),
    "sizes": (CountsSelected(), (X,), [(X + 1,), (X - 1,), (X - 9,)]),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=() if each in ("bias", "memory") else pytest.mark.wide)
        for each in MODELS
    ],
)
def test_each_input_has_the_side_that_the_model_takes(name: str) -> None:
    module, args, others = MODELS[name]
    shapes = tuple(dict.fromkeys(range(min(each.dim(), 2)), Dim.AUTO) for each in args)
    optimized = attngraph.optimize(module.eval(), args, dynamic_shapes=shapes)
    notes = [note for note in optimized.report.notes if "computes both sides" in note]
    assert all("test_both_sides.py" in note for note in notes)
    assert notes
    with torch.no_grad():
        for given in (args, *others):
            torch.testing.assert_close(optimized(*given), module(*given))


class AskedAtManyLines(nn.Module):
    """A flag of the whole model, as a number of Python."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        some = keep.any().item()
        x = x * 2 if some else x + 1
        x = x.sin() if some else x.cos()
        x = x.roll(1, 0) if some else -x
        return x.exp() if some else x


def test_a_flag_that_many_lines_ask_is_traced_on_two_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = []

    def counted(*args: Any, way: tuple[bool, ...], **kwargs: Any) -> Any:
        ways.append(way)
        return trace(*args, way=way, **kwargs)

    monkeypatch.setattr(both_sides, "trace", counted)
    module = AskedAtManyLines()
    optimized = attngraph.optimize(module, (X[0], SOME))
    assert len(ways) == 2
    for keep in (SOME, SOME & False):
        torch.testing.assert_close(optimized(X[0], keep), module(X[0], keep))


def test_runs_begin_with_the_same_state() -> None:
    module = KeepsItsMean()
    optimized = attngraph.optimize(module, (X,))
    assert not module.mean.any()
    for x in (-X.abs(), X.abs()):
        expected = KeepsItsMean()(x)
        torch.testing.assert_close(optimized(x), expected)


def test_what_is_after_the_branch_is_there_once() -> None:
    module = Normalises().eval()
    optimized = attngraph.optimize(module, (X,), dynamic_shapes=(AUTO,))
    assert [site.status for site in optimized.report.sites] == ["fused"]
    with torch.no_grad():
        for x in (X, X * 0.1, X * 100, X[:1, :1]):
            torch.testing.assert_close(optimized(x), module(x))


def test_a_side_that_no_input_takes_is_compared_by_force() -> None:
    module = TwoNumbers()
    optimized = attngraph.optimize(module, (X,))
    (note,) = (note for note in optimized.report.notes if "computes both sides" in note)
    assert "forced onto it, both agree" in note
    marked = X.clone()
    marked[0, 0, :2] = torch.tensor([1.0, 2.0])
    for x in (X, marked):
        torch.testing.assert_close(optimized(x), module(x))


class OtherShapes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :3] if x.sum() > 0 else x


class OtherOutputs(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        return (x, None) if x.sum() > 0 else (x, x * 2)


class ManyWays(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            state = state + x[:, step] if x[:, step].sum() > 0 else state * 0.5
        return state


class FailsElsewhere(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x * 2
        parts: Tensor = x.reshape(5, 5)
        return parts


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (OtherShapes(), "of different shapes or types"),
        (OtherOutputs(), "its sides return different things"),
        pytest.param(ManyWays(), "there are too many ways", marks=pytest.mark.wide),
        (FailsElsewhere(), "one of its sides fails"),
    ],
)
def test_sides_that_no_graph_can_have_are_refused(module: nn.Module, said: str) -> None:
    with pytest.raises(CaptureError, match=said) as refused:
        attngraph.optimize(module, (X,))
    assert "test_both_sides.py" in str(refused.value)


def test_many_branches_in_a_row_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 30 there are 2 ** 30 ways, which no list holds."""
    lines = [f"        x = x - {at} if x.mean() > {at} else x * {at + 2}" for at in range(30)]
    head = ["import torch", "class Many(torch.nn.Module):", "    def forward(self, x):"]
    (tmp_path / "many_branches.py").write_text("\n".join([*head, *lines, "        return x"]))
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("many_branches").Many()
    with pytest.raises(CaptureError, match="too many ways"):
        attngraph.optimize(module, (X,))
