"""A model and its inputs as a command line names them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from attngraph.checkpoints.folder import Folder
from attngraph.checkpoints.tasks import require_task
from attngraph.errors import UsageError
from attngraph.frontend.files.names import kind_of, require_samples
from attngraph.frontend.files.sniff import ModelKind


@dataclass(frozen=True)
class Source:
    """A model's file or factory or both, and texts that describe its inputs and dims.

    Of a checkpoint's folder, `task` says which head is wanted, by default the one that was saved.
    """

    path: Path | None = None
    factory: str | None = None
    trust_pickle: bool = False
    inputs: tuple[str, ...] = ()
    npz: Path | None = None
    dims: tuple[str, ...] = ()
    task: str | None = None
    trust_code: bool = False
    factory_args: tuple[str, ...] = ()

    @property
    def is_folder(self) -> bool:
        """Whether it is a checkpoint's folder, which says by itself what the model is."""
        is_folder = self.path is not None and os.path.isdir(self.path)  # false if out of reach
        return is_folder and self.factory is None

    def check(self) -> None:
        """Checks what takes milliseconds and no torch: whether the files exist, and so on.

        Raises LoadError for a file, UsageError for what doesn't go together.
        """
        if self.factory_args and self.factory is None:
            raise UsageError("--factory-arg is for --factory; leave it out.")
        kind = kind_of(self.path, self.factory)
        require_task(self.task)
        if self.task is not None and (kind is not ModelKind.CHECKPOINT or self.factory is not None):
            raise UsageError("--task is for a checkpoint's folder; leave it out.")
        if self.path is not None and self.is_folder:
            Folder.read(self.path, trust_pickle=self.trust_pickle, trust_code=self.trust_code)
        if self.npz is not None:
            require_samples(self.npz)
