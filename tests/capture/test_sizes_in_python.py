"""Sizes that Python computes with: they stay sizes, or are fixed and told with what helps."""

from __future__ import annotations

import math
import re
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.errors import CaptureError, UsageError
from attngraph.frontend.capture import capture
from attngraph.ir import interpret

pytestmark = pytest.mark.wide

X = torch.randn(3, 16, 8, generator=torch.Generator().manual_seed(0))
DIMS = ({0: Dim("batch"), 1: Dim("seq")},)
AUTO = ({0: Dim.AUTO, 1: Dim.AUTO},)


def of_int(x: Tensor) -> Tensor:
    return x + torch.arange(int(x.shape[1]))[:, None]


def of_quotient(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], int(x.shape[1] * 8 / 4), 4)


def of_float(x: Tensor) -> Tensor:
    return x * float(x.shape[1])


def of_len(x: Tensor) -> Tensor:
    return x + torch.arange(len(x))[:, None, None] + len([1, 2])


def of_sqrt(x: Tensor) -> Tensor:
    return x / math.sqrt(x.shape[1]) + sqrt(x.shape[0]) + math.sqrt(4)


def of_log(x: Tensor) -> Tensor:
    return x * math.log(x.shape[1]) + math.log(8, 2)


def of_product(x: Tensor) -> Tensor:
    return x.reshape(int(np.prod(x.shape[:2])), 8) * np.prod([2.0, 3.0])


def of_round(x: Tensor) -> Tensor:
    return x.sum() + torch.arange(round(x.shape[1] * 0.5))


def of_extremes(x: Tensor) -> Tensor:
    """The base of a rotary embedding that is stretched past 8 positions, and a temperature."""
    size = x.shape[1]
    base = 10.0 * max(size / 8, 1) ** 1.5
    return x.cos() / base * math.log(max(1.0, size / 4, 2) + 1) + min(size / 3, x.shape[0] / 2)


def of_kind(x: Tensor) -> Tensor:
    size = x.shape[1]
    if not isinstance(size, int) or isinstance(size, float):
        raise TypeError(f"a size is a {type(size)}")
    return x[:, : size - size // 2]


STAY = [
    of_int,
    of_quotient,
    of_float,
    of_len,
    of_sqrt,
    of_log,
    of_product,
    of_round,
    of_extremes,
    of_kind,
]


class Calls(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.linear(x))


class CallsAll(nn.Module):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [function(x) for function in STAY]


def test_a_size_that_python_computes_with_stays_one() -> None:
    module = CallsAll().eval()
    optimized = attngraph.optimize(module, (X,), dynamic_shapes=DIMS)
    assert optimized.report.notes == []
    for batch, length in ((2, 9), (1, 25), (5, 3)):
        x = torch.randn(batch, length, 8)
        for function, found, own in zip(STAY, optimized(x), module(x), strict=True):
            torch.testing.assert_close(found, own, msg=function.__name__)


def test_the_larger_fraction_of_a_size_is_no_condition_on_it() -> None:
    """Where nothing else makes a number of a size, too."""

    def stretched(x: Tensor) -> Tensor:
        size = x.shape[1]
        whole = torch.arange(int(max(size / 2, 3)))[-1]
        return x * max(size / 8, 1) / max(size // 8, 0.5) + min(size / 8, 1.5) + whole

    module = Calls(stretched).eval()
    for length in (6, 20):
        optimized = attngraph.optimize(
            module, (X[:, :1].repeat(1, length, 1),), dynamic_shapes=AUTO
        )
        assert optimized.report.notes == []
        assert optimized.report.relations == []
        for size in (1, 5, 8, 13):
            x = torch.randn(2, size, 8)
            torch.testing.assert_close(optimized(x), module(x))


def test_the_functions_are_pythons_own_again() -> None:
    plain = math.sqrt, math.log, np.prod
    capture(Calls(of_sqrt), (X,), dynamic_shapes=DIMS)
    assert (math.sqrt, math.log, np.prod) == plain
    assert "int" not in globals()
    assert sqrt is math.sqrt


def test_what_a_size_must_be_is_a_condition() -> None:
    def square(x: Tensor) -> Tensor:
        side = int(math.sqrt(x.shape[1]))
        return x.view(x.shape[0], side, side, 8).sum(1)

    module = Calls(square).eval()
    optimized = attngraph.optimize(module, (X,), dynamic_shapes=AUTO)
    with torch.no_grad():
        for length in (9, 25):
            x = torch.randn(2, length, 8)
            torch.testing.assert_close(optimized(x), module(x))
    with pytest.raises(attngraph.errors.UsageError, match="compiled for sizes with"):
        optimized(torch.randn(2, 15, 8))
    with pytest.raises(CaptureError, match=r"can't be dynamic: .*Dim\.AUTO"):
        capture(module, (X,), dynamic_shapes=DIMS)


def a_loop(x: Tensor) -> Tensor:
    return torch.stack([x[:, : at + 1].amax(1) for at in range(x.shape[1])], 1)


def a_loop_over_prefixes(x: Tensor) -> Tensor:
    rows = []
    for t in range(x.shape[1]):
        scores = (x[:, : t + 1] * x[:, t : t + 1]).sum(-1)
        rows.append((scores.softmax(-1)[..., None] * x[:, : t + 1]).sum(1))
    return torch.stack(rows, 1)


def a_loop_over_what_was_before(x: Tensor) -> Tensor:
    rows = [x[:, 0]]
    for t in range(1, x.shape[1]):
        rows.append(x[:, :t].amax(1))
    return torch.stack(rows, 1)


def a_loop_over_prefixes_of_blocks(x: Tensor) -> Tensor:
    rows = []
    for start in range(0, x.shape[1], 4):
        end = min(start + 4, x.shape[1])
        rows.append((x[:, start:end] @ x[:, :end].mT).softmax(-1) @ x[:, :end])
    return torch.cat(rows, 1)


def a_loop_that_breaks(x: Tensor) -> Tensor:
    state = x.new_zeros(len(x), 8)
    for t in range(x.shape[1]):
        state = torch.tanh(state + x[:, t])
        if t >= 5:
            break
    return state


def a_state_over_chunks(x: Tensor) -> Tensor:
    state = x.new_zeros(len(x), 8)
    for part in x.chunk(4, 1):
        state = torch.tanh(state + part.sum(1))
    return state


def a_set(x: Tensor) -> Tensor:
    return x * len({x.shape[1], 5})


FIXED = {
    a_loop: "compute all steps at once there, with tensors such as torch.arange",
    a_loop_over_prefixes: r"masked_fill\(torch.arange\(size\) > t, -torch.inf\)",
    a_loop_over_what_was_before: r"masked_fill\(torch.arange\(size\) >= t, -torch.inf\)",
    a_loop_over_prefixes_of_blocks: r"masked_fill\(torch.arange\(size\) >= end, -torch.inf\)",
    a_loop_that_breaks: r"in the place of break .* state = torch.where\(done, state, new\)",
    a_set: "compare sizes with == there, as a set, a dict and functools.cache look up numbers",
}


@pytest.mark.parametrize("function", FIXED, ids=lambda function: function.__name__)
def test_a_size_that_is_a_constant_after_all_is_told_with_what_helps(function: Any) -> None:
    name = function.__name__
    with pytest.raises(CaptureError, match=FIXED[function]) as refused:
        capture(Calls(function), (X,), dynamic_shapes=DIMS)
    assert "(dim 'seq') can't be dynamic: the model fixes it to 16 at " in str(refused.value)
    assert "test_sizes_in_python.py" in str(refused.value), name
    captured = capture(Calls(function), (X,), dynamic_shapes=AUTO)
    notes = [note for note in captured.notes if "axis 1 stays 16" in note]
    assert any(re.search(FIXED[function], note) for note in notes)
    assert captured.graph.inputs[0].shape[1] == 16


def test_an_axis_of_equal_parts_takes_its_multiples() -> None:
    """As the sentence on chunks says."""
    said = r"fixes it to 16 at .* ask for the multiples of 4 alone, as by 4 \* Dim\('part'\)"
    with pytest.raises(CaptureError, match=said):
        capture(Calls(a_state_over_chunks), (X,), dynamic_shapes=DIMS)
    dims = ({0: Dim("batch"), 1: 4 * Dim("part")},)
    module = Calls(a_state_over_chunks).eval()
    optimized = attngraph.optimize(module, (X,), dynamic_shapes=dims)
    for length in (4, 8, 20):
        x = torch.randn(2, length, 8)
        torch.testing.assert_close(optimized(x), module(x))


def test_the_advice_holds() -> None:
    def steps_at_once(x: Tensor) -> Tensor:
        return x[:, torch.arange(x.shape[1])]

    def compared(x: Tensor) -> Tensor:
        return x * (2 if x.shape[1] == 16 else 3)

    def prefixes_of_blocks(x: Tensor) -> Tensor:
        rows, size = [], x.shape[1]
        for start in range(0, size, 4):
            end = min(start + 4, size)
            scores = x[:, start:end] @ x.mT
            scores = scores.masked_fill(torch.arange(size) >= end, -torch.inf)
            rows.append(scores.softmax(-1) @ x)
        return torch.cat(rows, 1)

    def done_at_some_step(x: Tensor) -> Tensor:
        state, done = x.new_zeros(len(x), 8), torch.zeros((), dtype=torch.bool)
        for t in range(x.shape[1]):
            new = torch.tanh(state + x[:, t])
            state = torch.where(done, state, new)
            done = done | (t >= 5)
        return state

    replaced = {
        prefixes_of_blocks: a_loop_over_prefixes_of_blocks,
        done_at_some_step: a_loop_that_breaks,
    }
    for function, written in replaced.items():
        module = Calls(function).eval()
        optimized = attngraph.optimize(module, (X,), dynamic_shapes=DIMS)
        for length in (1, 5, 16, 23):
            x = torch.randn(3, length, 8)
            torch.testing.assert_close(optimized(x), written(module.linear(x)))
    assert not capture(Calls(steps_at_once), (X,), dynamic_shapes=DIMS).notes
    other = torch.randn(3, 12, 8)
    captured = capture(Calls(compared), (other,), dynamic_shapes=AUTO)
    assert not any("stays" in note for note in captured.notes)


class Cached(nn.Module):
    """Keeps its table of the last length, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.length, self.table = None, torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != self.length:
            self.length, self.table = x.shape[1], torch.arange(x.shape[1])[:, None]
        return x + self.table


@torch.no_grad()
def test_a_table_of_an_earlier_call_fixes_no_size() -> None:
    module = Cached()
    module(X)
    found = capture(module, (X,), dynamic_shapes=AUTO)
    assert not found.notes
    for length in (1, 16, 21):
        x = torch.randn(2, length, 8)
        torch.testing.assert_close(interpret(found.graph, [x]), (module(x),))


def test_what_numpy_alone_computes_of_a_size_is_told_with_what_helps() -> None:
    class Places(nn.Module):
        def forward(this, x: Tensor) -> Tensor:
            places = np.unwrap(np.sin(np.arange(x.shape[1]) / 7.0))
            return x + torch.from_numpy(places).float()[:, None]

    x = torch.randn(2, 6, 4)
    with pytest.raises(CaptureError, match=r"test_sizes_in_python.*numpy computes with numbers"):
        capture(Places(), (x,), dynamic_shapes=({1: Dim.AUTO},))


def test_values_that_numpy_reads_are_told_with_what_helps() -> None:
    """As TimesNet's period is: the place of the largest frequency."""

    def by_period(x: Tensor) -> Tensor:
        period = int(x.abs().mean((0, 2)).topk(1).indices.numpy()[0]) + 1
        return x[:, :period]

    with pytest.raises(CaptureError, match="make them int arguments"):
        capture(Calls(by_period), (X,), dynamic_shapes=DIMS)

    class Asked(nn.Module):
        def forward(self, x: Tensor, period: int) -> Tensor:
            return x[:, :period] * 2

    optimized = attngraph.optimize(Asked(), (X, 4), dynamic_shapes=({0: Dim("batch")}, None))
    torch.testing.assert_close(optimized(X, 4), X[:, :4] * 2)


def test_rows_of_a_nested_tensor_are_told_with_what_helps() -> None:
    class Nested(nn.Module):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            rows = [row[:length] for row, length in zip(x.unbind(), lengths, strict=True)]
            nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
            return torch.nested.to_padded_tensor(nested * 2, 0.0)

    inputs = (torch.randn(2, 6, 4), torch.tensor([6, 3]))
    with pytest.raises(CaptureError, match=r"lengths that are known at run time.*padded rows"):
        capture(Nested(), inputs, dynamic_shapes=({1: Dim.AUTO}, None))


def test_an_axis_that_became_a_constant_is_told_where_others_then_fail() -> None:
    class Lengths(nn.Module):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            keep = torch.zeros(x.shape[:2])
            for row, length in enumerate(lengths.tolist()):
                keep[row, :length] = 1
            return x * keep[..., None]

    inputs = (torch.randn(2, 6, 4), torch.tensor([6, 3]))
    shapes = ({0: Dim.AUTO, 1: Dim.AUTO}, {0: Dim.AUTO})
    with pytest.raises(UsageError, match=r"itself fails.*Input lengths's axis 0 stays 2.*a loop"):
        attngraph.optimize(Lengths(), inputs, dynamic_shapes=shapes)


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)

    def attend(self, row: Tensor) -> Tensor:
        return (self.query(row[None]) @ row.mT).softmax(-1) @ row

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(self.attend)(x)


class MappedWithin(Mapped):
    """By torch's operator itself, which no rewording reaches."""

    def attend(self, row: Tensor) -> Tensor:
        query: Tensor = torch.ops.aten.linear(row[None], self.query.weight, self.query.bias)
        return (query @ row.mT).softmax(-1) @ row


def test_a_linear_under_vmap_keeps_sizes_open() -> None:
    module = Mapped().eval()
    optimized = attngraph.optimize(module, (X,), dynamic_shapes=DIMS)
    for size in ((1, 3, 8), (4, 9, 8)):
        x = torch.randn(size)
        with torch.no_grad():
            torch.testing.assert_close(optimized(x), module(x))


def test_an_axis_that_vmap_adds_is_told_and_is_traced_at_one_size() -> None:
    module = MappedWithin().eval()
    with pytest.raises(CaptureError, match=r"as under torch\.vmap\. Leave the dims static"):
        capture(module, (X,), dynamic_shapes=DIMS)
    with torch.no_grad():
        torch.testing.assert_close(attngraph.optimize(module, (X,))(X), module(X))
