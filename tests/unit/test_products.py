"""Another order of sums changes last digits only, and the distance that is allowed covers it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.products import Halved, Summed, halved, plain_attention

CALLS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "mm": (torch.mm, [(5, 96), (96, 7)]),
    "mm, an odd number of terms": (torch.mm, [(5, 97), (97, 7)]),
    "linear": (F.linear, [(2, 5, 96), (7, 96), (7,)]),
    "bmm": (torch.bmm, [(3, 5, 96), (3, 96, 7)]),
    "addmm, scaled": (
        lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2.0),
        [(7,), (5, 96), (96, 7)],
    ),
    "baddbmm": (torch.baddbmm, [(3, 5, 7), (3, 5, 96), (3, 96, 7)]),
    "mv": (torch.mv, [(5, 96), (96,)]),
    "dot": (torch.dot, [(96,), (96,)]),
    "einsum": (lambda a, b: torch.einsum("bqhd,bkhd->bhqk", a, b), [(2, 5, 3, 96), (2, 7, 3, 96)]),
    "attention": (F.scaled_dot_product_attention, [(2, 3, 5, 96), (2, 3, 7, 96), (2, 3, 7, 96)]),
    "causal attention, scaled": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
        [(2, 3, 7, 16), (2, 3, 7, 16), (2, 3, 7, 16)],
    ),
    "convolution": (
        lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1, groups=2),
        [(2, 12, 7, 7), (4, 6, 3, 3), (4,)],
    ),
    "transposed convolution": (
        lambda x, w, b: F.conv_transpose1d(x, w, b, stride=2, groups=2),
        [(2, 12, 7), (12, 4, 3), (8,)],
    ),
}
each_call = pytest.mark.parametrize("name", CALLS)


def _case(
    name: str, dtype: torch.dtype = torch.float32
) -> tuple[Callable[..., Tensor], list[Tensor]]:
    function, shapes = CALLS[name]
    random = torch.Generator().manual_seed(0)
    return function, [torch.randn(shape, generator=random).to(dtype) for shape in shapes]


@each_call
def test_each_product_is_summed_in_another_order(name: str) -> None:
    function, args = _case(name)
    with Summed() as summed:
        expected = function(*args)
    actual = halved(function)(*args)
    assert not torch.equal(actual, expected)
    assert (actual - expected).norm() <= summed.distance(expected.dtype) * expected.norm()


@each_call
def test_halves_are_the_same_product(name: str) -> None:
    """In float64, where the wrong half or addend can't hide behind rounding."""
    function, args = _case(name, torch.float64)
    torch.testing.assert_close(halved(function)(*args), function(*args), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["mm", "linear", "bmm", "convolution", "attention"])
def test_narrow_floats_are_off_by_their_own_rounding(name: str, dtype: torch.dtype) -> None:
    function, args = _case(name, dtype)
    expected, actual = function(*args), halved(function)(*args)
    assert actual.dtype == dtype
    distance = (actual.double() - expected.double()).norm()
    assert distance <= torch.finfo(dtype).eps * expected.double().norm()


def test_masked_rows_are_what_the_kernel_makes_of_them() -> None:
    function, args = _case("attention")
    allowed = torch.ones(2, 1, 5, 7, dtype=torch.bool)
    allowed[0, 0, 1], allowed[1, 0, :, 5:] = False, False
    expected = function(*args, attn_mask=allowed)
    actual = halved(function)(*args, attn_mask=allowed)
    torch.testing.assert_close(actual, expected, equal_nan=True)


def test_both_products_of_an_attention_are_halved() -> None:
    _, args = _case("attention")
    with Summed() as kernel:
        F.scaled_dot_product_attention(*args)
    with Summed() as products:
        plain, _ = plain_attention(*args)
    assert products.distance(torch.float32) == kernel.distance(torch.float32)
    assert not torch.equal(halved(F.scaled_dot_product_attention)(*args), plain)


@pytest.mark.parametrize("terms", [0, 1])
def test_what_has_no_two_terms_stays(terms: int) -> None:
    a, b, c = torch.randn(3, terms), torch.randn(terms, 2), torch.randn(2)
    assert torch.equal(halved(torch.addmm)(c, a, b), torch.addmm(c, a, b))


def test_an_addend_that_counts_nothing_may_be_nan() -> None:
    _, (_, a, b) = _case("addmm, scaled")
    unset = torch.full((7,), torch.nan)
    with Halved():
        assert torch.addmm(unset, a, b, beta=0).isfinite().all()


def test_what_sums_no_floats_is_to_be_equal() -> None:
    numbers = torch.arange(12).reshape(3, 4)
    with Summed() as summed:
        numbers @ numbers.T
        torch.randn(3, 4).relu() * 2 + 1
    assert summed.distance(torch.float32) == 0
    with Summed() as summed:
        torch.randn(3, 64) @ torch.randn(64, 5)
    one = summed.distance(torch.float32)
    assert 8 * torch.finfo(torch.float32).eps <= one < 9 * torch.finfo(torch.float32).eps


def test_products_inside_of_an_operator_of_a_library_are_seen() -> None:
    @torch.library.custom_op("attngraph_tests::product", mutates_args=())
    def product(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    _, args = _case("mm")
    assert not torch.equal(halved(product)(*args), product(*args))
    assert torch.equal(halved(product)(*args), halved(torch.mm)(*args))
