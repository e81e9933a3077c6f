"""Parity of an ONNX file that lies on the disk, whoever wrote it, against the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir
import torch

from attngraph.checks.bisect import blame
from attngraph.checks.check import Check
from attngraph.checks.chosen import Chosen, choices_of
from attngraph.checks.padded import Padding, notes_of, packed_tokens
from attngraph.checks.stored import held_as_stored
from attngraph.compiling.compilation import out_of_memory
from attngraph.compiling.provenance import Provenance
from attngraph.decoding.checking import Encoded, decoding_cases, generated_parity
from attngraph.decoding.compile import buffers_of
from attngraph.decoding.decoder import Decoder
from attngraph.decoding.lengths import Lengths, lengths_of
from attngraph.errors import AttngraphError, listed
from attngraph.export.lowering.lower import value_names
from attngraph.export.parity.budget import Parity, merge
from attngraph.export.precision import own_precision
from attngraph.export.precision.quantize import Quantised, quantise
from attngraph.export.precision.smooth import move
from attngraph.export.runtime.session import Session
from attngraph.export.target import Target
from attngraph.frontend.capture import Captured
from attngraph.frontend.model import Model
from attngraph.ir import Graph, clone
from attngraph.mapped import release_large
from attngraph.optimized import Optimized
from attngraph.options import DEFAULTS, Options
from attngraph.passes import run
from attngraph.reports.coverage import Coverage
from attngraph.reports.report import Report
from attngraph.stages import begins
from attngraph.verification.as_compiled import captured_as_compiled
from attngraph.verification.compared_file import ComparedFile
from attngraph.verification.stored_ranges import require_checked
from attngraph.verification.stored_weights import Weights, compare_weights, take_chosen
from attngraph.versions import own_version


@dataclass
class Verification:
    """What the comparison of a file with a model found.

    `paired` says whether inputs and outputs were paired by name or in their order. `culprit` is a
    sentence on the first value that diverges, empty where parity passed; `notes` say what could
    not be compared. Of a file with quantized weights `quantised` says what they cost: `parity` is
    then that of the kernels, with those weights. Of a file that attngraph made, `weights` says
    whether they are those that the model compiles to. `coverage` is what the cases exercised.
    """

    source: str
    path: str
    target: str
    paired: dict[str, str]
    parity: Parity
    notes: list[str] = field(default_factory=list)
    culprit: str = ""
    quantised: Quantised | None = None
    weights: Weights | None = None
    coverage: Coverage | None = None

    @property
    def passed(self) -> bool:
        """Whether the outputs are within their budgets, and the weights the model's own."""
        return self.parity.passed and not (self.weights and self.weights.different)

    def to_dict(self) -> dict[str, Any]:
        """Plain strings, numbers, lists and dicts."""
        return {
            "source": self.source,
            "path": self.path,
            "target": self.target,
            "passed": self.passed,
            "paired": self.paired,
            "parity": self.parity.to_dict(),
            "first_diverging": self.culprit or None,
            "notes": self.notes,
            "quantised": None if self.quantised is None else asdict(self.quantised),
            "weights": None if self.weights is None else self.weights.to_dict(),
            "coverage": None if self.coverage is None else self.coverage.to_dict(),
        }


def verify_file(
    model: Model,
    path: Path,
    session: Session,
    options: Options = DEFAULTS,
    *,
    encoded: Callable[[Decoder], Iterable[Encoded]] | None = None,
) -> Verification:
    """Compares the outputs of `session`, which is `path`'s, with the model's, as `optimize` does.

    Inputs are paired by name, or in their order where the names are others but dtypes and shapes
    fit; so are outputs. Dynamic dims are checked at up to three sizes, as far as the file takes
    them; a decoder over a prompt and several steps. A file with quantized weights is compared
    with the model on those weights, as they are quantised anew; what they cost is told. Of
    `options` the target and the precision count, which is by default what the file says that it
    was made in, else that of the model's weights. `encoded` is what a decoder attends to, where it
    attends to an encoder's output.

    Raises UsageError where inputs or outputs don't fit the model's.
    """
    begins("capture")
    model, captured, layout = captured_as_compiled(model, path, session)
    buffers = None if layout is None else buffers_of(captured.graph, layout)
    file = ComparedFile(session, path, captured, model.source, buffers)
    begins("parity")
    own, made = own_precision(captured.graph), Provenance.read(session.metadata, path)
    if made.passes is not None and options.device.provider == "cpu":
        require_checked(path, session.metadata)
    precision = options.precision or made.precision or own
    assumed = (made.passes or {}).get("assume", ())
    check = Check(model, captured, own, hides_rows="no-fully-masked-rows" not in assumed)
    if precision != own:
        check.convert(precision)
    lengths = Lengths() if layout is None else lengths_of(captured.graph, layout)
    if layout is not None:
        lengths.require_told(layout, str(path), model.source)
    cases = check.all_cases() if layout is None else decoding_cases(captured, layout, lengths)
    check.cases, notes = file.fitting(cases)
    if (made.passes or {}).get("ignore_padded_rows") and file.paired["inputs"] == "name":
        results = run(clone(captured.graph), made.pipeline())
        check.padding = Padding(packed_tokens(results))
        notes += notes_of(results)
    notes += _reached(check, file)
    stored, quantised = _quantised(captured, made, path)
    if stored is None or quantised is None:
        chosen = Chosen(choices_of(onnx_ir.load(path)), partial(file.taken_apart, options.device))
        parity = check.final(file.run, chosen=chosen)
    else:
        apart = partial(file.taken_apart, options.device)
        parity, quantised.errors = held_as_stored(check, stored, file.run, apart, file.buffers)
        notes += quantised.kept
    notes += [*check.halves, *check.ties]
    weights = _compared_weights(check, file, made, made.on(options.device), stored)
    by_itself = parity.passed
    if layout is not None:
        decoder = Decoder(session, layout)
        found_steps = {
            "" if given is None else given.label: generated_parity(
                model, captured, decoder, precision, lengths, stored, given
            )
            for given in ([None] if encoded is None else encoded(decoder))
        }
        parity = merge({"": parity, "decoding": merge(found_steps)})
    if weights is not None:
        notes += weights.notes
    elif made.passes is None:
        notes.append(
            f"Nothing in {path} says how attngraph made it, so its weights are compared by what "
            "they compute in these cases, and not bit for bit."
        )
    coverage = check.covered()
    notes += coverage.notes
    found = Verification(
        model.source,
        str(path),
        options.target,
        file.paired,
        parity,
        notes,
        quantised=quantised,
        weights=weights,
        coverage=coverage,
    )
    if not found.passed:
        begins("bisect")
        found.culprit = _other_weights(weights)
    if not parity.passed:
        if by_itself:
            told = (
                "Each step by itself is right: what one hands on to the next isn't, or what the "
                "encoder gives."
            )
        else:
            inputs = check.worst_inputs(parity)
            told = _culprit(file, made, options.device, check, quantised, inputs)
        found.culprit = f"{found.culprit} {told}".strip()
    return found


def _compared_weights(
    check: Check, file: ComparedFile, made: Provenance, target: Target, stored: Graph | None
) -> Weights | None:
    """The file's weights against the model's, where attngraph made it from such a model."""
    if made.passes is None or file.paired["inputs"] != "name":
        return None
    model = onnx_ir.load(file.path)
    graph = stored
    if graph is None:
        graph = clone(check.pristine)
        with out_of_memory(graph):
            run(graph, made.pipeline())
    given = {
        name: value.data
        for name, value in check.pristine.constants.items()
        if value.data is not None
    }
    try:
        found = compare_weights(graph, model, target, given, file.buffers)
    except AttngraphError:
        return None
    finally:
        release_large(check.module)
    if model.producer_version != own_version():  # which may compute other weights from the same
        found.rounded += found.different
        found.different = []
    return found


def _other_weights(weights: Weights | None) -> str:
    if weights is None or not weights.different:
        return ""
    return f"The file holds other weights than the model: {listed(weights.different)}."


def _quantised(
    captured: Captured, made: Provenance, path: Path
) -> tuple[Graph | None, Quantised | None]:
    """The model's graph with the weights that its file must have, where those are quantized."""
    if made.weights is None:
        return None, None
    graph = clone(captured.graph)
    run(graph, made.pipeline())
    if made.rounding is not None:
        move(graph, made.rounding.moves)
    originals = {name: value.data for name, value in graph.constants.items()}
    found = quantise(graph, made.weights, made.rounding)
    if made.chosen:
        take_chosen(graph, onnx_ir.load(path), made.weights, made.chosen, originals)
    return graph, found


def _reached(check: Check, file: ComparedFile) -> list[str]:
    """Adds cases that run the file's other branches; returns a note on each that isn't run."""
    before = dict(check.all_cases())
    graph = check.pristine
    if file.buffers is None:
        check.reach(graph, onnx_ir.load(file.path), file.feeds)
    added = {label: each for label, each in check.all_cases().items() if label not in before}
    kept, notes = file.fitting({**before, **added})
    check.cases = kept
    return [*check.notes, *notes]


def _culprit(
    file: ComparedFile,
    made: Provenance,
    target: Target,
    check: Check,
    quantised: Quantised | None,
    inputs: Sequence[torch.Tensor],
) -> str:
    """A sentence on where the file diverges from the model on these inputs, or on why that is
    unknown. Its weights have been compared before.
    """
    own = own_precision(check.captured.graph)
    if quantised is not None:
        return (
            f"The file's outputs are not those of {file.source} with its weights in "
            f"{quantised.weights}: it was made from another model or by another attngraph, or was "
            "changed since. Optimize the model again."
        )
    if file.buffers is not None:
        return (
            "The file has a static cache, so no node can be named: compile the model with a "
            "growing one and compare that."
        )
    if check.precision != own:
        return (
            f"The file is in {check.precision} and the model in {own}, so no node can be named: "
            "optimize the model again, which keeps in fp32 what needs it."
        )
    if made.passes is None or file.session.input_names != check.captured.input_names:
        return (
            f"Which node diverges first can't be told: nothing in {file.path} says that attngraph "
            "made it from this model."
        )
    passes, pristine = made.pipeline(), check.pristine
    graph, model = clone(pristine), onnx_ir.load(file.path)
    run(graph, passes)
    if not _shared_names(graph, model):
        return "None of the file's values has a name of the model's, so none is to blame."
    result = Optimized(graph, model, Report(str(file.path), str(target), "fp32"), target)
    try:
        return blame(pristine, passes, graph, result, inputs, check.padding.rows(inputs))
    except AttngraphError as error:
        return f"The file can't be taken apart: {error}"


def _shared_names(graph: Graph, model: onnx_ir.Model) -> bool:
    names = set(value_names(graph).values())
    return any(value.name in names for node in model.graph for value in node.outputs)
