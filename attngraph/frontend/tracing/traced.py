"""What is traced, and what a trace gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram

from attngraph.errors import CaptureError
from attngraph.frontend.interface.shapes import Request, combine, requested_dims
from attngraph.frontend.rewording.hit_loops import Hits
from attngraph.frontend.watching.asked import Place
from attngraph.frontend.watching.questions import Question


@dataclass(frozen=True)
class Traced:
    """A program and the dims that were asked for.

    `requests` have the ranges of the trace, `asked` those that the caller gave. `questions` are
    what the model's code asked of its sizes. `notes` name the dims of Dim.AUTO that it fixes, which
    are `constant`.
    `branches` are the places where the code chooses by a tensor's values, with the side followed;
    at `jumps` the line goes by a number of them alone. Loops over `hits` have all turns.
    `replayed` are functions of libraries whose operators were traced in their stead, `unrounded`
    are roundings of sizes that were left out, and some are `written` as arithmetic. It may have
    loops that are `scanned`, and have written sizes into `texts`. What is
    `resampled` was traced at these sizes of its requests. A `refusal` is torch's, which took its
    demands for more than what was asked; it stands where they are. `parts` are the sizes of axes
    of which the code names a place that they may not have, with the least that does; where these
    slices are `opened`, the trace in which they are of the sample's length is the `closed` one, or
    what it was refused with; it may choose so many at `most` of an axis that has fewer.
    """

    program: ExportedProgram
    requests: tuple[Request, ...]
    asked: tuple[Request, ...]
    questions: tuple[Question, ...] = ()
    notes: tuple[str, ...] = ()
    branches: Mapping[Place, bool] = field(default_factory=dict)
    constant: tuple[Request, ...] = ()
    replayed: tuple[str, ...] = ()
    resampled: tuple[int, ...] = ()
    unrounded: Mapping[str, set[sympy.Symbol]] = field(default_factory=dict)
    written: bool = False
    scanned: bool = False
    texts: bool = False
    refusal: CaptureError | None = None
    whole: tuple[Place, ...] = ()
    hits: Hits | None = None
    parts: tuple[tuple[sympy.Expr, int], ...] = ()
    opened: bool = False
    most: int = 0
    jumps: frozenset[Place] = frozenset()
    closed: Traced | CaptureError | None = None


@dataclass(frozen=True)
class Subject:
    """A module that is to be traced: the sample, and the dims that are asked for.

    `sides` say which side of a branch on a tensor's values is followed, true where they don't say;
    with None such a branch is an error. With a `way` all are followed and marked, as
    followed_branches says. Loops of as many `steps` as one of these are scans.
    """

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dynamic_shapes: Any
    sides: Mapping[Place, bool] | None = None
    way: tuple[bool, ...] | None = None
    steps: frozenset[int] = frozenset()

    @property
    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.args, dict(self.kwargs)

    def requests(self, dynamic_shapes: Any) -> tuple[Request, ...]:
        """The axes that these shapes name."""
        return requested_dims(combine(self.module, *self.inputs), dynamic_shapes)

    @cached_property
    def asked(self) -> tuple[Request, ...]:
        return self.requests(self.dynamic_shapes)
