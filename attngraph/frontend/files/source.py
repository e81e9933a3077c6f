"""A model and its inputs as a command line names them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from attngraph.checkpoints.folder import Folder
from attngraph.checkpoints.tasks import require_task
from attngraph.errors import UsageError
from attngraph.flag import Flag
from attngraph.frontend.files.names import kind_of, require_samples
from attngraph.frontend.files.sniff import ModelKind

_INPUTS = "Inputs"  # the heading of their flags


@dataclass(frozen=True)
class Source:
    """A model's file or factory or both, and texts that describe its inputs and dims.

    Of a checkpoint's folder, `task` says which head is wanted, by default the one that was saved.
    """

    path: Path | None = None
    factory: Annotated[
        str | None,
        Flag(
            "A callable that returns a module, (module, args) or (module, args, dynamic_shapes).",
            metavar="PKG.MOD:FN",
        ),
    ] = None
    factory_args: Annotated[
        tuple[str, ...],
        Flag(
            "What the factory is called with, e.g. --factory "
            "transformers:AutoModel.from_pretrained --factory-arg checkpoint/. Once for each.",
            metavar="[NAME=]VALUE",
            name="factory-arg",
        ),
    ] = ()
    trust_pickle: Annotated[
        bool, Flag("Load a file that can run its author's code. Only for files you trust.")
    ] = False
    trust_code: Annotated[
        bool,
        Flag(
            "Run the code that a checkpoint's folder brings (auto_map). Only for authors you trust."
        ),
    ] = False
    task: Annotated[
        str | None,
        Flag(
            "The head of a checkpoint's model, e.g. feature-extraction or text-classification; "
            "by default the one that was saved.",
            metavar="TASK",
        ),
    ] = None
    inputs: Annotated[
        tuple[str, ...],
        Flag(
            "A sample input, e.g. x=int64\\[batch=2,8]. A dim with a name is dynamic, "
            "and the same name is the same dim everywhere. Once for each input.",
            metavar="NAME=DTYPE[DIMS]",
            name="input",
            panel=_INPUTS,
        ),
    ] = ()
    npz: Annotated[
        Path | None,
        Flag(
            "Sample inputs as arrays by name; --input then only names their dims.",
            metavar="SAMPLE.npz",
            name="inputs",
            panel=_INPUTS,
        ),
    ] = None
    dims: Annotated[
        tuple[str, ...],
        Flag(
            "The sizes a named dim must take, e.g. seq=2..2048, or seq=auto for those that the "
            "model takes, as without --dim; or, of an exported program, the name of a dim, e.g. "
            "seq=input_ids:1. Once for each dim.",
            metavar="NAME=LOW..HIGH|auto|INPUT:AXIS",
            name="dim",
            panel=_INPUTS,
        ),
    ] = ()

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
