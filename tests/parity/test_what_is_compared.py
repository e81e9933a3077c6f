"""What is no pass: other traces, rows that nobody compared, and results without a number."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.checks.check import Check
from attngraph.checks.traced import trace_differs
from attngraph.errors import CaptureError, ParityError, UsageError
from attngraph.export.formats import Weights
from attngraph.export.parity.budget import compare
from attngraph.frontend.model import Model, trace
from attngraph.ir import interpret


def test_a_trace_that_is_another_function_is_told_from_a_wrong_pass() -> None:
    class Otherwise(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.softmax(-1) * (1.01 if torch.compiler.is_compiling() else 1.0)

    with pytest.raises(ParityError, match=r"what torch\.export traced of Otherwise") as caught:
        attngraph.optimize(Otherwise(), (torch.randn(4, 9),))
    assert "No pass is to blame" in str(caught.value)
    assert "Nothing was written" in str(caught.value)


class _Compares(torch.nn.Module):
    """Its own code asks whether two lengths are equal, which changes the result by a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        scores = x @ context.mT
        if x.shape[1] == context.shape[1]:
            scores = scores * self.factor
        return scores.softmax(-1) @ context


def test_a_trace_is_checked_where_dims_it_took_for_unequal_are_equal() -> None:
    args = (torch.randn(2, 5, 4), torch.randn(2, 7, 4))
    dims = ({1: Dim("seq", max=64)}, {1: Dim("context", max=64)})
    optimized = attngraph.optimize(_Compares(2.0), args, dynamic_shapes=dims)
    assert optimized.report.relations == ["context ≠ seq"]
    with pytest.raises(UsageError, match="compiled for sizes with context ≠ seq"):
        optimized(torch.randn(2, 7, 4), args[1])
    optimized = attngraph.optimize(_Compares(1.0), args, dynamic_shapes=dims)
    assert optimized.report.parity is not None
    assert "seq=7, context=7" in {output.case for output in optimized.report.parity.outputs}


class _Near(torch.nn.Module):
    """Attends to the token before and to itself, by a score for each."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        key, value = self.linear(x).chunk(2, -1)
        length = x.shape[1]
        keys, values = (
            torch.stack((nn.functional.pad(each, (0, 0, 1, 0))[:, :length], each), 2)
            for each in (key, value)
        )
        scores = (x[:, :, None] * keys).sum(-1)
        first = (torch.arange(length) < 1)[:, None] & (torch.arange(2) < 1)
        weights = scores.masked_fill(first, -torch.inf).softmax(-1)
        return (weights[..., None] * values).sum(2)


def test_a_file_is_checked_where_it_divides_a_size_into_several_parts() -> None:
    """A window is compiled in blocks of queries, of which small samples fill one."""
    args, dims = (torch.randn(2, 5, 4),), ({1: Dim("seq", max=500)},)
    found = attngraph.optimize(_Near(), args, dynamic_shapes=dims)
    assert found.report.parity is not None
    cases = {output.case for output in found.report.parity.outputs}
    lengths = {int(length) for case in cases for length in re.findall(r"seq=(\d+)", case)}
    assert max(lengths) > 32
    bounded = attngraph.optimize(_Near(), args, dynamic_shapes=({1: Dim("seq", max=20)},))
    assert bounded.report.parity is not None
    assert not any(
        re.search(r"seq=(2[1-9]|[3-9]\d)", o.case) for o in bounded.report.parity.outputs
    )


class _Patches(torch.nn.Module):
    """Patches of an image as tokens, and as an image again for a convolution of each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, 4)
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Conv2d(8, 8, 3, 1, 1, groups=8)

    def forward(self, image: Tensor) -> Tensor:
        patches = self.embed(image)
        batch, channels, height, width = patches.shape
        tokens = self.norm(patches.flatten(2).transpose(1, 2))
        back = tokens.transpose(1, 2).view(batch, channels, height, width)
        return self.mix(back).flatten(2).transpose(1, 2)


def test_dims_that_inputs_have_multiples_of_are_given_other_sizes_too() -> None:
    """One column of patches, which torch.export takes for a case of its own, is right too."""
    torch.manual_seed(0)
    model = _Patches().eval()
    rows, columns = 4 * Dim("rows", min=1, max=16), 4 * Dim("columns", min=1, max=16)
    optimized = attngraph.optimize(
        model, (torch.randn(2, 3, 8, 12),), dynamic_shapes=({2: rows, 3: columns},)
    )
    assert optimized.report.parity is not None
    cases = {output.case for output in optimized.report.parity.outputs}
    assert len({case for case in cases if "rows=2" not in case and "columns=3" not in case}) > 1
    assert optimized.report.relations == []
    image = torch.randn(2, 3, 12, 4)
    assert torch.allclose(optimized(image), model(image), atol=1e-5)


class _Sparse(torch.nn.Module):
    """A sparse buffer, as Whisper's alignment heads are; forward reads it or doesn't."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("chosen", torch.eye(4).to_sparse())
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.chosen
        assert isinstance(chosen, Tensor)
        out: Tensor = self.linear(x)
        return out @ chosen.to_dense() if self.reads else out


def test_a_sparse_buffer_is_let_be_or_refused_by_name() -> None:
    optimized = attngraph.optimize(_Sparse(False), (torch.randn(3, 4),))
    assert optimized.report.parity is not None
    with pytest.raises(CaptureError, match="chosen is a sparse tensor"):
        attngraph.optimize(_Sparse(True), (torch.randn(3, 4),))


def test_a_sparse_input_is_refused_by_name() -> None:
    class Sums(nn.Module):
        def forward(self, x: Tensor, places: Tensor) -> Tensor:
            return torch.sparse.mm(places, x)

    with pytest.raises(CaptureError, match="Input places is a sparse tensor"):
        attngraph.optimize(Sums(), (torch.randn(4, 3), torch.eye(4).to_sparse()))


def test_a_derived_dim_has_its_size_in_every_case() -> None:
    class Ahead(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            keys, queries = torch.arange(x.shape[1]), torch.arange(y.shape[1])[:, None]
            later = keys > queries + x.shape[1] - y.shape[1]
            return (y @ x.mT).masked_fill(later, -torch.inf).softmax(-1) @ x

    batch, seq = Dim("batch"), Dim("seq")
    args = torch.randn(3, 9, 4), torch.randn(3, 7, 4)
    shapes = {0: batch, 1: seq + 2}, {0: batch, 1: seq}
    optimized = attngraph.optimize(Ahead().eval(), args, dynamic_shapes=shapes)
    assert [site.status for site in optimized.report.sites] == ["fused"]
    assert optimized.report.parity is not None
    assert optimized.report.parity.passed


def test_weights_without_numbers_are_named() -> None:
    module, x = nn.Linear(4, 4, device="meta"), torch.zeros(2, 4, device="meta")
    with pytest.raises(UsageError, match="weight of Linear is on the meta device"):
        attngraph.optimize(module, (x,))


class ByHand(nn.Module):
    """exp(x) / Σ exp(x): not a number where a caller's bias hides a whole row, as eager has it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        exponentials = (q @ k.mT * 0.3 + bias).exp()
        return exponentials / exponentials.sum(-1, keepdim=True) @ v


@pytest.mark.parametrize("length", [4, 40])
def test_a_row_that_a_caller_may_hide_is_tried_at_large_static_sizes_too(length: int) -> None:
    inputs = [torch.randn(2, 4, length, 6) for _ in range(3)]
    bias = torch.zeros(2, 1, length, length)
    optimized = attngraph.optimize(ByHand(), (*inputs, bias))
    assert [site.code for site in optimized.report.sites] == ["no-softmax"]
    bias[1, 0, 2] = torch.finfo(torch.float32).min
    expected = ByHand()(*inputs, bias)
    assert expected.isnan().any()
    torch.testing.assert_close(optimized(*inputs, bias), expected, equal_nan=True)


class _Masked(nn.Module):
    def forward(self, q: Tensor, mask: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, q, q, mask)


@pytest.mark.parametrize("is_costly", [False, True])
def test_hidden_rows_that_a_large_model_leaves_out_are_told(
    is_costly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_costly:
        monkeypatch.setattr("attngraph.checks.cases._MOST_WORK", -1)
    args = torch.randn(1, 2, 6, 8), torch.ones(6, 6, dtype=torch.bool)
    report = attngraph.optimize(_Masked(), args).report
    told = [note for note in report.notes if "a row hidden" in note and "smaller sample" in note]
    assert bool(told) == is_costly


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_a_model_that_returns_no_number_is_not_passed(
    broken: float, weights: Weights | None
) -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.LayerNorm(64)).eval()
    with torch.no_grad():
        module[2].weight[:, 3] = broken
    told = r"There is (NaN|infinity) in 64 of 4096 elements of the weight 2\.weight, and Sequential"
    with pytest.raises(ParityError, match=told) as caught:
        attngraph.optimize(module, (torch.randn(4, 64),), weights=weights)
    assert str(caught.value).endswith("Nothing was written.")


class _Spare(nn.Module):
    """A table with a row for each id below 40000, and a mask of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.unread = nn.Embedding(40000, 4), nn.Linear(4, 4)
        self.hidden: Tensor
        self.register_buffer("hidden", torch.full((6, 6), -torch.inf).triu(1))
        self.spare = nn.Parameter(torch.full((6,), -torch.inf), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        weights = (x @ x.mT + self.hidden).softmax(-1)
        return weights @ x


def test_a_weight_without_numbers_is_told_where_no_output_shows_it() -> None:
    module = _Spare().eval()
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        module.unread.weight.fill_(torch.nan)  # nothing reads it: nothing to say
    assert not [n for n in attngraph.optimize(module, (ids,)).report.notes if "There is" in n]
    with torch.no_grad():
        module.table.weight[20001, 1] = torch.nan
    told = "There is NaN in 1 of 160000 elements of the weight table.weight"
    for verify, end in (("final", "no output of what was checked has any"), ("off", "nothing was")):
        notes = attngraph.optimize(module, (ids,), verify=verify).report.notes
        assert any(note.startswith(told) and end in note for note in notes)
    with pytest.raises(ParityError, match=told):
        attngraph.optimize(module, (ids + 19995,))


def test_a_sample_that_gives_no_number_is_refused_and_one_element_is_enough() -> None:
    x = torch.full((2, 5, 8), torch.nan)
    with pytest.raises(ParityError, match="Give sample inputs on which it returns numbers"):
        attngraph.optimize(nn.Linear(8, 8), (x,))
    x[0, 0] = 1.0
    parity = attngraph.optimize(nn.Linear(8, 8), (x,)).report.parity
    assert parity is not None
    assert parity.worst.compared == 8


class _HidesAll(nn.Module):
    """Two attentions whose masks leave each token hidden in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.ff = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for hidden in (mask != 0, mask == 0):
            scores = (x @ x.mT).masked_fill(hidden[:, None], torch.finfo(x.dtype).min)
            x = self.norm(x + self.ff(scores.softmax(-1) @ x))
        return x


def test_rows_that_are_all_padding_are_no_pass() -> None:
    args = (torch.randn(2, 8, 16), torch.ones(2, 8, dtype=torch.int64))
    with pytest.raises((ParityError, UsageError), match=r"padding|padded"):
        attngraph.optimize(_HidesAll().eval(), args, ignore_padded_rows=True)


class Summed(nn.Module):
    """The sum over the last axis, at once, or one element after the other."""

    def __init__(self, *, at_once: bool, factor: float = 1.0) -> None:
        super().__init__()
        self.at_once = at_once
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        if self.at_once:
            return x.sum(-1)
        total = x[..., 0] * self.factor
        for place in range(1, x.shape[-1]):
            total = total + x[..., place]
        return total


def test_rounding_in_half_is_not_called_another_trace() -> None:
    args = (torch.rand(4, 64, 128, generator=torch.Generator().manual_seed(0)).half(),)
    model = Model(Summed(at_once=True), None, args, {}, None, "Summed")
    check = Check(model, trace(model), "fp16")
    slow = attngraph.capture(Summed(at_once=False), args)
    exact, halves = check.references(args), interpret(slow, args)
    assert not compare(exact, halves, "fp16").passed
    assert trace_differs(check, slow) == ""
    other = attngraph.capture(Summed(at_once=False, factor=1.25), args)
    assert "already differs from it at sample" in trace_differs(check, other)
