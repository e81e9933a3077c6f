"""What a file's metadata says, in JSON that anyone may have written. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_Record = TypeVar("_Record")
_SCALARS = (str, bool, int, float, NoneType)


def json_object(text: str | None) -> dict[str, Any]:
    """Raises ValueError where a text is no JSON object, or one that is nested too deeply to be."""
    try:
        found = json.loads(text or "")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__}")
    return found


def record(kind: type[_Record], text: str | None) -> _Record:
    """A dataclass of what JSON gives for its fields; raises ValueError where that isn't theirs.

    Its fields are texts, numbers, other such records, and tuples, sets and mappings of these.
    """
    return _of_fields(kind, json_object(text))


def _of_fields(kind: type[_Record], found: Mapping[str, Any]) -> _Record:
    hints = get_type_hints(kind)
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if unknown := found.keys() - known:
        raise ValueError(f"it has a field {min(unknown)!r}")
    given = {name: _of_kind(value, hints[name]) for name, value in found.items()}
    try:
        return kind(**given)
    except TypeError as error:  # a field that it doesn't say
        raise ValueError(str(error)) from error


def _of_kind(value: Any, kind: Any) -> Any:
    """The value of JSON as a field of this kind has it."""
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        for part in parts:
            try:
                return _of_kind(value, part)
            except ValueError:
                continue
    elif origin is Literal:
        if value in parts and not isinstance(value, bool):
            return value
    elif origin in (tuple, frozenset):
        if isinstance(value, list):
            kinds = parts if origin is tuple and Ellipsis not in parts else parts[:1] * len(value)
            return origin(_of_kind(*each) for each in zip(value, kinds, strict=True))
    elif is_dataclass(origin):
        if isinstance(value, dict):
            return _of_fields(kind, value)
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        if isinstance(value, dict):
            return {name: _of_kind(each, parts[1]) for name, each in value.items()}
    elif origin is float and type(value) is int:
        return float(value)
    elif origin in _SCALARS and type(value) is origin:
        return value
    raise ValueError(f"{str(value)[:40]!r} is no {kind}")
