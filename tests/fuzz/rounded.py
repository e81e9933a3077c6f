"""Runs of a model as float32 may have rounded it: Monte-Carlo arithmetic (Parker 1997), op by op.

What a float32 model computes, it computes only up to the rounding of its steps. Where these take
an output to another number, it holds none: the weights of a row in which adding -1e9 left multiples
of 64 of the scores, what is left when equal rows cancel, which of two keys with scores in the
millions wins. Elsewhere such runs agree with eager's, and a file has to agree with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

_WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_SUMS = {"aten::add", "aten::add_", "aten::sub", "aten::sub_"}
_DIFFERENCES_FIRST = {"aten::_softmax", "aten::_safe_softmax", "aten::_log_softmax"}
_DIFFERENCES_FIRST |= {"aten::logsumexp", "aten::logcumsumexp"}
_EPS = torch.finfo(torch.float32).eps
_SPREAD = 0x9E3779B1  # 2³² over the golden ratio: upper bits of its products spread (Knuth 6.4)


class Rounded(TorchDispatchMode):
    """Each op is off by a rounding where it has one: where float64 gives another number of the same
    operands.

    - An elementwise op is off by the same where its result is the same: what is equal before it is
      equal behind it, as in any evaluation. What has sums of many terms is off by roundings of
      each term and of the whole, at each place by itself: kernels take them in other orders.
    - A sum of two is rounded to the nearest, of operands of which the smaller one is off by its own
      size, or by half of what the result is rounded to if that is less. So far an addend that all
      scores of a row share, which no softmax sees, takes those of which a fill left a few digits.
      A fill so low that it takes them whole takes them in every run.
    - A softmax is off in its result alone. Its first step, differences, is exact where it matters.

    `coarser` is how many of float32's roundings make one.
    """

    def __init__(self, seed: int, coarser: float = 1.0) -> None:
        super().__init__()
        self.random = torch.Generator().manual_seed(seed)
        self.coarser = coarser

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func.is_view or torch.Tag.nondeterministic_seeded in func.tags:
            return func(*args, **named)
        wide = _pytree.tree_map(_widened, (args, named))  # before a call that writes into them
        found = func(*args, **named)
        results = [leaf for leaf in _pytree.tree_leaves(found) if _is_float(leaf)]
        if not results or not any(map(_is_float, _pytree.tree_leaves((args, named)))):
            return found
        exact = _run(func, wide)
        if all(map(_is_exact, results, exact)):
            return found
        name, is_pointwise = func._schema.name, torch.Tag.pointwise in func.tags
        if name in _SUMS:
            results[0].copy_(self._sum_off(*exact, results[0], *wide[0][:2], **wide[1]))
            return found
        if not is_pointwise and name not in _DIFFERENCES_FIRST:
            exact = _run(func, _pytree.tree_map(self._each_off, wide))
        for result, target in zip(results, exact, strict=True):
            result.copy_(self._off(target, result, is_pointwise))
        return found

    def _each_off(self, operand: Any) -> Any:
        """Terms of sums, each off by a rounding of it and one of the sum so far."""
        if not _is_wide(operand):
            return operand
        return operand * (1 + self._signs(operand.shape) * (self.coarser * _EPS))

    def _off(self, exact: Tensor, result: Tensor, is_alike: bool) -> Tensor:
        if exact.is_complex():
            real, other = torch.view_as_real(exact), torch.view_as_real(result)
            return torch.view_as_complex(self._off(real, other, is_alike))
        signs = self._signs_of(exact) * (exact != result) if is_alike else self._signs(exact.shape)
        return exact + signs * self.coarser * _half(result)

    def _sum_off(
        self, exact: Tensor, result: Tensor, one: Any, two: Any, alpha: float = 1.0
    ) -> Tensor:
        if exact.is_complex():
            return self._off(exact, result, True)
        one, two = (torch.as_tensor(each, dtype=torch.float64).abs() for each in (one, two))
        least = torch.minimum(one, two * abs(alpha)).nan_to_num(0.0, 0.0)
        return exact + self._signs_of(exact) * torch.minimum(least, self.coarser * _half(result))

    def _signs(self, shape: torch.Size) -> Tensor:
        return torch.randint(0, 2, shape, generator=self.random).double() * 2 - 1

    def _signs_of(self, numbers: Tensor) -> Tensor:
        """The same for equal numbers, others at the next op."""
        bits = numbers.contiguous().view(torch.int64)
        key = int(torch.randint(1, 1 << 31, (), generator=self.random))
        mixed = ((bits ^ (bits >> 32)) + key) * _SPREAD
        return ((mixed >> 31) & 1).double() * 2 - 1


@contextmanager
def rounded(seed: int, coarser: float = 1.0) -> Iterator[None]:
    """Where modules run as float32 may have rounded them."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # one op for a whole layer
    fused = torch.backends.mkldnn.set_flags(False)  # and for a whole LSTM
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), Rounded(seed, coarser):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch.backends.mkldnn.set_flags(fused[0])


def _run(func: Any, given: tuple[Any, Any]) -> list[Tensor]:
    """Results in float64 of operands in it."""
    args, named = given
    if named.get("dtype") in _WIDE:
        named = {**named, "dtype": _WIDE[named["dtype"]]}
    return [leaf for leaf in _pytree.tree_leaves(func(*args, **named)) if _is_wide(leaf)]


def _widened(leaf: Any) -> Any:
    return leaf.detach().to(_WIDE[leaf.dtype], copy=True) if _is_float(leaf) else leaf


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype in _WIDE


def _is_wide(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype in _WIDE.values()


def _is_exact(result: Tensor, exact: Tensor) -> bool:
    return bool(((result == exact) | (result.isnan() & exact.isnan())).all())


def _half(result: Tensor) -> Tensor:
    """Half of the distance from each number to the next larger one."""
    size = result.abs()
    step = size.nextafter(torch.tensor(torch.inf)) - size
    return step.double().nan_to_num(0.0, 0.0, 0.0) / 2
