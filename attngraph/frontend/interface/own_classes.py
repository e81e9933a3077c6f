"""Classes of inputs and outputs that torch's pytree doesn't know: a user's dataclass, or a cache.

torch.export takes apart only what pytree knows. An object that is nothing but its attributes is
made known by them: each attribute is a child, and an object is put together again without its
`__init__`. What may hold tensors elsewhere, such as a subclass of list, is left to torch's error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from attngraph.errors import UsageError
from attngraph.inference import INERT

LEAVES = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float, str, type(None))
_HEAP = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: a class that a `class` statement made."""
_known: set[type] = set()


def make_known(value: Any) -> bool:
    """Registers the classes in a model's inputs or output that pytree doesn't know, where safe.

    False where none is new, or one of them can't be taken apart by its attributes. A class stays
    known for the process: what was compiled takes or returns it later.
    """
    found: dict[type, None] = {}
    if not _collect(value, found, []) or not found:
        return False
    for kind in found:
        pytree.register_pytree_node(
            kind, _apart, _Together(kind), flatten_with_keys_fn=_apart_with_keys
        )
        _known.add(kind)
    return True


def shapes_by_attribute(inputs: Mapping[str, Any], shapes: Any) -> Any:
    """`dynamic_shapes` as torch.export takes them, which wants a list for an object.

    They are given for an object as another of its class, as a dict by its attributes, or as that
    list. Raises UsageError for an attribute that the object lacks, and for an object that can't be
    taken apart by its attributes.
    """
    if shapes is None:
        return None
    if not isinstance(shapes, (Mapping, list, tuple)):
        raise UsageError(
            f"dynamic_shapes is a {type(shapes).__name__}; give a dict by the names of the inputs, "
            "or a tuple with one entry for each."
        )
    if not isinstance(shapes, Mapping):
        return _in_lists(tuple(inputs.values()), shapes)
    if unknown := [name for name in shapes if isinstance(name, str) and name not in inputs]:
        raise UsageError(
            f"dynamic_shapes names {unknown[0]!r}, which is none of the inputs that are given: "
            f"{', '.join(inputs)}."
        )
    return _in_lists(inputs, {**dict.fromkeys(inputs), **shapes} if shapes else shapes)


def names_of_known(spec: pytree.TreeSpec) -> Iterator[str]:
    """The outermost classes of an output that `make_known` registered."""
    if spec.type in _known:
        yield spec.type.__name__
        return
    if not spec.is_leaf():
        for child in spec.children():
            yield from names_of_known(child)


def _in_lists(value: Any, shapes: Any) -> Any:
    kind = type(value)
    if kind in pytree.SUPPORTED_NODES and kind not in pytree.BUILTIN_TYPES:
        return _by_children(value, shapes)
    if shapes is None and isinstance(value, (dict, list, tuple, deque)):  # each of them static
        return _each(value, lambda child: _in_lists(child, None))
    if isinstance(value, Mapping) and isinstance(shapes, Mapping):
        return {
            name: _in_lists(value[name], shape) if name in value else shape
            for name, shape in shapes.items()
        }
    is_sequence = kind in (list, tuple) and isinstance(shapes, (list, tuple))
    if is_sequence and len(value) == len(shapes):
        return type(shapes)(map(_in_lists, value, shapes))
    if shapes and kind not in pytree.SUPPORTED_NODES and not isinstance(value, LEAVES):
        _refuse_hidden(value)
    return shapes


def _by_children(value: Any, shapes: Any) -> Any:
    """The shapes of an object of a class that pytree knows, as the list that torch.export wants."""
    kind, node = type(value), pytree.SUPPORTED_NODES[type(value)]
    children = list(node.flatten_fn(value)[0])
    if isinstance(shapes, kind):
        given = _attributes(shapes) if kind in _known else list(node.flatten_fn(shapes)[0])
    else:
        given = [None] * len(children) if shapes is None else shapes
    if isinstance(given, (list, tuple)) and len(given) == len(children):
        return list(map(_in_lists, children, given))
    if not isinstance(given, Mapping) or node.flatten_with_keys_fn is None:
        return shapes
    keys = [_key(key) for key, _ in node.flatten_with_keys_fn(value)[0]]
    if lacking := [name for name in given if name not in keys]:
        if keys == list(range(len(keys))):
            raise UsageError(
                f"dynamic_shapes has a dict for an input of class {kind.__name__}, which was "
                f"registered without names: give a list with one entry for each of its {len(keys)} "
                "parts."
            )
        raise UsageError(
            f"dynamic_shapes has {lacking[0]!r} for an input of class {kind.__name__}: give a dict "
            f"by its attributes, which are {', '.join(map(str, keys))}."
        )
    pairs = zip(keys, children, strict=True)
    return [_in_lists(child, given.get(key)) for key, child in pairs]


def _each(container: Any, of: Callable[[Any], Any]) -> Any:
    return pytree.tree_map(of, container, is_leaf=lambda value: value is not container)


def _key(key: Any) -> Any:
    """What a path of pytree calls a child by."""
    return next(getattr(key, each) for each in ("name", "key", "idx") if hasattr(key, each))


def _refuse_hidden(value: Any) -> None:
    """Raises UsageError for an object with dims, of which pytree doesn't know the tensors."""
    if not isinstance(value, (*LEAVES, *INERT)) and not pytree.is_namedtuple_instance(value):
        raise UsageError(
            f"dynamic_shapes has dims for an input of class {type(value).__name__}, which may hold "
            "tensors beside its attributes: compile a module that takes the tensors, and makes the "
            "object of them in its forward."
        )


def _collect(value: Any, found: dict[type, None], above: list[Any]) -> bool:
    """Adds the unknown classes in `value`; whether each can be taken apart."""
    if isinstance(value, (*LEAVES, *INERT)):
        return True
    if any(value is other for other in above):  # a circle has no tree
        return False
    kind = type(value)
    if kind in pytree.SUPPORTED_NODES:
        node = pytree.SUPPORTED_NODES[kind]
        if node.flatten_with_keys_fn is None:
            pytree.SUPPORTED_NODES[kind] = node._replace(flatten_with_keys_fn=_numbered(node))
        children: Sequence[Any] = node.flatten_fn(value)[0]
    elif pytree.is_namedtuple_instance(value):
        children = tuple(value)
    elif _is_its_attributes(value):
        found[kind] = None
        children = _apart(value)[0]
    else:
        return False
    return all(_collect(child, found, [*above, value]) for child in children)


def _is_its_attributes(value: Any) -> bool:
    """Whether nothing of an object is outside of its `__dict__` and its slots."""
    if isinstance(value, torch.nn.Module):
        return False
    bases = [base for base in type(value).__mro__ if base is not object]
    hidden = any(name.startswith("__") for base in bases for name in _slots(base))
    return not hidden and all(base.__flags__ & _HEAP for base in bases)


def _slots(kind: type) -> list[str]:
    named = vars(kind).get("__slots__", ())
    names = (named,) if isinstance(named, str) else named
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _attributes(value: Any) -> dict[str, Any]:
    """Those that an object has, in slots or not."""
    slots = [name for base in reversed(type(value).__mro__) for name in _slots(base)]
    own = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return own | getattr(value, "__dict__", {})


def _apart(value: Any) -> tuple[list[Any], list[Any]]:
    """(children, [their names, the attributes that hold no tensor])."""
    own = _attributes(value)
    names = [name for name, item in own.items() if not isinstance(item, INERT)]
    rest = {name: item for name, item in own.items() if isinstance(item, INERT)}
    return [own[name] for name in names], [names, rest]


def _apart_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], list[Any]]:
    """As `_apart`, with a path to each child, after which torch names the inputs."""
    children, context = _apart(value)
    keys = [pytree.GetAttrKey(name) for name in context[0]]
    return list(zip(keys, children, strict=True)), context


def _numbered(node: pytree.NodeDef) -> Callable[[Any], tuple[list[tuple[Any, Any]], Any]]:
    """The children by their numbers: torch.export names inputs after a path, and asks for one."""

    def flatten(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
        children, context = node.flatten_fn(value)
        return [(pytree.SequenceKey(at), child) for at, child in enumerate(children)], context

    return flatten


class _Together:
    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __call__(self, children: Any, context: Any) -> Any:
        names, rest = context
        made: Any = object.__new__(self.kind)
        for name, item in (*zip(names, children, strict=True), *rest.items()):
            object.__setattr__(made, name, item)  # a frozen one has no other way
        return made
