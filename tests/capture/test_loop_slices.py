"""Slices that a loop's step takes in other words: in a comprehension, or in a function."""

from __future__ import annotations

import ast
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.errors import CaptureError
from attngraph.frontend.rewording.loop_spellings import spelled
from attngraph.frontend.tracing import tracing

SIZE, WIDTH = 4, 8
LENGTHS = (1, 2, SIZE - 1, SIZE, SIZE + 1, 3 * SIZE + 2)


class Steps(nn.Module):
    def __init__(self, code: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(*self.project(x).chunk(3, -1))


def _check(code: Callable[[Tensor, Tensor, Tensor], Tensor], sample: int) -> None:
    torch.manual_seed(0)
    model = Steps(code).eval()
    dims = ({1: Dim("length")},)
    found = attngraph.optimize(model, (torch.randn(2, sample, WIDTH),), dynamic_shapes=dims)
    for length in LENGTHS:
        x = torch.randn(2, length, WIDTH)
        torch.testing.assert_close(found(x), model(x), rtol=1e-5, atol=1e-5)


def _of_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state, found = torch.zeros(q.shape[0], WIDTH, WIDTH), []
    for t in range(q.shape[1]):
        query, key = (each[:, t] for each in (q, k))
        key, value = [0.5 * each for each in (key, v[:, t])]
        state = state + key[:, :, None] * value[:, None]
        found.append((query[:, None] @ state)[:, 0])
    return torch.stack(found, 1)


def test_rows_of_each_of_a_few_tensors() -> None:
    _check(_of_rows, 5)


def _of_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state, found = torch.zeros(q.shape[0], WIDTH, WIDTH), []
    for at in range(0, q.shape[1], SIZE):
        query, key, value = (each[:, at : at + SIZE] for each in (q, k, v))
        found.append(query @ state + (query @ key.mT).tril() @ value)
        state = state + key.mT @ value
    return torch.cat(found, 1)


@pytest.mark.wide
@pytest.mark.parametrize(("sample", "most"), [(14, 2), (12, 4)])
def test_blocks_of_each_of_a_few_tensors(sample: int, most: int) -> None:
    """Of a sample with a part one trace that fails and one that doesn't: no other size helps."""
    with patch.object(tracing, "export", wraps=tracing.export) as export:
        _check(_of_blocks, sample)
    assert export.call_count <= most


def _part(x: Tensor, at: int) -> Tensor:
    return x[:, at : at + SIZE]


def _of_blocks_by_a_function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state, found = torch.zeros(q.shape[0], WIDTH, WIDTH), []
    for at in range(0, q.shape[1], SIZE):
        query, key, value = _part(q, at), _part(k, at), _part(v, at)
        found.append(query @ state + (query @ key.mT).tril() @ value)
        state = state + key.mT @ value
    return torch.cat(found, 1)


def _of_whole_blocks_by_a_function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rest = -q.shape[1] % SIZE
    padded = [nn.functional.pad(each, (0, 0, 0, rest)) for each in (q, k, v)]
    return _of_blocks_by_a_function(*padded)[:, : q.shape[1]]


@pytest.mark.wide
def test_parts_of_several_sizes_that_a_function_cuts_are_refused() -> None:
    """The sample has whole blocks only, of which a scan gives as many rows in each step."""
    with pytest.raises(CaptureError, match=r"fixes it to 12 at .*for at in range"):
        _check(_of_blocks_by_a_function, 12)


@pytest.mark.wide
def test_parts_of_one_size_that_a_function_cuts() -> None:
    _check(_of_whole_blocks_by_a_function, 12)


def _spelled(step: str) -> str:
    function = ast.parse(f"def code(a, b, n):\n    for t in range(n):\n        {step}").body[0]
    assert isinstance(function, ast.FunctionDef)
    return ast.unparse(spelled(function, "helpers").body[-1]).splitlines()[-1].strip()


@pytest.mark.parametrize(
    ("step", "written"),
    [
        ("q, k = (x[t] for x in (a, self.b))", "q, k = (a[t], self.b[t])"),
        ("q = [f(x, x) for x in [a, b]]", "q = [f(a, a), f(b, b)]"),
        ("q, k = map(lambda x: x[t], (a, b))", "q, k = (a[t], b[t])"),
    ],
)
def test_what_is_made_of_each(step: str, written: str) -> None:
    assert _spelled(step) == written


@pytest.mark.parametrize(
    "step",
    [
        "q, k = (x[t] for x in parts)",
        "q, k = (x[t] for x in (a, f(b)))",  # which is called once
        "q, k = (x[t] for x in (a, *b))",
        "q, k = (x[t] for x in (a, b) if x is not None)",
        "q, k = ((a := x[t]) for x in (b, a))",
        "q, k = ([x for x in y] for y in (a, b))",
        "q = (x[t] for x in (a, b))",  # which may be left before its end
        "q = [x[y] for x in (a, b) for y in (0, 1)]",
        "q, k = map(lambda x, y=1: x[y], (a, b))",
        "q, k = map(self.part, (a, b))",
    ],
)
def test_what_stays_a_comprehension(step: str) -> None:
    assert _spelled(step) == step
