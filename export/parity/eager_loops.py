"""`torch._higher_order_ops.scan` run as a plain loop: torch compiles it even to run it once."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree


@contextmanager
def plain_loops() -> Iterator[None]:
    """Within it, a scan in a module runs its steps one after the other, under any dispatch mode."""
    module = importlib.import_module("torch._higher_order_ops.scan")
    stand_ins = {"_maybe_compile_and_run_fn": _call, "scan_op": _scan}
    originals = {name: getattr(module, name) for name in stand_ins if hasattr(module, name)}
    for name in originals:
        setattr(module, name, stand_ins[name])
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


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
