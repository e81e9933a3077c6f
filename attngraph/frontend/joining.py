"""How images join the text, as a file's metadata says it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from attngraph.errors import LoadError
from attngraph.frontend.image_sizes import Tiles


@dataclass(frozen=True)
class Joining:
    """`token` stands for a piece of an image in ids, of `merged` patches by as many where images
    lie on grids. With a `unit`, images are encoded one by one and their sides are multiples of it;
    with `tiles`, each comes as such.
    """

    token: int
    merged: int = 1
    unit: int | None = None
    tiles: Tiles | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | None, source: str) -> Joining:
        """Raises LoadError where a file doesn't say."""
        try:
            fields: dict[str, Any] = json.loads(text or "")
            if (said := fields.get("tiles")) is not None:
                pairs = tuple((int(height), int(width)) for height, width in said["resolutions"])
                fields["tiles"] = Tiles(int(said["size"]), int(said["side"]), pairs)
            return cls(**fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise LoadError(
                f"{source} doesn't say which token stands for an image: it wasn't compiled as the "
                "vision encoder of a model that reads images."
            ) from error
