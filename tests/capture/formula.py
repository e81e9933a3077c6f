"""What the tests of capture share: the suite's models, captured once, and formulas as modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from attngraph.frontend.capture import Captured, capture
from attngraph.ir import Graph, format_graph, interpret, parse, verify
from tests.models import CASES, KEPT, Built
from tests.products import Summed

BATCH, SEQ = Dim("batch"), Dim("seq")

BOTH = {0: BATCH, 1: SEQ}


@functools.cache
def built(name: str) -> Built:
    return next(case for case in (*CASES, *KEPT) if case.name == name).build()


@functools.cache
def captured(name: str, dynamic: bool) -> Captured:
    model = built(name)
    return capture(
        model.module, model.args, dynamic_shapes=model.dynamic_shapes if dynamic else None
    )


def eager(module: nn.Module, *args: Any, **kwargs: Any) -> list[Tensor]:
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            leaves = pytree.tree_leaves(module(*args, **kwargs))
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def assert_identical(actual: Any, expected: Any) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def assert_eager(graph: Graph, module: nn.Module, *args: Any) -> None:
    """The interpreter gives what eager gives: bit for bit where nothing is multiplied and summed.

    A graph has no strides, so where something is, a library may sum it in another order.
    """
    tensors = [leaf.clone() for leaf in args if isinstance(leaf, Tensor)]
    with Summed() as summed:
        expected = eager(module, *args)
    for actual, wanted in zip(interpret(graph, tensors), expected, strict=True):
        within = summed.distance(wanted.dtype) if wanted.dtype.is_floating_point else 0.0
        if not within:
            assert_identical([actual], [wanted])
            continue
        assert actual.dtype == wanted.dtype
        finite = wanted.isfinite()
        assert_identical([actual[~finite]], [wanted[~finite]])
        distance = (actual[finite].double() - wanted[finite].double()).norm()
        assert distance <= within * wanted[finite].double().norm()


class Formula(nn.Module):
    """A module whose forward is a function of itself and up to two inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(9, 9)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("steps", torch.ones(1))

    def forward(self, x: Tensor, y: Any = None) -> Any:
        return self.function(self, x, y)


def states(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


X = states(3, 9)


def check(
    function: Callable[..., Any], *args: Any, dims: Any = None, further: Any = None
) -> Captured:
    """Captures a formula, verifies its graph, and compares it with eager, at `further` too."""
    module = Formula(function).eval()
    result = capture(module, args, dynamic_shapes=dims)
    verify(result.graph)
    text = format_graph(result.graph)
    assert format_graph(parse(text)) == text
    for inputs in [args] if further is None else [args, further]:
        assert_eager(result.graph, module, *inputs)
    return result


def ops(result: Captured) -> list[str]:
    return [node.op for node in result.graph]
