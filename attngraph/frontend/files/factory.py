"""`--factory pkg.mod:fn`: import the user's function and read what it returns."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from attngraph.errors import AttngraphError, LoadError, UsageError
from attngraph.frontend.files.names import split_factory


@dataclass(frozen=True)
class Built:
    """What a factory returned: a module, perhaps sample arguments, perhaps dynamic shapes."""

    module: torch.nn.Module
    args: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    dynamic_shapes: object | None = None


def build(spec: str, arguments: Sequence[str] = ()) -> Built:
    """Import and call the factory `spec` (`pkg.mod:fn`), with the working directory importable.

    `arguments` are texts, `name=value` or a value alone. Raises UsageError if there is no such
    function, LoadError if it fails or returns something else than a module.
    """
    args, kwargs = parse_arguments(arguments)
    with importable_cwd():
        function = _resolve(spec)
        try:
            result = function(*args, **kwargs)
        except AttngraphError:
            raise
        except SystemExit as error:
            raise LoadError(f"The factory {spec} {_ends(error)}") from error
        except Exception as error:
            raise LoadError(
                f"The factory {spec} failed: {type(error).__name__}: {error}."
            ) from error
    return _read(spec, result)


@contextmanager
def importable_cwd() -> Iterator[None]:
    """Put the working directory first on the import path, as `python -m` does."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        if here in sys.path:
            sys.path.remove(here)


def _resolve(spec: str) -> Callable[..., object]:
    module_name, name = split_factory(spec)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(
                f"--factory {spec}: there is no module {error.name!r} on the import path or in "
                f"{os.getcwd()}; check the name or the folder you run from."
            ) from error
        raise LoadError(f"--factory {spec}: importing {module_name} failed: {error}.") from error
    except SystemExit as error:
        raise LoadError(f"--factory {spec}: importing {module_name} {_ends(error)}") from error
    except Exception as error:
        raise LoadError(
            f"--factory {spec}: importing {module_name} failed: {type(error).__name__}: {error}."
        ) from error
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        own = [
            n for n, _ in inspect.getmembers(module, inspect.isfunction) if not n.startswith("_")
        ]
        raise UsageError(
            f"--factory {spec}: {module_name} has no function {name!r}; it has "
            f"{', '.join(own) or 'none'}."
        )
    found: Callable[..., object] = function
    return found


def _ends(error: SystemExit) -> str:
    return (
        f"ends the program (SystemExit: {error.code}), as a parser of command lines does: give a "
        "function that only builds the model, and its arguments as --factory-arg."
    )


def parse_arguments(texts: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    """What `--factory-arg` gives: values of Python (`3`, `None`, `[1, 2]`), and texts as they are.

    Raises UsageError for a name that is given twice.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not (sign and name.isidentifier()):
            args.append(_value(text))
        elif name in kwargs:
            raise UsageError(f"--factory-arg {name} was given twice.")
        else:
            kwargs[name] = _value(value)
    return args, kwargs


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return text


def _read(spec: str, result: object) -> Built:
    parts = result if isinstance(result, tuple) else (result,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], torch.nn.Module):
        raise LoadError(
            f"The factory {spec} returned {_kind(result)}; return a module, (module, args) or "
            "(module, args, dynamic_shapes)."
        )
    module = parts[0]
    args, kwargs = _arguments(spec, parts[1]) if len(parts) > 1 else (None, {})
    return Built(module, args, kwargs, parts[2] if len(parts) > 2 else None)


def _arguments(spec: str, value: object) -> tuple[tuple[Any, ...] | None, dict[str, Any]]:
    if value is None:
        return None, {}
    if isinstance(value, torch.Tensor):
        return (value,), {}
    if isinstance(value, tuple | list):
        return tuple(value), {}
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return (), dict(value)
    raise LoadError(
        f"The factory {spec} returned args of type {type(value).__name__}; return a tuple of "
        "tensors, or a dict from parameter name to tensor."
    )


def _kind(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return f"a {type(value).__name__}"
