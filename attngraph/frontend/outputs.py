"""Names of a model's outputs, from the structure that it returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils._pytree import TreeSpec


def output_names(spec: TreeSpec) -> list[str]:
    """One name per leaf: the keys of dicts and ModelOutputs, `output_0` and so on elsewhere.

    Nested names are joined: the second tensor under key `states` is `states_1`.
    """
    paths = list(_paths(spec))
    names = ["_".join(path if path and not path[0].isdigit() else ["output", *path])
             for path in paths]  # fmt: skip
    if len(paths) == 1 and not paths[0]:
        return ["output_0"]
    return names


def _paths(spec: TreeSpec) -> Iterator[list[str]]:
    if spec.is_leaf():
        yield []
        return
    children = spec.children()
    for key, child in zip(_keys(spec.type, spec.context, len(children)), children, strict=True):
        for path in _paths(child):
            yield [key, *path]


def _keys(kind: Any, context: Any, count: int) -> list[str]:
    """A node's keys; pytree containers keep theirs in the context, each in its own nesting."""
    fields = getattr(kind, "_fields", None)
    if fields is not None and len(fields) == count:
        return [str(field) for field in fields]
    while isinstance(context, (list, tuple)) and context:
        if len(context) == count and all(isinstance(key, str) for key in context):
            return list(context)
        nested = [item for item in context if isinstance(item, (list, tuple)) and item]
        context = nested[0] if nested else None
    return [str(position) for position in range(count)]
