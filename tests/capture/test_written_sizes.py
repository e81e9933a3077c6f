"""A size that is written into a text by `%` stays one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from attngraph import optimize
from attngraph.errors import CaptureError


class Masked(nn.Module):
    """Causal attention whose masks are kept, each under a text of its length."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[str, Tensor] = {}
        self.said = ""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        self.said = "%d of %d in %s" % (n, x.shape[0], x.shape)  # noqa: UP031
        key = "mask_%04d" % n  # noqa: UP031
        if key not in self.masks:
            self.masks[key] = torch.ones(n, n, dtype=torch.bool).tril()
        return (x @ x.mT).masked_fill(~self.masks[key], -1e9).softmax(-1) @ x


class Tabled(nn.Module):
    """Whether there is a table for the length decides what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.known = {"size %d" % n: n for n in (5, 9)}  # noqa: UP031

    def forward(self, x: Tensor) -> Tensor:
        return x * self.known.get("size %i" % x.shape[1], 1)  # noqa: UP031


@pytest.mark.parametrize("called", [False, True])
def test_a_key_of_a_table_is_of_any_size(called: bool) -> None:
    """A mask that an earlier call left for the sample's length is not that of all lengths."""
    model, x = Masked().eval(), torch.randn(2, 9, 4)
    if called:
        model(x)
    shapes = ({0: Dim("batch", max=8), 1: Dim("length", max=64)},)
    optimized = optimize(model, (x,), dynamic_shapes=shapes)
    for length in (1, 2, 9, 30):
        x = torch.randn(3, length, 4)
        torch.testing.assert_close(optimized(x), model(x), atol=1e-5, rtol=1e-5)


def test_a_number_that_the_text_chooses_is_refused() -> None:
    with pytest.raises(CaptureError, match="fixes it to 9 at"):
        optimize(Tabled(), (torch.randn(2, 9, 4),), dynamic_shapes=({1: Dim("length", max=64)},))
