"""Checks of a model's own on values: a trace follows the side that doesn't raise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.errors import CaptureError, UsageError
from attngraph.frontend.capture import capture

pytestmark = pytest.mark.wide


class Checked(nn.Module):
    """Attention behind a check of its inputs."""

    def __init__(self, check: Callable[[Tensor, Tensor], Tensor | None]) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)
        self.check = check

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        scale = self.check(x, keep)
        q = self.query(x)
        mixed: Tensor = (q @ x.mT).masked_fill(~keep[:, None], -1e9).softmax(-1) @ x
        return mixed if scale is None else mixed * scale


def _any(x: Tensor, keep: Tensor) -> None:
    if torch.isnan(x).any():
        raise ValueError("NaN")


def _range(x: Tensor, keep: Tensor) -> None:
    if torch.min(x) < -100 or torch.max(x) > 100:
        raise ValueError("out of range")


def _negated(x: Tensor, keep: Tensor) -> None:
    if not keep.any(-1).all():
        worst = keep.sum(-1).min()
        raise ValueError(f"{worst} keys")


def _number(x: Tensor, keep: Tensor) -> None:
    if keep.sum().item() == 0:
        raise ValueError("no keys")


def _lines(x: Tensor, keep: Tensor) -> None:
    if (
        x.isinf().any()
        or x.isnan().any()
    ):  # fmt: skip
        raise ValueError("unusable")


def _other_side(x: Tensor, keep: Tensor) -> Tensor:
    if x.abs().max() < 1e4:
        scale = x.new_full((), 2.0)
    else:
        raise ValueError("too large")
    return scale


CHECKS = (_any, _range, _negated, _number, _lines, _other_side)


def _sample(batch: int, seq: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(batch, seq, 8, generator=torch.Generator().manual_seed(seq))
    return x, torch.arange(seq).expand(batch, seq) < torch.arange(batch)[:, None] + 1


def _compiled(module: nn.Module) -> attngraph.Optimized:
    dims = {0: Dim("batch"), 1: Dim("seq")}
    return attngraph.optimize(module.eval(), _sample(3, 7), dynamic_shapes=(dims, dims))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_side_that_raises_is_left_out(check: Callable[[Tensor, Tensor], Tensor | None]) -> None:
    module = Checked(check)
    optimized = _compiled(module)
    assert any("the file doesn't check them" in note for note in optimized.report.notes)
    for batch, seq in ((1, 1), (2, 5), (4, 12)):
        inputs = _sample(batch, seq)
        torch.testing.assert_close(optimized(*inputs), module(*inputs))


def _chosen(x: Tensor, keep: Tensor) -> Tensor | None:
    """No check: the side that ends in an error may return before it."""
    if keep.all():
        if x.shape[-1] == 8:
            return x.new_full((), 2.0)
        raise ValueError("never")
    return None


def _followed(x: Tensor, keep: Tensor) -> Tensor | None:
    """A check, and a choice behind it."""
    if x.isnan().any():
        raise ValueError("NaN")
    return x.new_full((), 2.0) if keep.all() else None


@pytest.mark.parametrize("check", [_chosen, _followed], ids=lambda check: check.__name__)
def test_a_choice_is_made_by_the_file(check: Callable[[Tensor, Tensor], Tensor | None]) -> None:
    module = Checked(check)
    optimized = _compiled(module)
    (note,) = (note for note in optimized.report.notes if "computes both sides" in note)
    assert "keep.all()" in note
    x, keep = _sample(3, 7)
    for given in (keep, torch.ones_like(keep)):
        torch.testing.assert_close(optimized(x, given), module(x, given))


def _of_type(x: Tensor, keep: Tensor) -> None:
    if type(x) is not torch.Tensor:
        raise TypeError("no tensor")


def _of_number(x: Tensor, keep: Tensor) -> None:
    if type(x.shape[1]) is not int: raise TypeError("no number")  # fmt: skip  # noqa: E701


@pytest.mark.parametrize("check", [_of_type, _of_number], ids=lambda check: check.__name__)
def test_types_are_those_of_a_run(check: Callable[[Tensor, Tensor], None]) -> None:
    """A trace has a class of tensors and one of sizes of its own."""
    module = Checked(check)
    optimized = _compiled(module)
    inputs = _sample(2, 5)
    torch.testing.assert_close(optimized(*inputs), module(*inputs))


def test_what_only_a_trace_raises_says_so() -> None:
    class Traced(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if torch._C._len_torch_dispatch_stack() > 0:
                raise RuntimeError("in a mode")
            return x.softmax(-1)

    with pytest.raises(CaptureError, match=r"in a mode\. In a trace the model raises this"):
        capture(Traced(), (torch.randn(2, 3),))


def _unless_exported(x: Tensor, keep: Tensor) -> None:
    if torch.compiler.is_exporting():
        raise NotImplementedError("not for export")


def _of_the_mask(x: Tensor, keep: Tensor) -> None:
    """A mask that only a trace makes, of another size than the scores."""
    size = x.shape[1] + 1 if torch.compiler.is_compiling() else x.shape[1]
    if keep.new_ones(size).shape != keep.shape[1:]:
        raise ValueError("a mask of another size")


@pytest.mark.parametrize("check", [_unless_exported, _of_the_mask])
def test_what_only_a_trace_is_asked_for_is_left_out(
    check: Callable[[Tensor, Tensor], None],
) -> None:
    module = Checked(check)
    optimized = _compiled(module)
    for batch, seq in ((1, 1), (2, 5), (4, 12)):
        inputs = _sample(batch, seq)
        torch.testing.assert_close(optimized(*inputs), module(*inputs))


def _view(x: Tensor) -> Tensor:
    try:
        return x.mT.view(x.shape[0], -1)
    except RuntimeError:
        return x.mT.reshape(x.shape[0], -1)


def _in_place(x: Tensor) -> Tensor:
    y = x * 2
    try:
        return y.add_(torch.zeros(7))
    except RuntimeError:
        return y + 1


def _blocks(x: Tensor) -> Tensor:
    try:
        return x.view(x.shape[0], -1, 3, 8).sum(2)
    except RuntimeError:
        return x[:, :1]


class Catches(nn.Module):
    def __init__(self, tries: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.tries = tries

    def forward(self, x: Tensor) -> Tensor:
        return self.tries(x.softmax(-1) @ x.mT @ x)


@pytest.mark.parametrize("tries", [_view, _in_place, _blocks])
def test_what_fails_and_is_caught_is_left_out(tries: Callable[[Tensor], Tensor]) -> None:
    """As in a run; where it depends on a size, the file takes the sizes at which it fails."""
    module = Catches(tries)
    shapes = ({0: "batch", 1: "seq"},)
    optimized = attngraph.optimize(module, (torch.randn(2, 8, 8),), dynamic_shapes=shapes)
    for seq in (1, 3, 5, 9):
        x = torch.randn(3, seq, 8)
        if tries is _blocks and seq % 3 == 0:
            with pytest.raises(UsageError, match="compiled for sizes with"):
                optimized(x)
        else:
            torch.testing.assert_close(optimized(x), module(x))


class Tells(nn.Module):
    """Puts numbers into text, with a format."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x.softmax(-1) @ x.mT
        self.text = f"{y.mean():.3f} of {y.shape[1]:3d}, {y.shape[0] / 2:.1f}"
        return y


def test_a_number_in_a_text_is_no_choice() -> None:
    shapes = ({0: "batch", 1: "seq"},)
    optimized = attngraph.optimize(Tells(), (torch.randn(2, 5, 8),), dynamic_shapes=shapes)
    x = torch.randn(3, 9, 8)
    torch.testing.assert_close(optimized(x), Tells()(x))
