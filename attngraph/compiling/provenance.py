"""How a file was made, in its metadata: the passes, the precision, the format of its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from attngraph.compiling.pipeline import pipeline
from attngraph.errors import UsageError
from attngraph.export.formats import Precision, Weights
from attngraph.export.precision.quantize import Rounding
from attngraph.export.runtime.saturation import ROUNDING_KEY
from attngraph.passes import Pass

_PASSES = "attngraph.options"
_PRECISION = "attngraph.precision"
_WEIGHTS = "attngraph.weights"


@dataclass(frozen=True)
class Provenance:
    """`passes` are the keyword arguments of `pipeline`, None where others made the file.

    `precision` is the one it was made in, `weights` the format that its weights are quantized to,
    `rounding` how the inputs of these linears are rounded.
    """

    passes: Mapping[str, Any] | None = None
    precision: Precision | None = None
    weights: Weights | None = None
    rounding: Rounding | None = None

    def write(self, metadata: MutableMapping[str, str]) -> None:
        """Puts it where `read` finds it."""
        said = {_PRECISION: self.precision, _WEIGHTS: self.weights}
        if self.rounding is not None:
            metadata[ROUNDING_KEY] = self.rounding.to_json()
        if self.passes is not None:
            metadata[_PASSES] = json.dumps(self.passes)
        metadata.update({key: value for key, value in said.items() if value is not None})

    @classmethod
    def read(cls, metadata: Mapping[str, str], path: Path) -> Provenance:
        """That of the file at `path`. Raises UsageError if another version made it."""
        precision, weights = metadata.get(_PRECISION), metadata.get(_WEIGHTS)
        formats = get_args(Weights)
        if weights and weights not in formats:
            raise UsageError(
                f"{path} says that its weights are in {weights!r}, and there are "
                f"{' and '.join(formats)} only: optimize the model again."
            )
        found = cls(
            json.loads(metadata.get(_PASSES) or "null"),
            next((known for known in get_args(Precision) if known == precision), None),
            next((known for known in formats if known == weights), None),
        )
        try:
            found.pipeline()
            if rounding := metadata.get(ROUNDING_KEY):
                found = replace(found, rounding=Rounding.from_json(rounding))
        except (TypeError, KeyError, ValueError) as error:
            raise UsageError(
                f"{path} was made by another attngraph, in a way that this one doesn't know: "
                "optimize the model again."
            ) from error
        return found

    def pipeline(self) -> list[Pass]:
        """The passes it was made with; of a file by others, those of `attngraph optimize`."""
        return pipeline(**(self.passes or {}))
