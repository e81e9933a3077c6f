"""A model and its inputs as a command line names them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attngraph.frontend.names import kind_of, require_samples


@dataclass(frozen=True)
class Source:
    """A model's file or factory or both, and texts that describe its inputs and dims."""

    path: Path | None = None
    factory: str | None = None
    trust_pickle: bool = False
    inputs: tuple[str, ...] = ()
    npz: Path | None = None
    dims: tuple[str, ...] = ()

    def check(self) -> None:
        """Checks what takes milliseconds and no torch: whether the files exist, and so on.

        Raises LoadError for a file, UsageError for what doesn't go together.
        """
        kind_of(self.path, self.factory)
        if self.npz is not None:
            require_samples(self.npz)
