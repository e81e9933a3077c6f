"""Runs a large module for what its code does, not for its numbers: its weights are not read.

Each large weight gives way to its first row, repeated, which takes no memory. Sizes, dtypes and
what the module keeps between calls are as ever, and its outputs still depend on its inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from attngraph.mapped import are_large

_MANY = 1 << 20  # elements of a weight that is worth it


@contextlib.contextmanager
def stand_ins(module: torch.nn.Module) -> Iterator[Mapping[str, torch.Tensor]]:
    """Within it, what to call the module with by `functional_call`; nothing where all is small."""
    weights = dict(module.named_parameters())
    if not are_large(data for data in weights.values() if data.layout is torch.strided):
        yield {}
        return
    with _OneProduct():
        yield {
            name: data.detach()[:1].expand(data.shape)
            for name, data in weights.items()
            if data.layout is torch.strided and data.dim() > 1 and data.numel() >= _MANY
        }


class _OneProduct(TorchFunctionMode):
    """Linears whose weight is one row, repeated, compute one product instead of many."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is linear and not kwargs and len(args) > 1:
            x, weight, *bias = args
            if weight.dim() == 2 and weight.stride(0) == 0 and len(weight) > 1:
                product = linear(x, weight[:1]).expand(*x.shape[:-1], len(weight))
                added = [each for each in bias if each is not None]
                return product + added[0] if added else product.contiguous()
        return func(*args, **(kwargs or {}))
