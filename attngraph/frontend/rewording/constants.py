"""What Python reads of constants while a model is traced.

A grid of patches or a table of lengths that is written in the code, or kept in a buffer, is known,
and so is what is computed of it. torch.export keeps the values of tensors of one element only, and
takes sizes computed from larger ones for data of the run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.export import _trace
from torch.utils import _pytree as pytree

_LARGEST = 2**16
"""Elements of a tensor that is computed while the model is traced."""
_BUFFERS = "_fakify_params_buffers"
_aten = torch.ops.aten
_FACTORIES = (_aten.arange, _aten.full, _aten.ones, _aten.scalar_tensor, _aten.zeros)
_UNSET = (_aten.empty_like, _aten.new_empty, _aten.new_empty_strided)


_OPEN = (torch.SymInt, torch.SymFloat, torch.SymBool)
_COMPARED = re.compile(r"aten\.(equal|allclose)\.default")
"""All that torch says where a bool is asked for that two tensors make."""


def depends_on_data(message: str) -> bool:
    """Whether Python asked for a value of a tensor, or for a comparison of two."""
    return "data-dependent" in message or _COMPARED.fullmatch(message) is not None


@contextmanager
def known_constants() -> Iterator[None]:
    """Values of literal tensors, of small buffers, and of ranges and fills of known size are known.

    torch forgets those of a tensor that an operator writes data of the run into.
    """
    make: Callable[..., dict[str, torch.Tensor]] = getattr(_trace, _BUFFERS)
    dispatch: Callable[..., Any] = FakeTensorMode.dispatch

    def buffers(mode: FakeTensorMode, module: torch.nn.Module) -> dict[str, torch.Tensor]:
        made = make(mode, module)
        for name, buffer in module.named_buffers(remove_duplicate=False):
            _keep(made[name], buffer.clone, mode)
        return made

    def factories(
        mode: FakeTensorMode, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = dispatch(mode, function, types, args, kwargs or {})
        known = not any(isinstance(item, _OPEN) for item in pytree.tree_leaves(args))
        packet = getattr(function, "overloadpacket", None)
        if packet in _UNSET:
            made.constant = None
        elif known and packet in _FACTORIES:
            _keep(made, lambda: function(*args, **(kwargs or {})), mode)
        return made

    with ExitStack() as stack:
        stack.enter_context(patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", _LARGEST))
        stack.enter_context(patch.object(_trace, _BUFFERS, buffers))
        stack.enter_context(patch.object(FakeTensorMode, "dispatch", factories))
        yield


@contextmanager
def known_in_text() -> Iterator[None]:
    """A number that is known is written as in a run: `self[f"expert_{index}"]`.

    In the place of another one, as in `print(f"{x.mean():.3f}")`, stands what it is in a trace.
    """
    own: Callable[[torch.Tensor, str], str] = torch.Tensor.__format__

    def written(self: torch.Tensor, spec: str) -> str:
        if isinstance(self, FakeTensor) and self.dim() == 0 and self.constant is not None:
            with unset_fake_temporarily():
                return format(self.constant.item(), spec)
        return own(self, "" if isinstance(self, FakeTensor) and self.dim() == 0 else spec)

    def as_symbol(self: object, spec: str) -> str:
        return str(self)

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.Tensor, "__format__", written))
        for kind in (torch.SymInt, torch.SymFloat, torch.SymBool):
            stack.enter_context(patch.object(kind, "__format__", as_symbol))
        yield


def _keep(fake: object, value: Callable[[], torch.Tensor], mode: FakeTensorMode) -> None:
    """Gives a fake tensor its value, if it is a small one."""
    if not isinstance(fake, FakeTensor) or fake.constant is not None or fake.device.type != "cpu":
        return
    if fake.numel() <= _LARGEST:
        with unset_fake_temporarily():
            fake.constant = value()
        mode.fake_tensor_converter.add_constant_storage_mapping(fake)
