"""A row whose keys are all hidden is what eager makes of it, whatever hides them.

The samples hide nothing, so no check of the compiler sees such a row: that the result is right
follows from the formulas alone.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from attngraph.compiling.compiler import optimize
from tests.parity.hidden_rows import (
    WEIGHTS,
    Case,
    Weighed,
    cases,
    dynamic_shapes,
    few,
    hidden,
    sample,
)

pytestmark = pytest.mark.wide

# Logits of a few units next to a fill of 1e4 keep 10 bits behind the point: 5e-4, relative.
_ROUNDING = {"rtol": 2e-3, "atol": 2e-4}
_STRICT = {"rtol": 1e-4, "atol": 1e-5}


def _check(case: Case, *, exact: bool = False) -> None:
    module = case.module()
    optimized = optimize(
        module, sample(), dynamic_shapes=dynamic_shapes(), verify="off", exact=exact
    )
    tolerance = _ROUNDING if case.fill == "-1e4" else _STRICT
    for name, inputs in hidden():
        found = optimized.run(inputs)
        for source, ours, eager in zip(case.sources, found, module(*inputs), strict=True):
            same = torch.allclose(torch.as_tensor(ours), eager, equal_nan=True, **tolerance)
            assert same, f"{source}: {name}"


@pytest.mark.parametrize("case", few(), ids=str)
def test_a_hidden_row_is_what_eager_makes_of_it(case: Case) -> None:
    _check(case)


@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
def test_weights_of_two_masks_are_what_eager_makes_of_them(exact: bool) -> None:
    """The masks hide the same keys, complement each other, or one hides what the other leaves."""
    torch.manual_seed(0)
    module = Weighed().eval().requires_grad_(False)
    x, ids, keep = sample()
    shapes = (*dynamic_shapes(), dynamic_shapes()[0])
    optimized = optimize(
        module, (x, ids, keep, keep.float()), dynamic_shapes=shapes, verify="off", exact=exact
    )
    inputs = [given for _, given in hidden()]
    for (x, ids, first), (_, _, second) in itertools.product(inputs, inputs):
        for keep in (second, ~first):
            given = (x, ids, keep, first.float())
            expected, found = module(*given), optimized.run(given)
            for name, ours, eager in zip(WEIGHTS, found, expected, strict=True):
                same = torch.allclose(torch.as_tensor(ours), eager, equal_nan=True, **_STRICT)
                assert same, name


class _Upcast(nn.Module):
    """Scores in half precision, masked in it or in float32, and a softmax in float32."""

    def __init__(self, how: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.how, self.dtype = how, dtype

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        scores, keep = q @ k.mT / 4, keep[:, None, None]
        if self.how == "filled":
            scores = scores.masked_fill(~keep, -1e4)
        elif self.how == "filled with the lowest":
            scores = scores.masked_fill(~keep, torch.finfo(self.dtype).min)
        else:
            scores = scores.float() + torch.where(keep, 0.0, torch.finfo(torch.float32).min)
        return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v


@pytest.mark.parametrize("how", ["filled", "filled with the lowest", "added in float32"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_hidden_row_in_half_precision_is_a_mean(how: str, dtype: torch.dtype) -> None:
    """float16 has no number that absorbs every logit, and the lowest float32 is -inf in both."""
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(2, 2, 7, 16, generator=generator).to(dtype) for _ in range(3)]
    module, keep = _Upcast(how, dtype), torch.ones(2, 7, dtype=torch.bool)
    optimized = optimize(module, (*qkv, keep), verify="off")
    assert optimized.report.fused == 1
    keep[0], keep[1, 3:] = False, False
    eager = module(*qkv, keep)
    (found,) = optimized.run((*qkv, keep))
    error = (torch.as_tensor(found).float() - eager.float()).abs().max()
    assert error <= 4 * torch.finfo(dtype).eps * eager.abs().max()


def test_reductions_of_an_empty_selection_lose_the_axis() -> None:
    """onnxruntime leaves an empty axis in its place where it is counted from the last."""

    class Reduced(nn.Module):
        def forward(self, x: Tensor, shown: Tensor) -> tuple[Tensor, ...]:
            scores = x @ x[shown].mT
            total = scores.sum(-1, keepdim=True)
            return scores.exp().sum(-1), total * x, (scores > 0).any(-1), (scores < 0).all(-1)

    length = {0: Dim("length", max=64)}
    x, shown = torch.randn(7, 16), torch.tensor([True, False, True, True, False, False, True])
    optimized = optimize(Reduced(), (x, shown), dynamic_shapes=(length, length), verify="off")
    for given in (shown, torch.zeros_like(shown)):
        for found, eager in zip(optimized.run((x, given)), Reduced()(x, given), strict=True):
            torch.testing.assert_close(torch.as_tensor(found), eager, **_STRICT)


class _Weak(nn.Module):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.project, self.fill = nn.Linear(16, 48), fill

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        added = (1 - keep.to(x.dtype))[:, None] * self.fill
        return (query @ key.mT / 4 + added).softmax(-1) @ value


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_weak_fill_that_rounds_scores_away_in_eager_is_told(dtype: torch.dtype) -> None:
    """Scores beside -1e4 have no digits in bf16: a hidden row is the mean in eager, and in float64
    what its scores give."""
    x, keep = torch.randn(2, 7, 16).to(dtype), torch.ones(2, 7, dtype=torch.long)
    told = [
        "in output_0 at batch=" in note and "held to float64" in note for note in _notes(x, keep)
    ]
    assert any(told) is (dtype is not torch.float32)


def _notes(x: Tensor, keep: Tensor) -> list[str]:
    torch.manual_seed(0)
    batch, length = Dim("batch", max=64), Dim("length", max=64)
    shapes = ({0: batch, 1: length},) * 2
    return optimize(_Weak(-1e4).to(x.dtype).eval(), (x, keep), dynamic_shapes=shapes).report.notes


@pytest.mark.parametrize("exact", [False, True])
def test_scores_that_overflow_in_a_narrower_dtype_are_nan(exact: bool) -> None:
    class Narrow(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return (q @ k.mT).half().softmax(-1, dtype=torch.float32) @ v

    qkv = [torch.randn(2, 5, 8) for _ in range(3)]
    optimized = optimize(Narrow(), tuple(qkv), verify="off", exact=exact)
    large = (qkv[0] * 1e6, *qkv[1:])
    (found,) = optimized.run(large)
    eager = Narrow()(*large)
    assert eager.isnan().any()
    assert torch.equal(torch.as_tensor(found).isnan(), eager.isnan())


@pytest.mark.parametrize("spelling", ["exp over its sum", "late", "plus one"])
def test_exact_keeps_exponentials_that_overflow(spelling: str) -> None:
    case = Case(spelling, "lowest", ("bools", "causal"))
    module = case.module()
    optimized = optimize(module, sample(), verify="off", exact=True)
    x, *masks = sample()
    large = (x * 1e3, *masks)
    for found, eager in zip(optimized.run(large), module(*large), strict=True):
        assert eager.isnan().any()
        assert torch.equal(torch.as_tensor(found).isnan(), eager.isnan())


@pytest.mark.parametrize("least", [0.0, 1e-6], ids=["bare", "guarded"])
def test_a_normalised_linear_attention_without_keys_is_what_eager_makes_of_it(least: float) -> None:
    """Its normaliser is 0 there: NaN, or 0 where it is kept from being so."""

    class Normalised(nn.Module):
        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            query, key = x.exp(), x.flip(-1).exp() * keep[..., None]
            places = torch.arange(x.shape[1])
            scores = (query @ key.mT) * (places <= places[:, None])
            return (scores / scores.sum(-1, keepdim=True).clamp_min(least)) @ x

    x, _, keep = sample()
    shapes = (dynamic_shapes()[0], dynamic_shapes()[0])
    keep = keep.float()
    optimized = optimize(Normalised(), (x, keep), dynamic_shapes=shapes, verify="off")
    assert "attn.linear_attention" in {node.op for node in optimized.graph}
    for _, (x, _, shown) in hidden():
        eager = Normalised()(x, shown.float())
        assert least or eager.isnan().any() or bool(shown[:, 0].all())
        (found,) = optimized.run((x, shown.float()))
        torch.testing.assert_close(torch.as_tensor(found), eager, equal_nan=True, **_STRICT)


@pytest.mark.parametrize("selected", ["keys", "queries", "both"])
def test_a_selection_may_be_empty(selected: str) -> None:
    """onnxruntime's Attention fails where there is no key, or no query."""

    class Selects(nn.Module):
        def forward(self, x: Tensor, shown: Tensor) -> Tensor:
            rows = x[shown]
            query, key = (x if selected == "keys" else rows), (x if selected == "queries" else rows)
            return (query @ key.mT / 4).softmax(-1) @ key

    length = {0: Dim("length", max=64)}
    x, shown = torch.randn(7, 16), torch.tensor([True, False, True, True, False, False, True])
    optimized = optimize(Selects(), (x, shown), dynamic_shapes=(length, length), verify="off")
    assert optimized.report.fused == 1
    for given in (shown, torch.ones_like(shown), torch.zeros_like(shown)):
        (found,) = optimized.run((x, given))
        torch.testing.assert_close(torch.as_tensor(found), Selects()(x, given), **_STRICT)


class Heads(nn.Module):
    """(N, 16) rows and which are keys, to (N, 16): four heads, fused, as products or as einsum."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor, shown: Tensor) -> Tensor:
        query, key = (part.unflatten(1, (4, 4)) for part in (x, x[shown]))
        if self.form == "einsum":
            scores = torch.einsum("nhd,mhd->hnm", query, key).sigmoid()
            return torch.einsum("hnm,mhd->nhd", scores, key).flatten(1)
        query, key = query.transpose(0, 1), key.transpose(0, 1)
        scores = query @ key.mT / 2
        weights = scores.softmax(-1) if self.form == "fused" else scores.sigmoid()
        return (weights @ key + (key.mT @ key).sum(1, keepdim=True)).transpose(0, 1).flatten(1)


@pytest.mark.parametrize("form", ["fused", "products", "einsum"])
def test_sums_over_an_empty_selection_are_zeros(form: str) -> None:
    """onnxruntime's MatMul leaves all but the first matrix of a stack as the memory was, and ends
    the process where it has made one kernel of a product and a transpose.
    """
    length, module = {0: Dim("length", max=64)}, Heads(form)
    x, shown = torch.randn(7, 16), torch.tensor([True, False, True, True, False, False, True])
    optimized = optimize(module, (x, shown), dynamic_shapes=(length, length), verify="off")
    assert optimized.report.fused == (form == "fused")
    kinds = [node.op_type for node in optimized.model.graph]
    assert "Einsum" not in kinds
    assert kinds.count("Where") == (1 if form == "einsum" else 2)
    for given in (shown, torch.zeros_like(shown)):
        (found,) = optimized.run((x, given))
        torch.testing.assert_close(torch.as_tensor(found), module(x, given), **_STRICT)


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
@pytest.mark.parametrize("case", cases(), ids=str)
def test_a_hidden_row_is_what_eager_makes_of_it_however_it_is_written(
    case: Case, exact: bool
) -> None:
    _check(case, exact=exact)


@pytest.mark.parametrize("fill", ["lowest", "lowest added"])
def test_powers_under_the_lowest_number_are_a_softmax(fill: str) -> None:
    """The lowest number times ln 3 is infinite in float32, and isn't in float64."""
    (case,) = (each for each in cases() if str(each) == f"powers of 3 of {fill}")
    _check(case)
