"""What a model keeps between calls, and what it does in train mode only, is told."""

from __future__ import annotations

import copy
import random
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph import mapped
from attngraph.errors import CaptureError
from attngraph.frontend.capture import capture
from attngraph.frontend.interface import stand_ins as stand_in_weights
from attngraph.frontend.interface.stand_ins import stand_ins
from attngraph.frontend.interface.state import state_notes

X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
_CALLS = [0]


class Thing:
    """No module, and state all the same."""

    def __init__(self) -> None:
        self.count = 0


class Keeps(nn.Module):
    """Has a list, a dict, a tensor, a number and a thing to keep; subclasses use one of them."""

    number = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.listed: list[Tensor] = []
        self.named: dict[str, Any] = {"inner": {}}
        self.tensor = torch.zeros(2, 3, 4)
        self.thing = Thing()


class Counts(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        return self.linear(x) * self.number


class CountsInAThing(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.thing.count += 1
        return self.linear(x) * self.thing.count


class CountsAside(Keeps):
    """Outside of the module: it shows in what a second call returns."""

    def forward(self, x: Tensor) -> Tensor:
        _CALLS[0] += 1
        return self.linear(x) * _CALLS[0]


class Lists(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.listed.append(self.linear(x))
        return torch.cat(self.listed, 1)


class Names(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        inner, keys = self.named["inner"], self.linear(x)
        inner["keys"] = torch.cat([inner["keys"], keys], 1) if inner else keys
        return inner["keys"].sum(1)


class Sums(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.tensor = self.tensor + self.linear(x)
        return self.tensor


class Rarely(Keeps):
    """Returns the same for a hundred calls."""

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        return self.linear(x) if self.number % 100 else x


class Within(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Counts()])

    def forward(self, x: Tensor) -> Any:
        return self.layers[0](x)


STATES: dict[type[nn.Module], str] = {
    Counts: "changes number as it runs, and a second call on the same inputs returns something",
    CountsInAThing: "changes thing.count as it runs, and",
    Lists: "changes listed, listed[1] as it runs, and",
    Names: "changes named['inner']['keys'] as it runs, and",
    Sums: "changes tensor as it runs, and",
    Rarely: "changes number as it runs: the graph computes what the first call does",
    Within: "changes layers.0.number as it runs, and",
}


@pytest.mark.parametrize("kind", STATES, ids=lambda kind: kind.__name__)
def test_state_without_a_buffer_is_told(kind: type[nn.Module]) -> None:
    module = kind().eval()
    optimized = attngraph.optimize(module, (X,))
    (note,) = optimized.report.notes
    assert note.startswith(f"The model {STATES[kind]}")
    assert optimized.report.to_dict()["notes"] == [note]


def test_state_outside_of_the_module_shows_in_a_second_call() -> None:
    (note,) = capture(CountsAside().eval(), (X,)).notes
    assert note.startswith("The model keeps something of a call, and a second call on the same")


@pytest.mark.parametrize("kind", [Counts, CountsInAThing, Lists, Names, Sums])
def test_a_compile_leaves_the_state_as_it_was(kind: type[Keeps]) -> None:
    module = kind().eval()
    attngraph.optimize(module, (X,))
    assert (module.number, module.thing.count) == (0, 0)
    assert (module.listed, module.named) == ([], {"inner": {}})
    assert not module.tensor.any()


class Writes(Keeps):
    """In place, into a tensor that is no buffer; the whole of it is returned."""

    def forward(self, x: Tensor) -> Tensor:
        self.tensor.add_(self.linear(x))
        return self.tensor


class WritesAPart(Keeps):
    """As a cache that a thing of the model's keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.named["keys"] = torch.zeros(2, 3, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.named["keys"][:, 1:] = self.linear(x)[:, 1:]
        return self.named["keys"].sum(1)


@pytest.mark.parametrize(
    ("kind", "name"), [(Writes, "tensor"), (WritesAPart, "named['keys']")], ids=["all", "part"]
)
def test_a_tensor_that_is_written_in_place_is_state_as_a_buffer_is(
    kind: type[Keeps], name: str
) -> None:
    module = kind().eval()
    optimized = attngraph.optimize(module, (X,))
    told = f"The model updates {name} as it runs; the graph reads its present value and doesn't."
    assert told in optimized.report.notes
    assert not module.tensor.any()
    with torch.no_grad():
        for x in (X, -3 * X):  # eager begins with what it kept, the file as it was compiled
            torch.testing.assert_close(optimized(x), copy.deepcopy(module)(x))


class Remembers(nn.Module):
    """The keys of all calls so far, as the first implementations of Llama 2 and 3 keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.keys = torch.zeros(3, 16, 4)

    def forward(self, x: Tensor, start: int) -> Tensor:
        batch, length, _ = x.shape
        self.keys = self.keys.to(x)
        self.keys[:batch, start : start + length] = self.linear(x)
        past = torch.zeros((length, start))
        mask = torch.hstack([past, torch.full((length, length), float("-inf")).triu(1)])
        scores = x @ self.keys[:batch, : start + length].mT + mask
        return torch.softmax(scores, -1) @ self.keys[:batch, : start + length]


@pytest.mark.parametrize("start", [0, 5])
def test_keys_of_earlier_calls_are_read_as_they_are(start: int) -> None:
    module = Remembers().eval()
    with torch.no_grad():
        module(torch.randn(2, start + 1, 4), 0)
    dims = {"x": {0: Dim("batch", max=3), 1: Dim("seq", max=10)}, "start": None}
    optimized = attngraph.optimize(module, (X, start), dynamic_shapes=dims)
    x = torch.randn(3, 7, 4)
    with torch.no_grad():
        torch.testing.assert_close(optimized(x, start), copy.deepcopy(module)(x, start))


def test_what_is_written_outside_of_the_model_is_refused() -> None:
    kept = torch.zeros(2, 3, 4)

    class Leaks(Keeps):
        def forward(self, x: Tensor) -> Tensor:
            kept[:, 1:] = self.linear(x)[:, 1:]
            return kept * 1

    with pytest.raises(CaptureError, match=r"writes into a tensor of shape .*: register it as a"):
        capture(Leaks().eval(), (X,))
    assert not kept.any()


def test_a_table_that_is_built_once_is_no_state() -> None:
    class Builds(Keeps):
        table: Tensor | None = None
        seen: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.arange(x.shape[1])
            self.seen = self.linear(x)  # as attentions keep their weights to be looked at
            return self.seen + self.table[:, None]

    assert capture(Builds().eval(), (X,)).notes == ()


def test_what_a_thing_that_is_called_keeps_is_put_back() -> None:
    """A table of positions by size, as a function with a memory makes it."""

    class Positions:
        def __init__(self) -> None:
            self.known: dict[int, Tensor] = {}

        def __call__(self, count: int) -> Tensor:
            if count not in self.known:
                self.known[count] = torch.arange(count)
            return self.known[count]

    class Placed(Keeps):
        def __init__(self) -> None:
            super().__init__()
            self.positions = Positions()

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + self.positions(x.shape[1])[:, None]

    module = Placed().eval()
    assert capture(module, (X,)).notes == ()
    assert not module.positions.known


class Drops(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.linear, self.part = nn.Linear(4, 4), part

    def forward(self, x: Tensor) -> Any:
        return self.part(self.linear(x))


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.3, self.training)


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (nn.Dropout(0.1), "Dropout (part)"),
        (nn.BatchNorm1d(3), "BatchNorm1d (part)"),
        (Own(), "its own code"),
        (nn.LayerNorm(4), None),
        (nn.Dropout(0.0), None),
    ],
    ids=["dropout", "batch-norm", "own", "norm", "inactive"],
)
def test_train_mode_is_told_where_it_matters(part: nn.Module, told: str | None) -> None:
    module = Drops(part).train()
    notes = capture(module, (X,)).notes
    assert module.training
    if told is None:
        assert notes == ()
    else:
        assert notes == (
            f"The model is in train mode, where {told} computes something else: it is compiled as "
            "in eval mode. Call .eval() on it to compare.",
        )
    assert capture(module.eval(), (X,)).notes == ()


def test_to_look_for_state_draws_no_number_of_the_callers() -> None:
    module = Drops(nn.Dropout(0.1))
    torch.manual_seed(3)
    random.seed(3)
    before = torch.random.get_rng_state(), random.getstate()
    capture(module, (X,))
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert random.getstate() == before[1]


class Checks(nn.Module):
    """Requires something of a number, of values, and of sizes, which the file checks itself."""

    def forward(self, x: Tensor, count: Tensor, shown: Tensor) -> tuple[Tensor, Tensor]:
        times: Any = count.item()
        torch._check(times >= 0)
        torch._check(times <= 10)
        torch._assert_async((x < 9).all(), "x is small")
        return x * times, x[:, shown].sum(1)


def test_what_a_model_requires_of_values_is_told() -> None:
    args = (X, torch.tensor(4), torch.tensor([True, False, True]))
    rows, length = {0: Dim("b")}, Dim("s")
    shapes = ({**rows, 1: length}, None, {0: length})
    (note,) = capture(Checks(), args, dynamic_shapes=shapes).notes
    assert "unless u0 <= 10 (u0: the number read at " in note
    assert "asserts holds (x is small); the file doesn't check values, and goes on." in note


class Inverts(nn.Module):
    """Inverts a matrix of its input, and one of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3) * 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        below = torch.linalg.cholesky(x.mT @ x)
        return x @ torch.linalg.inv(self.weight), below


def test_what_torch_requires_of_matrices_is_told_where_inputs_make_them() -> None:
    (note,) = capture(Inverts(), (torch.randn(2, 5, 3),)).notes
    assert re.fullmatch(
        r"The model stops with an error unless the matrix at \S+test_state.py:\d+ is positive "
        r"definite; the file doesn't check values, and goes on\.",
        note,
    )


def test_what_torch_requires_of_sizes_by_itself_is_not_told() -> None:
    class Chosen(nn.Module):
        def forward(self, x: Tensor, shown: Tensor) -> Tensor:
            return x[shown].sum(0)

    length = Dim("s")
    shapes = ({0: length}, {0: length})
    assert capture(Chosen(), (X[0], X[0, :, 0] > -9), dynamic_shapes=shapes).notes == ()


class Reads(nn.Module):
    """Weights that are NaN but for their first row: whoever reads them all has NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(8, 4), nn.Linear(4, 6)
        self.factor = nn.Parameter(torch.ones(6, 3))
        self.calls = 0
        self.seen: Any = None
        for weight in (self.embedding.weight, self.linear.weight, self.factor):
            weight.data[1:] = torch.nan

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        self.seen = self.linear(self.embedding(ids)) @ self.factor
        return self.seen


def test_large_weights_are_not_read_for_what_a_module_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mapped, "LARGE", 0)
    monkeypatch.setattr(stand_in_weights, "_MANY", 2)
    module, ids = Reads().eval(), torch.tensor([[3, 7]])
    with stand_ins(module) as weights:
        found = torch.func.functional_call(module, weights, (ids,))
    assert found.isfinite().all()
    assert found.shape == module(ids).shape == (1, 2, 3)
    assert module(ids).isnan().all()  # and has its own weights again
    (note,) = state_notes(module, (ids,), {})
    assert "changes calls as it runs" in note
    assert module.calls == 3
