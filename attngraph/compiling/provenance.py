"""How a file was made, in its metadata: the passes, the precision, the format of its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from attngraph.compiling.pipeline import pipeline
from attngraph.errors import UsageError
from attngraph.export.formats import Precision, Weights
from attngraph.export.precision.quantize import Rounding
from attngraph.export.runtime.saturation import ROUNDING_KEY
from attngraph.export.target import OLDEST_OPSET, OPSET, Target
from attngraph.metadata import json_object
from attngraph.numeric import whole
from attngraph.passes import Pass

_PASSES = "attngraph.options"
_PRECISION = "attngraph.precision"
_WEIGHTS = "attngraph.weights"
_OPSET = "attngraph.opset"
_PORTABLE = "attngraph.portable"
_CHOSEN = "attngraph.codes"


@dataclass(frozen=True)
class Provenance:
    """`passes` are the keyword arguments of `pipeline`, None where others made the file.

    `precision` is the one it was made in, `weights` the format that its weights are quantized to,
    `rounding` how the inputs of these linears are rounded. `opset` and `portable` are those of the
    target: the opset that was asked for, and whether the file has standard operators only. `chosen`
    are the digests of codes that were chosen on data, by their weights' names.
    """

    passes: Mapping[str, Any] | None = None
    precision: Precision | None = None
    weights: Weights | None = None
    rounding: Rounding | None = None
    opset: int = OPSET
    portable: bool = False
    chosen: Mapping[str, str] = field(default_factory=dict)

    def on(self, target: Target) -> Target:
        """The target, with the operators that the file may hold."""
        return replace(target, opset=self.opset, portable=self.portable)

    def write(self, metadata: MutableMapping[str, str]) -> None:
        """Puts it where `read` finds it."""
        said = {_PRECISION: self.precision, _WEIGHTS: self.weights}
        if self.rounding is not None:
            metadata[ROUNDING_KEY] = self.rounding.to_json()
        if self.passes is not None:
            metadata[_PASSES] = json.dumps(self.passes)
        if self.opset != OPSET:
            metadata[_OPSET] = str(self.opset)
        if self.portable:
            metadata[_PORTABLE] = "true"
        if self.chosen:
            metadata[_CHOSEN] = json.dumps(self.chosen)
        metadata.update({key: value for key, value in said.items() if value is not None})

    @classmethod
    def read(cls, metadata: Mapping[str, str], path: Path) -> Provenance:
        """The provenance of the file at `path`. Raises UsageError if another version made it."""
        precision, weights = metadata.get(_PRECISION), metadata.get(_WEIGHTS)
        formats = get_args(Weights)
        if weights and weights not in formats:
            raise UsageError(
                f"{path} says that its weights are in {weights!r}, and there are "
                f"{' and '.join(formats)} only: optimize the model again."
            )
        try:
            found = cls(
                json_object(passes) if (passes := metadata.get(_PASSES)) else None,
                next((known for known in get_args(Precision) if known == precision), None),
                next((known for known in formats if known == weights), None),
            )
            found.pipeline()
            opset = whole("opset", int(metadata.get(_OPSET, OPSET)), OLDEST_OPSET, OPSET)
            found = replace(found, opset=opset, portable=metadata.get(_PORTABLE) == "true")
            found = replace(found, chosen=json_object(metadata.get(_CHOSEN) or "{}"))
            if rounding := metadata.get(ROUNDING_KEY):
                found = replace(found, rounding=Rounding.from_json(rounding))
        except (TypeError, KeyError, ValueError, UsageError) as error:
            raise UsageError(
                f"{path} was made by another attngraph, in a way that this one doesn't know: "
                "optimize the model again."
            ) from error
        return found

    def pipeline(self) -> list[Pass]:
        """The passes it was made with; of a file by others, those of `attngraph optimize`."""
        return pipeline(**(self.passes or {}))
