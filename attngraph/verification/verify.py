"""Parity of an ONNX file that lies on the disk, whoever wrote it, against the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir
import torch

from attngraph.checks.bisect import blame
from attngraph.checks.branches import settled
from attngraph.checks.check import Cases, Check
from attngraph.checks.padded import Padding, notes_of, packed_tokens
from attngraph.checks.rounded import Run, further_outputs
from attngraph.checks.traced import required_conditions
from attngraph.compiling.beginning import Progress
from attngraph.compiling.compilation import out_of_memory
from attngraph.compiling.provenance import Provenance
from attngraph.decoding.checking import Encoded, decoding_cases, generated_parity
from attngraph.decoding.compile import buffers_of, of_causal_lm, take_every_step
from attngraph.decoding.decoder import Decoder
from attngraph.decoding.lengths import Lengths, lengths_of
from attngraph.errors import AttngraphError, UsageError
from attngraph.export.files.save import to_session
from attngraph.export.lowering.emission.buffers import Buffers
from attngraph.export.lowering.lower import value_names
from attngraph.export.parity.budget import Parity, merge
from attngraph.export.precision import own_precision
from attngraph.export.precision.quantize import Quantised, quantise
from attngraph.export.precision.smooth import move
from attngraph.export.runtime.session import Session
from attngraph.export.target import Target
from attngraph.frontend.cache import METADATA_KEY, Layout
from attngraph.frontend.capture import Captured
from attngraph.frontend.causal_lm import is_causal_lm
from attngraph.frontend.model import Model, trace
from attngraph.ir import Graph, clone
from attngraph.mapped import release_large
from attngraph.optimized import Optimized
from attngraph.options import DEFAULTS, Options
from attngraph.passes import run
from attngraph.reports.coverage import Coverage
from attngraph.reports.report import Report
from attngraph.verification.stored_ranges import require_checked
from attngraph.verification.stored_weights import Weights, compare_weights
from attngraph.versions import own_version

_SHOWN = 3


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
    progress: Progress | None = None,
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
    tell = progress or (lambda stage: None)
    tell("capture")
    model, captured, layout = _captured(model, path, session)
    buffers = None if layout is None else buffers_of(layout)
    file = _File(session, path, captured, model.source, buffers)
    tell("parity")
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
    stored, quantised = _quantised(captured, made)
    if stored is None or quantised is None:
        parity = check.final(file.run)
    else:
        parity, quantised.errors = check.quantized(
            stored, file.run, partial(file.taken_apart, options.device)
        )
        notes += quantised.kept
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
        tell("bisect")
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
    check: Check, file: _File, made: Provenance, target: Target, stored: Graph | None
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
    said = ", ".join(weights.different[:_SHOWN])
    more = len(weights.different) - _SHOWN
    return f"The file holds other weights than the model: {said}{f' and {more} more' * (more > 0)}."


def _captured(model: Model, path: Path, session: Session) -> tuple[Model, Captured, Layout | None]:
    """The model's graph, and the layout of its cache if the file is a decoder of this model."""
    decoder = session.metadata.get(METADATA_KEY)
    layout = None if decoder is None else Layout.from_json(decoder, str(path))
    if layout is not None and is_causal_lm(model.module):
        declared = _declared_output(path, layout.logits)
        whole = len(declared) < 2 or declared[1] != 1
        model = of_causal_lm(
            model,
            all_logits=whole,
            padding=layout.mask is not None,
            by_token=layout.piece == 1,
        )
        if set(layout.pasts) <= set(model.names):  # a file from before its names were the runtimes'
            model = replace(model, names={})
    captured, check = _traced(model, follows=layout is None, elsewhere=layout is None)
    if any(suspect.beyond for suspect in captured.suspects):
        required = required_conditions(check, captured.graph)
        if any(suspect.beyond for suspect in required):  # as a compile does
            captured, _ = _traced(model, follows=True, elsewhere=False)
    if layout is None or not {layout.ids, *layout.pasts} <= set(captured.input_names):
        return model, captured, None
    take_every_step(captured.graph, layout)
    return model, captured, layout


def _traced(model: Model, *, follows: bool, elsewhere: bool) -> tuple[Captured, Check]:
    captured = trace(model, {} if follows else None, elsewhere=elsewhere)
    own = own_precision(captured.graph)

    def checked(captured: Captured) -> Check:
        return Check(model, captured, own)

    if captured.branches:
        return settled(model, checked(captured), checked, elsewhere=elsewhere)
    return captured, checked(captured)


def _quantised(captured: Captured, made: Provenance) -> tuple[Graph | None, Quantised | None]:
    """The model's graph with the weights that its file must have, where those are quantized."""
    if made.weights is None:
        return None, None
    graph = clone(captured.graph)
    run(graph, made.pipeline())
    if made.rounding is not None:
        move(graph, made.rounding.moves)
    return graph, quantise(graph, made.weights, made.rounding)


def _reached(check: Check, file: _File) -> list[str]:
    """Adds cases that run the file's other branches; returns a note on each that isn't run."""
    before = dict(check.all_cases())
    graph = check.pristine
    if file.buffers is None:
        check.reach(graph, onnx_ir.load(file.path), file.feeds)
    added = {label: each for label, each in check.all_cases().items() if label not in before}
    kept, notes = file.fitting({**before, **added})
    check.cases = kept
    return [*check.notes, *notes]


class _File:
    """A session that takes inputs and gives outputs in the order of the model's."""

    def __init__(
        self,
        session: Session,
        path: Path,
        captured: Captured,
        source: str,
        buffers: Buffers | None,
    ) -> None:
        self.session, self.path, self.captured, self.source = session, path, captured, source
        self.buffers = buffers
        inputs, outputs = captured.input_names, captured.output_names
        taken = session.input_names
        if buffers is not None:  # which bring along the length that stands for a dim
            taken = tuple(name for name in taken if name != buffers.length)
        by_name = set(taken) <= set(inputs)
        if not by_name and len(taken) != len(inputs):
            raise UsageError(
                f"{path} takes {_listed(taken)}, and {source} takes "
                f"{_listed(inputs)}: neither names nor number fit. Name the file of this model."
            )
        self.feeds = dict(zip(taken, taken if by_name else inputs, strict=True))
        if len(session.output_names) != len(outputs):
            raise UsageError(
                f"{path} returns {_listed(session.output_names)}, and {source} returns "
                f"{_listed(outputs)}: their number differs. Name the file of this model."
            )
        named = set(session.output_names) == set(outputs)
        order = outputs if named else session.output_names
        self.places = [session.output_names.index(name) for name in order]
        self.paired = {
            "inputs": "name" if by_name else "order",
            "outputs": "name" if named else "order",
        }

    def _given(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        values = dict(zip(self.captured.input_names, tensors, strict=True))
        given = {name: values[model_name] for name, model_name in self.feeds.items()}
        for name, tensor in given.items():
            dtype = self.session.input_dtype(name)
            if tensor.dtype is torch.float32 and dtype in (torch.float16, torch.bfloat16):
                given[name] = tensor.to(dtype)  # a cache, in a file that was converted
        return given

    def run(
        self,
        tensors: Sequence[torch.Tensor],
        session: Session | None = None,
        names: Sequence[str] = (),
    ) -> tuple[torch.Tensor, ...]:
        """The outputs in the model's order, then those of these `names`."""
        given, session = self._given(tensors), session or self.session
        if self.buffers is None:
            outputs = session.run(given)
        else:
            outputs = self.buffers.evaluate(session.run, given, session.output_names)
        places = [*self.places, *map(session.output_names.index, names)]
        return tuple(outputs[place] for place in places)

    @contextlib.contextmanager
    def taken_apart(self, target: Target, names: Sequence[str]) -> Iterator[Run]:
        """Within it, a run that returns these of the file's values too, as the last."""
        with further_outputs(onnx_ir.load(self.path), names) as model:
            opened = to_session(model, target)
        with opened as session:
            yield partial(self.run, session=session, names=names)

    def fitting(self, cases: Cases) -> tuple[Cases, list[str]]:
        """The cases that the file takes, and a note on each that it doesn't.

        Raises UsageError where it doesn't take the first, which is the sample.
        """
        kept, notes = {}, []
        for label, tensors in cases.items():
            misfit = self._misfit(tensors)
            if not misfit:
                kept[label] = tensors
            elif not kept:
                raise UsageError(f"{self.path} doesn't fit {self.source}: {misfit}.")
            else:
                notes.append(f"Not compared at {label}: {misfit}.")
        return kept, notes

    def _misfit(self, tensors: Sequence[torch.Tensor]) -> str:
        for name, tensor in self._given(tensors).items():
            dtype, shape = self.session.input_dtype(name), self.session.input_shape(name)
            pairs = list(zip(shape, tensor.shape, strict=False))
            fits = len(shape) == tensor.dim() and tensor.dtype is dtype
            if not fits or any(isinstance(dim, int) and dim != size for dim, size in pairs):
                return (
                    f"its input {name} is {_typed(dtype, shape)}, and the model is given "
                    f"{_typed(tensor.dtype, tuple(tensor.shape))}"
                )
        return ""


def _culprit(
    file: _File,
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
            f"Which node diverges first can't be told: {file.path} was not made from this model by "
            "attngraph."
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


def _declared_output(path: Path, name: str) -> list[Any]:
    """The dims of an output as the file declares them; numbers, and anything else for the rest."""
    for value in onnx_ir.load(path).graph.outputs:
        if value.name == name and value.shape is not None:
            return list(value.shape)
    return []


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)} ({', '.join(names)})" if names else "none"


def _typed(dtype: torch.dtype, shape: Sequence[int | str | None]) -> str:
    dims = ", ".join("?" if dim is None else str(dim) for dim in shape)
    return f"{str(dtype).removeprefix('torch.')}[{dims}]"
