"""Lets a forward cast or move a module to the dtype or device it has, as routers of experts do.

`self.classifier = self.classifier.to(x.dtype)` puts new tensors in the places of the weights. In a
trace these are the graph's inputs, which torch can't replace, and there is nothing to be done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

_CASTS = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}


@contextmanager
def casts_to_own_dtype() -> Iterator[None]:
    """A module that is moved to the dtype and the device that it has is itself."""

    def moving(own: Callable[..., Any], dtype: torch.dtype | None = None) -> Callable[..., Any]:
        def move(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            wanted = (None, dtype) if dtype is not None else _parsed(args, kwargs)
            return self if _is_there(self, *wanted) else own(self, *args, **kwargs)

        return move

    with ExitStack() as stack:
        for name, dtype in {"to": None, **_CASTS}.items():
            own = getattr(torch.nn.Module, name)
            stack.enter_context(patch.object(torch.nn.Module, name, moving(own, dtype)))
        yield


def _parsed(args: Any, kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """The device and dtype of a call of `to`; neither where it asks for more, or for no such."""
    try:
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
    except (RuntimeError, TypeError):
        return None, None
    return (None, None) if layout is not None else (device, dtype)


def _is_there(
    module: torch.nn.Module, device: torch.device | None, dtype: torch.dtype | None
) -> bool:
    if device is None and dtype is None:
        return False
    tensors = [*module.parameters(), *module.buffers()]
    floats = [each for each in tensors if each.is_floating_point() or each.is_complex()]
    is_there = device is None or all(_is_on(each.device, device) for each in tensors)
    return is_there and (dtype is None or all(each.dtype == dtype for each in floats))


def _is_on(own: torch.device, wanted: torch.device) -> bool:
    return own.type == wanted.type and wanted.index in (None, own.index)
