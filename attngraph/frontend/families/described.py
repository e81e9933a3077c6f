"""What a file's metadata says of the model that it is a part of, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from attngraph.errors import LoadError
from attngraph.metadata import record


@dataclass(frozen=True)
class Described:
    """Stands under `key`. Of a file without it, `unlike` is what it doesn't say."""

    key: ClassVar[str]
    unlike: ClassVar[str]

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def of_file(cls, metadata: Mapping[str, str], path: str | Path) -> Self:
        """Raises LoadError where a file doesn't say."""
        return cls.from_json(metadata.get(cls.key), str(path))

    @classmethod
    def from_json(cls, text: str | None, source: str) -> Self:
        """Raises LoadError where a file doesn't say."""
        try:
            return record(cls, text)
        except ValueError as error:
            raise LoadError(f"{source} doesn't say {cls.unlike}.") from error


def frozen(value: Any) -> Any:
    """Lists as tuples, at every depth."""
    return tuple(map(frozen, value)) if isinstance(value, (list, tuple)) else value
