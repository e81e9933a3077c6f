"""Products as PyTorch dispatches them: what the order of their sums may cost, and another order.

A library (MKL, oneDNN, PyTorch's own kernels) chooses the order in which a product's terms are
summed, by the CPU, the sizes and the layout of the operands. `Summed` tells how far apart two
choices may be. `Halved` is a library that makes another one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._library.custom_ops import _maybe_get_opdef
from torch.utils._python_dispatch import TorchDispatchMode

P = ParamSpec("P")
R = TypeVar("R")
aten = torch.ops.aten

# The two factors among the arguments, each with the axis that is summed. In a sum with an addend
# the addend comes first.
_FACTORS: dict[Any, tuple[tuple[int, int], tuple[int, int]]] = {
    aten.dot.default: ((0, 0), (1, 0)),
    aten.mv.default: ((0, 1), (1, 0)),
    aten.mm.default: ((0, 1), (1, 0)),
    aten.bmm.default: ((0, 2), (1, 1)),
    aten.addmv.default: ((1, 1), (2, 0)),
    aten.addmm.default: ((1, 1), (2, 0)),
    aten.baddbmm.default: ((1, 2), (2, 1)),
}
_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default


class _Products(TorchDispatchMode):
    """Sees each product of floats, also in operators made of others and in those of a library."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if terms := _terms(func, args):
            return self.product(func, args, kwargs, terms)
        custom = _maybe_get_opdef(func)
        with self:
            if custom is not None:
                return custom._init_fn(*args, **kwargs)
            if func.namespace == "aten":
                parts = func.decompose(*args, **kwargs)
                if parts is not NotImplemented:
                    return parts
        return func(*args, **kwargs)

    def product(self, func: Any, args: tuple[Any, ...], kwargs: Any, terms: int) -> Any:
        raise NotImplementedError


class Summed(_Products):
    """Adds up what the order of sums may change in what runs under it."""

    def __init__(self) -> None:
        super().__init__()
        self._squares = 0.0

    def product(self, func: Any, args: tuple[Any, ...], kwargs: Any, terms: int) -> Any:
        self._squares += terms * torch.finfo(args[0].dtype).eps ** 2
        return func(*args, **kwargs)

    def distance(self, dtype: torch.dtype) -> float:
        """How far apart two outputs of a dtype may be, in units of the output's norm.

        Rounded to u = eps / 2, a sum of n terms is off by about √n u in any order (Higham and Mary
        2019), two orders by twice that, eps √n. The products of a model err independently of each
        other: their squares add. Where nothing is summed the distance is 0. Where something is,
        the output's own rounding may fall otherwise.
        """
        if not self._squares:
            return 0.0
        return math.sqrt(self._squares + torch.finfo(dtype).eps ** 2)


class Halved(_Products):
    """Sums each product in two halves and adds them.

    Halves of float16 and bfloat16 are summed in float32, as libraries do. What stays whole: a
    depthwise convolution, and recurrent layers, which are one operator of oneDNN.
    """

    def product(self, func: Any, args: tuple[Any, ...], kwargs: Any, terms: int) -> Any:
        if func is _ATTENTION:
            with self:
                return plain_attention(*args, **kwargs)
        dtype = args[0].dtype
        if torch.finfo(dtype).bits < 32:
            wide = [arg.float() if isinstance(arg, Tensor) else arg for arg in args]
            return self.product(func, tuple(wide), kwargs, terms).to(dtype)
        if func is aten.convolution.default:
            return _halved_convolution(*args)
        if terms < 2:
            return func(*args, **kwargs)
        first, second = list(args), list(args)
        for position, axis in _FACTORS[func]:
            first[position] = args[position].narrow(axis, 0, terms // 2)
            second[position] = args[position].narrow(axis, terms // 2, terms - terms // 2)
        no_addend = {"beta": 0} if _FACTORS[func][0][0] == 1 else {}
        return func(*first, **kwargs) + func(*second, **{**kwargs, **no_addend})


def halved(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, run under `Halved`."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with Halved():
            return function(*args, **kwargs)

    return run


def _terms(func: Any, args: tuple[Any, ...]) -> int:
    """How many terms each element of a product of floats sums; 0 for any other operator."""
    if func in _FACTORS:
        position, axis = _FACTORS[func][0]
        number = args[position].shape[axis]
    elif func is aten.convolution.default:
        weight, transposed = args[1], args[6]
        number = weight.numel() // max(weight.shape[1 if transposed else 0], 1)
    elif func is _ATTENTION:
        number = args[0].shape[-1] + args[1].shape[-2]
    else:
        return 0
    kind = args[0].dtype
    return number if kind.is_floating_point or kind.is_complex else 0


def _halved_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Tensor:
    """The channels of each group in two halves."""
    channels = x.shape[1] // groups
    rest = (stride, padding, dilation, transposed, output_padding, groups)
    if channels < 2:
        return aten.convolution(x, weight, bias, *rest)

    def part(start: int, length: int) -> tuple[Tensor, Tensor]:
        taken = x.unflatten(1, (groups, channels)).narrow(2, start, length).flatten(1, 2)
        if not transposed:
            return taken, weight.narrow(1, start, length)
        rows = weight.unflatten(0, (groups, channels)).narrow(1, start, length)
        return taken, rows.flatten(0, 1)

    half = channels // 2
    first, second = part(0, half), part(half, channels - half)
    return aten.convolution(*first, bias, *rest) + aten.convolution(*second, None, *rest)


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Two products instead of one kernel; the second output, for gradients, stays unset."""
    output, _ = aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout, is_causal, scale=scale
    )
    return output, query.new_full(query.shape[:-1], torch.nan)
