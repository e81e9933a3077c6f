"""`cat`, `stack` and attention under torch.vmap, whose rules in C++ ask for sizes as numbers.

A loop that carries nothing runs under vmap, for all steps at once. What its steps join, or attend
to, is joined with the axis of the steps as one of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._C._functorch import is_batchedtensor, maybe_get_level, peek_interpreter_stack
from torch._functorch import predispatch
from torch._functorch.pyfunctorch import (
    retrieve_current_functorch_interpreter,
    temporarily_pop_interpreter_stack,
)
from torch.compiler import is_dynamo_compiling
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from attngraph.frontend.rewording.loop_lists import JOINS, Steps, axis_of_join

_OPERANDS = ("query", "key", "value", "attn_mask")


def _attention(  # torch's own is a builtin, of which Python has no signature
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None: ...


_ATTENTION = inspect.signature(_attention)


class BatchedJoins(TorchFunctionMode):
    """Within it, what vmap hands on is joined without its rule.

    It is to be entered in the code that is traced: a trace keeps the calls that are made here.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if func in JOINS and args:
            axis = axis_of_join(args, named)
            if isinstance(args[0], Steps):
                with self:
                    return args[0].joined(axis, new=func is torch.stack)
            if _is_batched(args[0]):
                return _joined(func, args[0], axis)
        if func is scaled_dot_product_attention:
            bound = _ATTENTION.bind(*args, **named).arguments
            if _is_batched([bound[name] for name in _OPERANDS if bound.get(name) is not None]):
                return _attended(func, bound)
        return func(*args, **named)


def _is_batched(parts: Any) -> bool:
    """Whether some of them have the axis of the innermost vmap."""
    if not isinstance(parts, (list, tuple)):
        return False
    levels = [maybe_get_level(part) for part in parts if is_batchedtensor(part)]
    return bool(levels) and _innermost().level() in levels


def _joined(func: Callable[..., Any], parts: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
    level, count = _innermost().level(), _innermost().batch_size()
    axis %= parts[0].dim() + (func is torch.stack)
    whole: Any = [predispatch._remove_batch_dim(part, level, count, 0) for part in parts]
    return predispatch._add_batch_dim(func(whole, axis + 1), 0, level)


def _attended(func: Callable[..., Any], bound: dict[str, Any]) -> torch.Tensor:
    """Attention with the steps as its first axis: (steps, …, queries, features)."""
    level, count = _innermost().level(), _innermost().batch_size()
    operands = {name: bound[name] for name in _OPERANDS if bound.get(name) is not None}
    rank = operands["query"].dim()
    for name, operand in operands.items():
        if not _is_batched([operand]) and name == "attn_mask":
            continue  # aligned at the right
        whole = predispatch._remove_batch_dim(operand, level, count, 0)
        missing = rank - operand.dim()
        operands[name] = whole.reshape(whole.shape[0], *[1] * missing, *whole.shape[1:])
    made = func(**{**bound, **operands})
    return predispatch._add_batch_dim(made, 0, level)


def _innermost() -> Any:
    return retrieve_current_functorch_interpreter()


def is_at_once() -> bool:
    """Whether vmap runs this code; within a scan's body, which Dynamo reads, that isn't told."""
    return not is_dynamo_compiling() and peek_interpreter_stack() is not None


class AtOnce:
    """The innermost vmap: what has its axis, and what that is outside, with the axis in front."""

    def __init__(self) -> None:
        self._level, self._count = _innermost().level(), _innermost().batch_size()

    def has(self, value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and is_batchedtensor(value)
            and maybe_get_level(value) == self._level
        )

    def without(self, value: torch.Tensor) -> torch.Tensor:
        return predispatch._remove_batch_dim(value, self._level, self._count, 0)

    def within(self, value: torch.Tensor) -> torch.Tensor:
        return predispatch._add_batch_dim(value, 0, self._level)

    def everywhere(self, value: torch.Tensor) -> torch.Tensor:
        """The value with the axis, which one that all steps share lacks."""
        if self.has(value):
            return value
        return self.within(value.expand(self._count, *value.shape))

    def outside(self) -> AbstractContextManager[Any]:
        return temporarily_pop_interpreter_stack()
