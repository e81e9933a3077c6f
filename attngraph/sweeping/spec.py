"""SPEC.toml: models × variants of options, as command lines of `attngraph optimize`.

```toml
[options]                     # of every task: flags of `attngraph optimize`, without dashes
verify = "final"

[[models]]
name = "bert"
model = "checkpoints/bert"

[[models]]
name = "gpt"
factory = "examples.nanogpt:build"
dim = ["seq=2..64"]

[[variants]]                  # each model is compiled in each of them
name = "cpu"

[[variants]]
name = "int8"
weights = "int8"
```
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from attngraph.errors import UsageError

Kind = Literal["switch", "value", "list"]
"""A flag without a value, with one, or one that may be given several times."""
TABLES = ("options", "models", "variants")
_BESIDE = (".html", ".json")
"""What the pages and reports end in, which lie beside the results."""
_LARGEST, _MOST_DOTS = 1 << 20, 10_000
"""Bytes of a file, and dots: of a key of n parts tomllib keeps n² / 2 of them."""
_NAME = re.compile(r"[\w][\w.+-]*", re.ASCII)


@dataclass(frozen=True)
class Task:
    """One compile: its name is a path inside the sweep's folder, `arguments` those of `optimize`.

    `model` is the file or folder that it reads, None where a factory alone makes the model.
    """

    name: str
    arguments: tuple[str, ...]
    model: str | None
    makes_folder: bool

    def output(self, folder: Path) -> Path:
        """What is written: a folder, or the model's file in one."""
        place = folder / self.name
        return place if self.makes_folder else place / "model.onnx"


def read_spec(path: Path, flags: Mapping[str, Kind]) -> list[Task]:
    """The tasks of a file, the variants of a model one after another.

    `flags` are those that a table may set. Raises UsageError for a file that can't be read, and
    names the table and the key where something in it is wrong.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST + 1).decode("utf-8")
        if len(text) > _LARGEST or text.count(".") > _MOST_DOTS:
            raise UsageError(
                f"{path} is too large: it may have {_LARGEST} bytes, {_MOST_DOTS} of them dots; "
                "make several of it."
            )
        spec = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} can't be read: {error}.") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is no TOML: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} can't be read: it is nested too deeply, or a number in it is too long."
        ) from error
    if unknown := sorted(spec.keys() - {*TABLES}):
        raise UsageError(f"{path} has a table {unknown[0]!r}; it can have {', '.join(TABLES)}.")
    shared = spec.get("options", {})
    if not isinstance(shared, dict):
        raise UsageError(f"{path}: options is a table, written [options].")
    models = list(_named(spec.get("models", []), "models", path))
    variants = list(_named(spec.get("variants", []), "variants", path)) or [("", {})]
    if not models:
        raise UsageError(f"{path} names no models: give each a table [[models]].")
    tasks = []
    for name, own in models:
        for variant, options in variants:
            task = f"{name}/{variant}".rstrip("/")
            tasks.append(_task(task, {**shared, **own, **options}, flags, path))
    return tasks


def _named(tables: Any, what: str, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each table by its name, which makes a part of a path."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise UsageError(f"{path}: {what} are tables, each written [[{what}]].")
    seen = set()
    for table in tables:
        own = dict(table)
        name = own.pop("name", None)
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name.endswith(_BESIDE):
            raise UsageError(
                f"{path}: one of [[{what}]] has the name {name!r}; give it one of letters, digits, "
                "-, _, + and dots, which doesn't end in .html or .json."
            )
        if name.casefold() in seen:
            raise UsageError(f"{path}: two of [[{what}]] are called {name}; name one otherwise.")
        seen.add(name.casefold())
        yield name, own


def _task(name: str, settings: dict[str, Any], flags: Mapping[str, Kind], path: Path) -> Task:
    model = settings.pop("model", None)
    if model is None and "factory" not in settings:
        raise UsageError(f"{path}: {name} has no model; give it model = PATH, or a factory.")
    if not (model is None or isinstance(model, str)):
        raise UsageError(f"{path}: the model of {name} is {model!r}; it is a path in quotes.")
    arguments: list[str] = [] if model is None else [model]
    for key, value in settings.items():
        flag = key.replace("_", "-")
        if flag not in flags:
            near = difflib.get_close_matches(flag, flags, 1)
            hint = f"did you mean {near[0]}" if near else "see attngraph optimize --help"
            raise UsageError(f"{path}: {name} sets {key}, which is no option of optimize; {hint}?")
        arguments += _flag(flag, flags[flag], value, f"{path}: {key} of {name}")
    # A checkpoint, and what is compiled with its cache, become folders.
    is_folder = model is not None and Path(model).is_dir()
    makes_folder = is_folder or settings.get("decode") is True
    return Task(name, tuple(arguments), model, makes_folder)


def _flag(flag: str, kind: Kind, value: Any, where: str) -> Iterable[str]:
    """A key of a table, as it stands on a command line."""
    if kind == "switch":
        if not isinstance(value, bool):
            raise UsageError(f"{where} is {value!r}; it is true or false.")
        return [f"--{flag}"] if value else []
    values = value if isinstance(value, list) and kind == "list" else [value]
    if any(isinstance(each, bool) or not isinstance(each, (str, int, float)) for each in values):
        expected = "a text or a number" + (", or a list of them" if kind == "list" else "")
        raise UsageError(f"{where} is {value!r}; it is {expected}.")
    return [part for each in values for part in (f"--{flag}", str(each))]
