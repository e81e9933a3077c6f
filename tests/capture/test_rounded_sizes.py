"""Sizes that are rounded up are the same numbers, and a trace sees what they are multiples of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, guard_int
from torch.nn import functional as F

from attngraph.frontend.capture import capture
from attngraph.frontend.rounded_sizes import rounded_up
from attngraph.ir import interpret

Rounded = Callable[[int], int]
FORMS: dict[str, Rounded] = {
    "remainder of -n": lambda n: -n % 4,
    "remainder twice": lambda n: (4 - n % 4) % 4,
    "quotient of -n": lambda n: -(-n // 4) * 4 - n,
    "quotient of n": lambda n: (n + 3) // 4 * 4 - n,
    "more is taken": lambda n: (9 - 2 * n) % 4,
    "of what is left": lambda n: (7 - n % 4 - n) // 3,
    "two remainders": lambda n: (-(n % 4) - 3 * (n % 5)) % 5,
    "negative divisor": lambda n: -n % -4,
    "one": lambda n: (-n % 1) + (-n // 1),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_numbers_are_pythons(form: Rounded) -> None:
    for number in range(2, 24):
        env = ShapeEnv()
        source = torch._dynamo.source.ConstantSource("n")
        symbol = env.create_symbol(number, source, DimDynamic.DYNAMIC)
        size = env.create_symintnode(symbol, hint=number, source=source)
        with rounded_up():
            found = form(size)
        assert guard_int(found) == form(number)


class Blocks(nn.Module):
    def __init__(self, form: Rounded) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 0, self.form(x.shape[1])))
        return padded.unflatten(1, (-1, 4)).softmax(2).flatten(1, 2)[:, : x.shape[1]]


@pytest.mark.parametrize(("name", "sample"), list(zip(FORMS, (8, 9, 9, 9), strict=False)))
def test_an_axis_in_blocks_takes_every_length(name: str, sample: int) -> None:
    module, dim = Blocks(FORMS[name]), Dim("n", min=5, max=40)
    graph = capture(module, (torch.randn(2, sample, 3),), dynamic_shapes=({1: dim},)).graph
    for length in (5, 8, 9, 12, 15, 40):
        x = torch.randn(2, length, 3)
        (given,) = interpret(graph, (x,))
        torch.testing.assert_close(given, module(x))
