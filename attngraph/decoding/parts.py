"""A model that is several files: what they are given, and how they are written."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from attngraph.decoding.decoder import Decoder
from attngraph.decoding.rules import Rules
from attngraph.decoding.stream import TokenStream
from attngraph.errors import OutputError, UsageError
from attngraph.export.runtime.session import Session
from attngraph.frontend.families.described import Described
from attngraph.optimized import Optimized
from attngraph.paths import data_beside
from attngraph.reports.report import Report


class OfParts:
    """A decoder and the models in front of it, each a file.

    `parts` are these models, compiled or as the sessions of loaded files, by the names of their
    files. The metadata of the first have `described`, how the parts go together, and `rules`, which
    are those of the model's generation config; set others to change them. `decoder_file` is what
    the decoder's file is called.
    """

    decoder_file: str

    def __init__(
        self,
        parts: Mapping[str, Optimized | Session],
        decoder: Decoder,
        described: Described,
        rules: Rules,
    ) -> None:
        self.parts, self.decoder, self.rules = dict(parts), decoder, rules
        self._described = described

    def save(self, folder: str | Path) -> list[Path]:
        """Writes the files into a folder, which is made if need be, and returns their paths.

        Raises OutputError, and UsageError where the files were loaded: copy them.
        """
        return save_parts(self.files, folder)

    @property
    def files(self) -> dict[str, Optimized]:
        """What was compiled, by the name of its file. Raises UsageError where it was loaded."""
        made = {name: part for name, part in self.parts.items() if isinstance(part, Optimized)}
        if len(made) < len(self.parts) or self.decoder.optimized is None:
            raise UsageError(
                "This model was loaded from files: copy those; their reports are not in them."
            )
        first = next(iter(made.values()))
        for described in (self._described, self.rules):
            first.model.metadata_props[described.key] = described.to_json()
        return {**made, self.decoder_file: self.decoder.optimized}

    @property
    def reports(self) -> dict[str, Report]:
        """What was done and measured, by file. Raises UsageError where the files were loaded."""
        return {name: part.report for name, part in self.files.items()}

    def session(self, name: str) -> Session:
        """The session of a file before the decoder. Raises ProviderError if it can't be opened."""
        part = self.parts[name]
        return part if isinstance(part, Session) else part.session

    def _feeds_of(
        self,
        name: str,
        given: Mapping[str, Any],
        what: str,
        called: Mapping[str, str] | None = None,
    ) -> dict[str, torch.Tensor]:
        """`fitting_feeds` of a file, of sizes that it is right for."""
        feeds, part = fitting_feeds(self.session(name), given, what, called), self.parts[name]
        if isinstance(part, Optimized):
            part.check_sizes(feeds)
        return feeds

    def _stream(
        self,
        ids: torch.Tensor,
        count: int,
        mask: torch.Tensor | None = None,
        **how: Any,
    ) -> TokenStream:
        """As `Decoder.stream`, by `rules`."""
        return self.decoder.stream(ids, count, mask, rules=self.rules, **how)


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
