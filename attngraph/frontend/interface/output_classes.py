"""Classes of a model's outputs that torch's pytree doesn't know, such as transformers' caches.

torch.export takes apart only what pytree knows. An object that is nothing but its attributes is
made known by them: each attribute is a child, and an object is put together again without its
`__init__`. What may hold tensors elsewhere, such as a subclass of list, is left to torch's error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

_LEAVES = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float, str, type(None))
_INERT = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    type,
    complex,
    bytes,
    PurePath,
    FunctionType,
    MethodType,
    BuiltinFunctionType,
    ModuleType,
)
"""Holds no tensor that a graph computes, and is kept as it is."""
_HEAP = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: a class that a `class` statement made."""
_known: set[type] = set()


def make_known(output: Any) -> bool:
    """Registers the classes in a model's output that pytree doesn't know, where that is safe.

    False where none is new, or one of them can't be taken apart by its attributes. A class stays
    known for the process: what was compiled returns it later.
    """
    found: dict[type, None] = {}
    if not _collect(output, found, []) or not found:
        return False
    for kind in found:
        pytree.register_pytree_node(kind, _apart, _Together(kind))
        _known.add(kind)
    return True


def names_of_known(spec: pytree.TreeSpec) -> Iterator[str]:
    """The outermost classes of an output that `make_known` registered."""
    if spec.type in _known:
        yield spec.type.__name__
        return
    if not spec.is_leaf():
        for child in spec.children():
            yield from names_of_known(child)


def _collect(value: Any, found: dict[type, None], above: list[Any]) -> bool:
    """Adds the unknown classes in `value`; whether each can be taken apart."""
    if isinstance(value, _LEAVES):
        return True
    if any(value is other for other in above):  # a circle has no tree
        return False
    kind = type(value)
    if kind in pytree.SUPPORTED_NODES:
        children: Sequence[Any] = pytree.SUPPORTED_NODES[kind].flatten_fn(value)[0]
    elif pytree.is_namedtuple_instance(value):
        children = tuple(value)
    elif _is_its_attributes(value):
        found[kind] = None
        children = _apart(value)[0]
    else:
        return False
    return all(_collect(child, found, [*above, value]) for child in children)


def _is_its_attributes(value: Any) -> bool:
    """Whether nothing of an object is outside of its `__dict__`."""
    if isinstance(value, torch.nn.Module) or not hasattr(value, "__dict__"):
        return False
    bases = [base for base in type(value).__mro__ if base is not object]
    return all(base.__flags__ & _HEAP and not _slots(base) for base in bases)


def _slots(kind: type) -> bool:
    named = vars(kind).get("__slots__", ())
    return any(
        name not in ("__dict__", "__weakref__")
        for name in ((named,) if isinstance(named, str) else named)
    )


def _apart(value: Any) -> tuple[list[Any], list[Any]]:
    """(children, [their names, the attributes that hold no tensor])."""
    own = vars(value)
    names = [name for name, item in own.items() if not isinstance(item, _INERT)]
    rest = {name: item for name, item in own.items() if isinstance(item, _INERT)}
    return [own[name] for name in names], [names, rest]


class _Together:
    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __call__(self, children: Any, context: Any) -> Any:
        names, rest = context
        made: Any = object.__new__(self.kind)
        vars(made).update(zip(names, children, strict=True))
        vars(made).update(rest)
        return made
