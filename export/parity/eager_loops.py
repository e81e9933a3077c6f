"""`torch._higher_order_ops.scan` run as a plain loop and `torch.cond` as an `if`.

torch compiles them even to run them once, which no dispatch mode lets it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree


@contextmanager
def plain_loops() -> Iterator[None]:
    """Within it a scan in a module runs its steps one after the other, and a cond the side that it
    takes, under any dispatch mode.

    These names are torch's own; cond's are looked up in the second module as it runs.
    """
    operators = "torch._higher_order_ops"
    stand_ins = [
        (f"{operators}.scan", "_maybe_compile_and_run_fn", _call),
        (f"{operators}.scan", "scan_op", _scan),
        (f"{operators}.cond", "cond_op", _cond),
        (f"{operators}.utils", "_hop_compile_and_call", _called(f"{operators}.utils")),
        ("torch", "cond", _cond),  # for a torch that has no such functions
    ]
    with ExitStack() as stack:
        for owner, name, stand_in in stand_ins:
            module = importlib.import_module(owner)
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, stand_in))
        yield


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _called(owner: str) -> Callable[..., Any]:
    """Calls the wrapper of a cond plainly; what else is compiled to be run stays so."""
    original = getattr(importlib.import_module(owner), "_hop_compile_and_call", None)

    def call(function: Any, args: tuple[Any, ...], *rest: Any, **named: Any) -> Any:
        if getattr(function, "__name__", "") == "_cond_op_wrapper" or original is None:
            return function(*args)
        return original(function, args, *rest, **named)

    return call


def _cond(
    pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()
) -> Any:
    return (true_fn if pred else false_fn)(*operands)


def _scan(
    step: Callable[..., tuple[Any, Any]],
    init: Sequence[torch.Tensor],
    xs: Sequence[torch.Tensor],
    additional_inputs: Sequence[Any] = (),
) -> tuple[Any, Any]:
    """Carried values and the results of a step may be any structure of tensors."""
    state: Any = init
    given: list[Any] = []
    for at in range(xs[0].shape[0]):
        carried = pytree.tree_leaves(state)
        state, result = step(*carried, *(x[at] for x in xs), *additional_inputs)
        given.append(result)
    return state, pytree.tree_map(lambda *results: torch.stack(results), *given)
