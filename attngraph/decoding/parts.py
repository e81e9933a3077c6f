"""A model that is several files: what they are given, and how they are written."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from attngraph.errors import OutputError, UsageError
from attngraph.export.runtime.session import Session
from attngraph.optimized import Optimized
from attngraph.paths import data_beside


def save_parts(parts: Mapping[str, Optimized], path: str | Path) -> list[Path]:
    """Writes files into a folder, which is made if need be, and returns their paths.

    Raises OutputError; nothing is left of files half of which were written.
    """
    folder, written = Path(path), list[Path]()
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"The folder {folder} can't be made: {error.strerror}.") from error
    try:
        for name, part in parts.items():
            part.save(folder / name)
            written.append(folder / name)
    except BaseException:
        for file in written:
            file.unlink(missing_ok=True)
            data_beside(file).unlink(missing_ok=True)
        if made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
    return written


def fitting_feeds(
    session: Session, given: Mapping[str, Any], what: str, called: Mapping[str, str] | None = None
) -> dict[str, torch.Tensor]:
    """Tensors as a session takes them. `what` names the part in messages, such as "The encoder".

    `called` are the names under which inputs are given, by the session's, where they are others.
    Raises UsageError for inputs that it lacks or that are missing, for anything but tensors, and
    for other shapes.
    """
    own = {(called or {}).get(name, name): name for name in session.input_names}
    if unknown := [name for name in given if name not in own]:
        raise UsageError(f"{what} has no input {', '.join(unknown)}; it takes {', '.join(own)}.")
    if missing := [name for name in own if name not in given]:
        raise UsageError(f"{what}'s input {', '.join(missing)} is missing.")
    wanted = {name: session.input_shape(own[name]) for name in given}
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}.")
        fixed = [(a, d) for a, d in enumerate(wanted[name]) if isinstance(d, int)]
        if tensor.ndim != len(wanted[name]) or any(tensor.shape[a] != d for a, d in fixed):
            raise UsageError(
                f"{name} has shape {tuple(tensor.shape)}; it must be "
                f"({', '.join(map(str, wanted[name]))})."
            )
    names = {name: (own[name], session.input_dtype(own[name])) for name in given}
    return {names[name][0]: tensor.detach().to(names[name][1]) for name, tensor in given.items()}
