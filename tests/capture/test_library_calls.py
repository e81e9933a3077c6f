"""A library that makes numbers of sizes: what it does at every size is traced, the rest is told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from attngraph.frontend.capture import capture
from attngraph.ir import interpret

LIBRARY = """
import functools, torch

@functools.cache
def code(pattern, *shapes):
    if pattern == "where":
        (b, n), (same_b, same_n, d) = shapes
        assert (b, n) == (same_b, same_n), "axes of two sizes"
        return lambda mask, x: torch.where(mask.reshape(b, n, 1), x, torch.zeros(1, 1, d))
    (b, n, d), = shapes
    made = {
        "rows": lambda x: x.reshape(b * n, d),
        "distances": lambda x: x + (torch.arange(n) - torch.arange(n + 2)[2:]).reshape(1, n, 1),
        "halves": lambda x: torch.cat([x[:, n // 2 :], x[:, : n // 2]], 1),
        "many": lambda x: x + (n > 20),
        "few": lambda x: x + 1 if n < 8 else x,
        "loop": lambda x: sum((x[:, i : i + 1] for i in range(n)), start=x),
    }
    return made[pattern]

def shape(x):
    return tuple(int(size) for size in x.shape)

def call(pattern, *tensors):
    return code(pattern, *map(shape, tensors))(*tensors)
"""


@pytest.fixture
def library() -> Iterator[Any]:
    module = ModuleType("bookofsizes")
    sys.modules[module.__name__] = module
    exec(compile(LIBRARY, "/opt/bookofsizes.py", "exec"), module.__dict__)
    yield module
    del sys.modules[module.__name__]


class Calls(nn.Module):
    def __init__(self, library: Any, pattern: str) -> None:
        super().__init__()
        self.linear, self.library, self.pattern = nn.Linear(4, 4), library, pattern

    def forward(self, *tensors: Tensor) -> Any:
        *masks, x = tensors
        return self.library.call(self.pattern, *masks, self.linear(x))


def inputs(pattern: str, batch: int, length: int) -> tuple[Tensor, ...]:
    x = torch.randn(batch, length, 4)
    return (torch.rand(batch, length) > 0.5, x) if pattern == "where" else (x,)


def captured(library: Any, pattern: str, length: int = 12) -> tuple[Calls, Any]:
    module, sample = Calls(library, pattern).eval(), inputs(pattern, 2, length)
    axes = {0: Dim.AUTO, 1: Dim.AUTO}
    return module, capture(module, sample, dynamic_shapes=(tuple(axes for _ in sample),))


@pytest.mark.parametrize("pattern", ["where", "rows", "distances"])
def test_what_a_library_does_at_every_size_keeps_its_sizes(library: Any, pattern: str) -> None:
    module, found = captured(library, pattern)
    assert len(found.graph.dims) == 2  # those of the mask and of x, which it compares, are tied
    assert any("is assumed, and checked" in note for note in found.notes)
    for batch, length in ((3, 17), (5, 2), (1, 1), (2, 12)):
        given = inputs(pattern, batch, length)
        with torch.no_grad():
            (actual,) = interpret(found.graph, list(given))
            torch.testing.assert_close(actual, module(*given))


@pytest.mark.parametrize("pattern", ["many", "few", "loop"])
def test_what_it_does_otherwise_at_other_sizes_fixes_them(library: Any, pattern: str) -> None:
    module, found = captured(library, pattern)
    (note,) = (note for note in found.notes if "axis 1 stays 12" in note)
    assert "test_library_calls.py" in note  # the model's line, not the library's
    given = inputs(pattern, 2, 12)
    with torch.no_grad():
        torch.testing.assert_close(interpret(found.graph, list(given))[0], module(*given))


def test_a_half_is_one_only_where_the_size_is_even(library: Any) -> None:
    """It is drawn at odd sizes too, at which n // 2 is no affine function of n."""
    _, found = captured(library, "halves")
    assert any("axis 1 stays 12" in note for note in found.notes)


def test_the_library_is_as_it_was_afterwards(library: Any) -> None:
    before = dict(library.__dict__)
    captured(library, "rows")
    assert library.__dict__ == before
