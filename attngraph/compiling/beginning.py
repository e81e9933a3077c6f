"""The first step of a compile: the model as a graph, and the check that it is held against."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

import torch

from attngraph.checks.both_sizes import at_all_sizes
from attngraph.checks.branches import followed, settled, uncompared
from attngraph.checks.broken_weights import require_sound
from attngraph.checks.check import Cases, Check
from attngraph.checks.traced import LONGEST, conditions_with, required_conditions
from attngraph.compiling.precision_search import check_precision
from attngraph.compiling.told_sizes import where
from attngraph.errors import CaptureError, UsageError
from attngraph.export.formats import Precision
from attngraph.export.lowering.emission.buffers import Buffers
from attngraph.export.precision import own_precision
from attngraph.frontend.capture import Captured
from attngraph.frontend.model import Model
from attngraph.frontend.sizes.asked_ranges import demands_of
from attngraph.frontend.sizes.suspects import Suspect
from attngraph.frontend.tracing.trace_errors import Specialised
from attngraph.ir import Graph
from attngraph.ir.conditions import shown
from attngraph.ir.dims import symbols_of
from attngraph.ir.ranges import Ranges
from attngraph.ir.settling import bounded
from attngraph.options import Options
from attngraph.reports.report import Report
from attngraph.stages import begins


@dataclass(frozen=True)
class Prepared:
    """What is known of a model beside its inputs: the cases to check it on, a static cache, and
    what makes inputs of other sizes.
    """

    cases: Cases | None = None
    buffers: Buffers | None = None
    at: Callable[[Mapping[str, int]], tuple[torch.Tensor, ...]] | None = None


Prepare = Callable[[Captured], Prepared]
"""Gets the model as captured. What it changes in the graph's dims holds for the passes."""


@contextlib.contextmanager
def stage(name: str, report: Report) -> Iterator[None]:
    """Tells that a stage begins, and adds its seconds to the report."""
    begins(name)
    start = time.perf_counter()
    yield
    report.timings[name] = report.timings.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class Begun:
    """A captured model whose trace was found to be the model. `own` is its weights' precision."""

    captured: Captured
    check: Check
    own: Precision
    buffers: Buffers | None
    notes: list[str]


def begin(
    model: Model,
    options: Options,
    prepare: Prepare | None,
    report: Report,
) -> Begun:
    """Captures the model; at other sizes than the sample's where that keeps a dim open and the
    check agrees. Raises CaptureError, and UsageError for a precision that it doesn't have.
    """
    # The cases of a decoder come after its capture, and are no sizes that a trace is tried at.
    elsewhere = options.verifies and prepare is None
    try:
        found = _begun(model, options, prepare, report, elsewhere=elsewhere)
    except Specialised as error:
        if options.verifies:
            raise
        raise CaptureError(
            f"{error} With verification it is traced at other sizes too, which is taken where the "
            "model agrees: leave out --verify off."
        ) from error
    if found is None:
        found = _begun(model, options, prepare, report, elsewhere=False)
    assert found is not None
    return found


def _begun(
    model: Model,
    options: Options,
    prepare: Prepare | None,
    report: Report,
    *,
    elsewhere: bool,
) -> Begun | None:
    """None where a trace from elsewhere isn't the model at the sizes that it leaves out."""
    with stage("capture", report):
        take = partial(followed, verifies=options.verifies, elsewhere=elsewhere)
        is_compared = options.verifies and prepare is None
        captured = at_all_sizes(model, take) if is_compared else take(model)
    if prepare is not None:  # no sizes are tried below those that torch takes for granted
        _without_ends(captured.graph, captured.suspects)
    _check_weights(captured.graph, model.source)
    own = own_precision(captured.graph)
    _check_formats(options, options.precision or own, own, model.source)
    prepared = Prepared()

    def checked(captured: Captured) -> Check:
        nonlocal prepared
        prepared = Prepared() if prepare is None else prepare(captured)
        hides_rows = "no-fully-masked-rows" not in options.assume
        cases, at = prepared.cases, prepared.at
        return Check(model, captured, own, cases, hides_rows=hides_rows, at=at)

    check = checked(captured)
    told = require_sound(check, verifies=options.verifies)
    if captured.branches and not options.verifies:
        captured = uncompared(captured)
    elif captured.branches:
        with stage("capture", report):
            captured, check = settled(model, check, checked, elsewhere=elsewhere)
    notes = [*model.notes, *captured.notes, *told]
    if prepared.cases is None:  # those of a decoder have sizes of 1
        required = _require_suspects(captured, check, options.verifies)
        if required is None:
            return None
        at_capture = demands_of(captured.demanded, captured.graph.dims)
        notes = [note for note in notes if note not in at_capture] + required
    return Begun(captured, check, own, prepared.buffers, list(dict.fromkeys(notes)))


def _require_suspects(captured: Captured, check: Check, verifies: bool) -> list[str] | None:
    """Makes conditions of what the trace took for granted of its sizes, unless it isn't needed.

    None where one of them leaves out the sample itself. Raises CaptureError where one excludes a
    size of 1 that was asked for.
    """
    graph = captured.graph
    unverified = [suspect for suspect in captured.suspects if not suspect.assumed]
    required = required_conditions(check, graph) if verifies else unverified
    if any(suspect.beyond and suspect.start is None for suspect in required):
        return None
    demanded = [each for each in required if not each.assumed and not each.is_end]
    if captured.opened and any(each.start is None for each in demanded):
        return None  # what a trace with slices of the sample's length doesn't demand
    refusals = [(each.start or 0, each.refusal) for each in required if each.refusal is not None]
    if refusals:
        raise max(refusals, key=itemgetter(0))[1]
    for suspect in required:
        if suspect.asked and suspect.start is None:
            name, (sample, *_) = min(suspect.asked), check.samples.sizes()
            excludes_one = Ranges({}, (suspect.condition,)).broken({**sample, name: 1})
            raise CaptureError(
                f"Dim {name!r} can't {'be 1' if excludes_one else 'take every size'}: "
                f"the model demands {shown(suspect.condition)}"
                f"{suspect.place}, as torch.export traces it. Ask for a range where that holds, "
                f"or for whatever it takes: --dim {name}=auto, or Dim({name!r}) without ends."
            )
    if captured.refusal is not None and any(suspect.recur for suspect in required):
        raise captured.refusal
    others = _without_ends(graph, required)
    graph.conditions = conditions_with(graph, captured.suspects, others)
    found = {suspect.condition: suspect.place for suspect in required if not suspect.is_end}
    ends = [suspect.condition for suspect in required if suspect.is_end]
    needed = {*found, *ends}
    beyond = [s for s in captured.suspects if (s.beyond or s.recur) and s.condition not in needed]
    told = [f"{shown(suspect.condition)}{suspect.place}" for suspect in beyond if suspect.place]
    if not told and beyond:  # torch's own questions, such as whether two sizes are equal
        told = [where([suspect.condition for suspect in beyond], graph.dims)]
    return [
        *demands_of({**captured.demanded, **found}, graph.dims),
        *(
            f"Sizes have {shown(end)}: "
            + (
                "the model itself fails at larger ones."
                if end.gts < LONGEST
                else "it wasn't run at larger ones, for their length."
            )
            for end in ends
        ),
        *(
            f"The file does at all sizes what the model does where {condition}; the two were "
            "compared at some of the other sizes, and are equal."
            for condition in told
        ),
    ]


def _without_ends(graph: Graph, suspects: Sequence[Suspect]) -> list[Suspect]:
    """Has dims begin and end where suspects say so; the others.

    A range that begins at 2 is torch.export's own, and counts as from 1: 2 is a condition.
    """
    others = []
    infos = bounded(graph.dims, (each.condition for each in suspects if each.is_end))
    graph.dims.update(infos)
    for suspect in suspects:
        if suspect.is_end:
            continue
        if suspect.start is None or suspect.start <= 2:
            others.append(suspect)
            continue
        (name,) = symbols_of(suspect.condition)
        info = graph.dims[name]
        graph.dims[name] = replace(info, low=max(info.low, suspect.start))
    return others


def _check_weights(graph: Graph, source: str) -> None:
    for value in graph.constants.values():
        if value.data is not None and value.data.is_meta:
            raise UsageError(
                f"{value.name} of {source} is on the meta device, where it has no numbers: load "
                "the weights first, such as with load_state_dict(weights, assign=True)."
            )


def _check_formats(options: Options, precision: Precision, own: Precision, source: str) -> None:
    check_precision(precision, own, options.device, source)
    if options.activations is not None and own != "fp32":
        raise UsageError(
            f"--activations {options.activations} is for models in float32, and the weights of "
            f"{source} are {own}: leave it out, or convert the module itself first."
        )
    if options.weights is not None and precision != own:
        raise UsageError(
            f"--weights {options.weights} is for models in their own precision, which is {own}: "
            f"leave out --precision {precision}, or convert the module itself first."
        )
