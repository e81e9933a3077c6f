"""Builds a module whose parameters take no memory: those of a file take their place.

Parameters are put on the meta device as a module registers them. Buffers are real, as no file need
have them. A factory may do what this can't follow: compute with the numbers of a parameter, say. It
is then to be called as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from attngraph.frontend.files.factory import Built, build
from attngraph.inference import holders_of


def build_unfilled(factory: str, arguments: Sequence[str] = ()) -> Built | None:
    """What the factory builds, with its parameters on the meta device.

    None where it fails so, or where what isn't a parameter depends on the numbers of one, or on
    random numbers: those that parameters would have drawn before are missing, so others follow.
    """
    drawn = _Drawn()
    try:
        with _parameters_on_meta(), drawn:
            built = build(factory, arguments)
        if _has_meta(built):
            return None
        if drawn.seen and (kept := _computed(built.module)):
            with _parameters_on_meta(), _Drawn(shifts=True):
                again = build(factory, arguments)
            if not _same(kept, _computed(again.module)):
                return None
    except Exception:  # built as it is, it may work; if not, that error is the one to tell
        return None
    return built


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Within it, a parameter that a module registers, or casts, has no numbers."""
    owner: Any = nn.Module
    register, apply = owner.register_parameter, owner._apply
    replaced: Any = WeakIdKeyDictionary()  # one that is registered twice is one parameter still

    def registered(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if type(param) is nn.Parameter and not param.is_meta:
            if param not in replaced:
                replaced[param] = nn.Parameter(param.to("meta"), param.requires_grad)
            param = replaced[param]
        register(self, name, param)

    def applied(self: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        def of(tensor: torch.Tensor) -> Any:
            if not tensor.is_meta:
                return fn(tensor)
            moved = fn(torch.empty(0, dtype=tensor.dtype))  # a move to a device has no numbers here
            return torch.empty_like(tensor, dtype=moved.dtype)

        applied_to: nn.Module = apply(self, of, recurse)
        return applied_to

    owner.register_parameter, owner._apply = registered, applied
    try:
        yield
    finally:
        owner.register_parameter, owner._apply = register, apply


_Mode: Any = TorchDispatchMode  # which has no types


class _Drawn(_Mode):  # type: ignore[misc]
    """Sees whether random numbers are drawn into tensors that have memory.

    With `shifts` others are drawn than without it, whatever the seed.
    """

    def __init__(self, *, shifts: bool = False) -> None:
        super().__init__()
        self.seen = False
        self._shifts = shifts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_random and self._shifts:
            torch.rand(1, generator=kwargs.get("generator"))
        result = func(*args, **kwargs)
        leaves = pytree.tree_leaves(result) if is_random else []
        self.seen |= any(isinstance(leaf, torch.Tensor) and not leaf.is_meta for leaf in leaves)
        return result


def _has_meta(built: Built) -> bool:
    """Whether anything but a parameter has no numbers: a sample, a buffer, or an attribute."""
    samples = pytree.tree_leaves((built.args, built.kwargs))
    values = (*samples, *_computed(built.module).values(), *built.module.buffers())
    return any(isinstance(value, torch.Tensor) and value.is_meta for value in values)


def _computed(module: nn.Module) -> Mapping[str, Any]:
    """The numbers and tensors of a module that a file doesn't bring."""
    stored = module.state_dict(keep_vars=True).keys()
    found: dict[str, Any] = {n: b for n, b in module.named_buffers() if n not in stored}
    for holder in holders_of(module):
        for key, value in holder.items():
            if isinstance(value, (int, float, complex, torch.Tensor)):
                found[holder.path(key)] = value
    return found


def _same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return first.keys() == second.keys() and all(
        _equal(value, second[name]) for name, value in first.items()
    )


def _equal(value: Any, other: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return type(value) is type(other) and bool(value == other or value != value)
    alike = isinstance(other, torch.Tensor) and value.dtype == other.dtype
    return alike and value.shape == other.shape and torch.equal(value, other)
