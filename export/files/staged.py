"""Weights beside a model file, written once: the file that was checked is the one kept."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import onnx_ir as ir

from attngraph.errors import OutputError
from attngraph.export.files.save import is_external, save, to_session
from attngraph.export.runtime.session import Session
from attngraph.export.target import Target
from attngraph.mapped import is_large, no_holes
from attngraph.paths import data_beside, unwritable
from attngraph.scratch import scratch_folder


class Staged:
    """A folder next to `path`, for models that are opened before one of them is saved there.

    It holds the file of the model that was opened last, where its weights lie in a file of their
    own, and is removed at the end of the block. Sessions may be open on it: they have it mapped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened = contextlib.ExitStack()
        self._folder: Path | None = None
        self._model: ir.Model | None = None

    def __enter__(self) -> Staged:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def session(self, model: ir.Model, target: Target, **options: Any) -> Session:
        """As `to_session`. Raises OutputError also where `path` has no room for the weights."""
        if not is_external(model):
            return to_session(model, target, **options)
        file = self._made() / self._path.name
        data, self._model = self.data_of(model, file), None
        try:
            save(model, file, data=data)
        except OutputError as error:
            raise OutputError(str(error).replace(str(file), str(self._path))) from error
        self._model = model
        large = is_large(data_beside(file).stat().st_size)
        with no_holes() if large else contextlib.nullcontext():
            return Session.open(file, target, **options)

    def data_of(self, model: ir.Model, path: Path) -> Path | None:
        """The model's weights, as `save` would write them beside `path`; None where they aren't."""
        if self._folder is None or self._model is not model:
            return None
        data = data_beside(self._folder / path.name)
        return data if data.is_file() else None

    def _made(self) -> Path:
        if self._folder is None:
            scratch = scratch_folder(self._path.name, self._path.parent)
            try:
                self._folder = self._opened.enter_context(scratch)
            except OSError as error:
                raise unwritable(self._path, error) from error
        return self._folder
