"""A module as it is at inference, and afterwards as it was."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_DEEPEST = 4
_MOST_THINGS = 1 << 16
MOST_ELEMENTS = 1 << 20
"""Elements of the largest tensor in an attribute whose content is put back."""
_CONTAINERS = (dict, list, set, deque)
_STANDARD = frozenset([*vars(torch.nn.Module()), "_is_full_backward_hook"])


@contextmanager
def inference(module: torch.nn.Module) -> Iterator[None]:
    """Eval mode, no gradients, and torch.nn's fused fast path off: it hides attention.

    Afterwards every part has the attributes it had. Otherwise what a model caches as it runs, such
    as a table for its next call, would keep the form that a trace or a float64 run gave it.
    """
    # By attribute: a program's module has no eval().
    modes = [(part, part.training) for part in module.modules()]
    with restored(module), _FAST_PATH:
        try:
            for part, _ in modes:
                part.training = False
            with torch.no_grad():
                yield
        finally:
            for part, mode in modes:
                part.training = mode


class _FastPathOff:
    """torch.nn's fused fast path is off while any thread is inside: it is one switch for all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = True

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self._inside += 1

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.backends.mha.set_fastpath_enabled(self._before)


_FAST_PATH = _FastPathOff()


@contextmanager
def restored(module: torch.nn.Module) -> Iterator[None]:
    """Afterwards the attributes of all parts, and the lists, dicts and tensors in them, are as they
    were. Tensors above `MOST_ELEMENTS` keep what was written into them.
    """
    holders = [
        (holder, holder.held.copy()) for holder in (*holders_of(module), *_registries(module))
    ]
    tensors = [
        (value, value._version, value.is_leaf, value.detach().clone())
        for holder in holders_of(module)
        for _, value in holder.items()
        if isinstance(value, torch.Tensor)
        and value.numel() <= MOST_ELEMENTS
        and not value.is_inference()
    ]
    try:
        yield
    finally:
        for holder, before in holders:
            holder.restore(before)
        with torch.no_grad():
            for tensor, version, is_leaf, content in tensors:
                if tensor._version != version:
                    tensor.copy_(content)
                if is_leaf and not tensor.is_leaf and not tensor._is_view():
                    tensor.detach_()


@dataclass(frozen=True)
class Holder:
    """A namespace of attributes, of a module or of an object that it has, or a container in one."""

    name: str
    held: Any
    of_attributes: bool

    def items(self) -> list[tuple[Any, Any]]:
        """Its items, by key or position, without those that every torch.nn.Module has."""
        if isinstance(self.held, dict):
            return [pair for pair in self.held.items() if pair[0] not in _STANDARD]
        return list(enumerate(self.held))

    def path(self, key: Any) -> str:
        """The name of an item, such as `layers.0.cache['key']`."""
        if not self.of_attributes:
            return f"{self.name}[{key!r}]"
        return f"{self.name}.{key}" if self.name else str(key)

    def restore(self, before: Any) -> None:
        """Puts back the items that it had."""
        if isinstance(self.held, dict):
            # Only what changed, and not by the methods of a mapping that refuses to be written to.
            plain: Any = OrderedDict if isinstance(self.held, OrderedDict) else dict
            for name in self.held.keys() - before.keys():
                plain.__delitem__(self.held, name)
            for name, value in before.items():
                if name not in self.held or self.held[name] is not value:
                    plain.__setitem__(self.held, name, value)
        elif isinstance(self.held, list):
            self.held[:] = before
        else:
            self.held.clear()
            (self.held.extend if isinstance(self.held, deque) else self.held.update)(before)


def holders_of(module: torch.nn.Module) -> Iterator[Holder]:
    """The attributes of all parts, and the containers and objects among them, a few levels deep.

    A scripted module holds its own in C++.
    """
    seen: set[int] = set()

    def visit(name: str, value: Any, depth: int) -> Iterator[Holder]:
        if id(value) in seen or len(seen) > _MOST_THINGS or depth > _DEEPEST:
            return
        if isinstance(value, _CONTAINERS):
            found = Holder(name, value, False)
        elif _is_object(value):
            found = Holder(name, vars(value), True)
        else:
            return
        seen.add(id(value))
        yield found
        for key, item in found.items():
            yield from visit(found.path(key), item, depth + 1)

    for path, part in module.named_modules():
        if not isinstance(part, torch.jit.ScriptModule):
            own = Holder(path, vars(part), True)
            yield own
            for key, value in own.items():
                yield from visit(own.path(key), value, 0)


def _registries(module: torch.nn.Module) -> Iterator[Holder]:
    """The dicts in which modules keep parameters, buffers and submodules."""
    for path, part in module.named_modules():
        if not isinstance(part, torch.jit.ScriptModule):
            for name in ("_parameters", "_buffers", "_modules"):
                yield Holder(path, vars(part)[name], False)


def _is_object(value: Any) -> bool:
    """Whether it is an object of the model or of a library, whose attributes may be state."""
    return (
        isinstance(getattr(value, "__dict__", None), dict)
        and not isinstance(value, (torch.nn.Module, torch.Tensor))
        and not callable(value)
        and not type(value).__module__.startswith(("torch", "builtins"))
    )
