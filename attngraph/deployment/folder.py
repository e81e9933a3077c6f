"""Writes OUT/: the ONNX files, and beside them what a runtime needs of the checkpoint's folder."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from attngraph.checkpoints.folder import CONFIG, MODULES, entries_of, model_in
from attngraph.checkpoints.scheme import KEYS
from attngraph.deployment.kept import kept_files, require_folder
from attngraph.errors import OutputError, UsageError
from attngraph.export.files.save import write_text
from attngraph.export.files.staged import Staged
from attngraph.paths import data_beside, unwritable
from attngraph.scratch import scratch_folder

_FLAT = frozenset(("qwen2_vl",))
"""Models whose settings of the text transformers.js reads at the top of the config."""


class Saved(Protocol):
    """What is written: an ONNX file that was compiled and not saved yet."""

    def save(self, path: str | Path) -> None: ...


class Place(Protocol):
    """Where a compiled model will be saved."""

    def staged(self, name: str) -> Staged: ...

    def name_of(self, name: str) -> str: ...


class OneFile:
    """The ONNX file that is asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held = contextlib.ExitStack()

    def __enter__(self) -> OneFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def staged(self, name: str) -> Staged:
        """Where large weights of a model are put before it is saved."""
        return self._held.enter_context(Staged(self._path))

    def name_of(self, name: str) -> str:
        """What a part is called here."""
        return self._path.name

    def write(
        self,
        parts: Mapping[str, Saved],
        texts: Mapping[str, str],
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Writes the file, and texts beside it.

        Raises OutputError, and UsageError where there are several.
        """
        if len(parts) > 1:
            raise UsageError(
                f"The model becomes {' and '.join(parts)}: give a folder, not {self._path}."
            )
        for part in parts.values():
            part.save(self._path)
        for name, text in texts.items():
            write_text(self._path.with_name(name), text)


class OutputFolder:
    """OUT/ while it is being made: a folder beside it, which takes its place when complete.

    What is left of it is removed at the end of the block, so a failure leaves nothing behind; after
    a kill the next call for the same path removes it.
    """

    def __init__(self, path: Path, source: Path | None) -> None:
        self._path, self._source = path.resolve(), source  # a link goes on leading there
        self._held = contextlib.ExitStack()
        self._made = contextlib.ExitStack()

    def __enter__(self) -> OutputFolder:
        require_folder(self._path, self._source)
        scratch = scratch_folder(self._path.name, self._path.parent)
        try:
            folder = self._made.enter_context(scratch)
            self._partial, self._before = folder / "new", folder / "before"
            self._partial.mkdir()
        except OSError as error:
            self._made.close()
            raise unwritable(self._path, error) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()
        self._made.close()

    def staged(self, name: str) -> Staged:
        """Where large weights of the file `name` are put before it is saved."""
        return self._held.enter_context(Staged(self._partial / name))

    def name_of(self, name: str) -> str:
        """What a part is called here."""
        return name

    def write(
        self,
        parts: Mapping[str, Saved],
        texts: Mapping[str, str],
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Writes the files and what is kept of the checkpoint, and puts the folder in its place.

        `settings` take the places of those of its config.json.
        Raises OutputError; what was there before is then there still.
        """
        try:
            for name, part in parts.items():
                part.save(self._partial / name)
        except OutputError as error:
            raise OutputError(str(error).replace(str(self._partial), str(self._path))) from error
        self._held.close()
        try:
            kept_of_source = {} if self._source is None else kept_files(self._source)
            for kept, file in kept_of_source.items():
                place = self._partial / kept
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, place)
            for name, text in texts.items():
                (self._partial / name).write_text(text, "utf-8")
            self._adapt_config(parts, settings)
            self._adapt_modules()
            self._put()
        except OSError as error:
            raise unwritable(self._path, error) from error

    def _adapt_config(self, parts: Iterable[str], settings: Mapping[str, Any]) -> None:
        """Makes config.json say what is true of the files here.

        It names those with their weights beside them, and repeats settings where transformers.js
        asks for them. It says nothing of how the source's weights are quantized: a reader would
        look for their codes.
        """
        config = self._partial / CONFIG
        if not config.is_file():
            return
        before = config.read_text("utf-8")
        said: dict[str, Any] = {**json.loads(before), **settings}
        for part in (said, *(each for each in said.values() if isinstance(each, dict))):
            for key in KEYS:
                part.pop(key, None)
        if said.get("model_type") in _FLAT:
            said = {**said.get("text_config", {}), **said}
        if beside := [name for name in parts if data_beside(self._partial / name).exists()]:
            of_js = said.setdefault("transformers.js_config", {})
            of_js["use_external_data_format"] = dict.fromkeys(beside, 1)
        if said != json.loads(before):
            config.write_text(f"{json.dumps(said, indent=2)}\n", "utf-8")

    def _adapt_modules(self) -> None:
        """Makes modules.json say that the model is here, where it was in a folder of its own."""
        if self._source is None or model_in(self._source) == self._source:
            return
        first, *others = entries_of(self._source)
        entries = [{**first, "path": ""}, *others]
        (self._partial / MODULES).write_text(f"{json.dumps(entries, indent=2)}\n", "utf-8")

    def _put(self) -> None:
        """No system call exchanges two folders everywhere: what is there steps aside first."""
        is_there = self._path.is_dir()
        if is_there:
            os.replace(self._path, self._before)
        try:
            os.replace(self._partial, self._path)
        except BaseException:
            if is_there:
                os.replace(self._before, self._path)
            raise


def place_of(path: Path, source: Path | None, *, parts: bool = False) -> OneFile | OutputFolder:
    """Where a compiled model goes: of the checkpoint `source`, and of what may become several
    `parts`, a folder, unless the path ends in .onnx."""
    if path.suffix == ".onnx" or (source is None and not parts):
        return OneFile(path)
    return OutputFolder(path, source)


def folder_bytes(path: Path) -> int:
    """The size of all files of a folder."""
    return sum(item.stat().st_size for item in path.rglob("*") if item.is_file())
