"""The driver: capture, passes, lowering and parity, in that order, timed and reported."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch

from attngraph.bisect import blame
from attngraph.errors import AttngraphError, ParityError, UsageError
from attngraph.export.kernels import check_version, choose_all
from attngraph.export.lower import lower
from attngraph.export.parity import Parity, compare, merge
from attngraph.export.precision import own_precision, stored_bytes
from attngraph.export.quantize import (
    OutputError,
    Weights,
    check_weights,
    quantise,
    require_linears,
)
from attngraph.export.reference import Precision, Reference, ReferenceOutputs
from attngraph.export.session import elsewhere
from attngraph.export.sizes import choose_sizes, resized_inputs
from attngraph.export.target import Target, parse_target
from attngraph.export.tune import tuned
from attngraph.few_bits import errors_of, reference_of
from attngraph.frontend.capture import Captured, capture, from_program
from attngraph.frontend.load import Loaded
from attngraph.frontend.script import script_to_program
from attngraph.frontend.tracing import reason
from attngraph.ir import Graph, clone, interpret, verify
from attngraph.mapped import LARGE, Spill, release
from attngraph.optimized import Optimized
from attngraph.padded import Padding, annotated, notes_of, packed_tokens, require_packed
from attngraph.passes import Pass, PassResult, run
from attngraph.pipeline import pipeline
from attngraph.precision import check_precision, in_half
from attngraph.report import Report, assumptions_of, defects_of, reassociations_of, sites_of

VERIFY = ("final", "each", "off")
Progress = Callable[[str], None]
Cases = Mapping[str, tuple[torch.Tensor, ...]]
"""Inputs by label, in the order of the graph's."""
Candidate = Callable[[tuple[torch.Tensor, ...]], Sequence[torch.Tensor]]
"""What is compared with the model: inputs to outputs, both in the order of the graph's."""
OPTIONS_KEY = "attngraph.options"
"""The file's metadata: what the passes it was made with depend on, as JSON."""
PRECISION_KEY = "attngraph.precision"
"""The file's metadata: the precision it was made in."""
WEIGHTS_KEY = "attngraph.weights"
"""The file's metadata: the few bits that its weights are stored in, if they are."""


@dataclass(frozen=True)
class Model:
    """What is compiled: a module or an exported program, its sample inputs and dynamic dims.

    `args` and `kwargs` are what `module(*args, **kwargs)` takes; `dynamic_shapes` is
    torch.export's. `source` names the model in messages.
    """

    module: torch.nn.Module | None
    program: torch.export.ExportedProgram | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dynamic_shapes: Any = None
    source: str = "model"

    @classmethod
    def of(cls, loaded: Loaded) -> Model:
        """From a loaded file. Raises UsageError where it brings no sample inputs."""
        args = loaded.args
        if args is None and loaded.program is not None:
            example = loaded.program.example_inputs
            args = None if example is None else tuple(example[0])
            if example is not None:
                return cls(None, loaded.program, tuple(example[0]), example[1], None, loaded.source)
        if args is None:
            raise UsageError(
                f"{loaded.source} brings no sample inputs: describe each input, for example "
                "--input input_ids=int64[batch=2,seq=8]."
            )
        return cls(
            loaded.module, loaded.program, args, loaded.kwargs, loaded.dynamic_shapes, loaded.source
        )


@contextlib.contextmanager
def _stage(name: str, timings: dict[str, float], progress: Progress | None) -> Iterator[None]:
    if progress is not None:
        progress(name)
    start = time.perf_counter()
    yield
    timings[name] = timings.get(name, 0.0) + time.perf_counter() - start


def optimize(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    target: str = "cpu",
    precision: Precision | None = None,
    verify: str = "final",
    exact: bool = False,
    tune: bool = False,
    assume: Collection[str] = (),
    ignore_padded_rows: bool = False,
    weights: Weights | None = None,
    progress: Progress | None = None,
) -> Optimized:
    """Compiles `module` for an execution provider and checks the result against it.

    `args` and `kwargs` are sample inputs and `dynamic_shapes` is `torch.export.export`'s. `target`
    is "cpu", "cuda" or "cuda:sm80". `precision` is "fp32", "fp16" or "bf16", by default that of the
    weights; inputs and outputs keep their dtypes in any of them, but for caches. `verify` is
    "final" (the result, at the sample's sizes and at two more where dims are dynamic), "each"
    (after every pass as well) or "off". With `exact` no rewrite is made that reassociates: each
    result is computed by the model's own formula.
    `tune` measures the forms that each distinct attention may have, once for each machine.
    `assume` may hold "no-fully-masked-rows": every query has a key, so a finite fill may count as
    -inf. With `ignore_padded_rows` an encoder computes its linears, norms and the like for valid
    tokens only; the rows of tokens that its mask hides as keys are then unspecified. `weights`
    "int8" or "int4" stores those of linears in few bits: parity is then that of the kernels, and
    `report.quantised` says how far the outputs are from the original model's.

    Raises CaptureError, LoweringError, ProviderError, UsageError where no padded row can be
    ignored, and ParityError where the result is out of its error budget; the message names the
    first node that diverges.
    """
    model = Model(module, None, tuple(args), dict(kwargs or {}), dynamic_shapes, _name(module))
    return compile_model(
        model,
        target=target,
        precision=precision,
        verify=verify,
        exact=exact,
        tune=tune,
        assume=assume,
        ignore_padded_rows=ignore_padded_rows,
        weights=weights,
        progress=progress,
    )


def _name(module: torch.nn.Module) -> str:
    return type(module).__name__


def trace(model: Model) -> Captured:
    """The model as a graph, whatever form it came in."""
    if model.program is not None:
        return from_program(model.program)
    if model.module is None:
        raise UsageError(f"{model.source} holds neither a module nor a program.")
    kwargs = dict(model.kwargs)
    if isinstance(model.module, torch.jit.ScriptModule):
        program = script_to_program(model.module, model.args, kwargs, model.dynamic_shapes)
        return from_program(program)
    return capture(model.module, model.args, kwargs=kwargs, dynamic_shapes=model.dynamic_shapes)


def _check_options(precision: str | None, verification: str) -> None:
    if verification not in VERIFY:
        raise UsageError(f"verify is {verification!r}; it can be {', '.join(VERIFY)}.")
    if precision is not None and precision not in get_args(Precision):
        raise UsageError(f"precision is {precision!r}; it can be {', '.join(get_args(Precision))}.")


def analyse(
    model: Model,
    *,
    target: str = "cpu",
    assume: Collection[str] = (),
    ignore_padded_rows: bool = False,
    progress: Progress | None = None,
) -> tuple[Graph, Report]:
    """Capture and passes only: the optimised graph and a report of its attention sites."""
    device = parse_target(target)
    check_version()
    passes = pipeline(assume=assume, ignore_padded_rows=ignore_padded_rows)
    report = Report(model.source, str(device), "fp32")
    with _stage("capture", report.timings, progress):
        captured = trace(model)
    _run_passes(captured.graph, passes, report, progress)
    report.notes += assumptions_of(report.passes, assume)
    report.sites = sites_of(report.passes, choose_all(captured.graph, device))
    return captured.graph, report


def compile_model(
    model: Model,
    *,
    target: str = "cpu",
    precision: Precision | None = None,
    verify: str = "final",
    exact: bool = False,
    tune: bool = False,
    prepare: Callable[[Captured], Cases] | None = None,
    assume: Collection[str] = (),
    ignore_padded_rows: bool = False,
    weights: Weights | None = None,
    progress: Progress | None = None,
) -> Optimized:
    """As `optimize`, for any form of model.

    `prepare` is called with the model as it was captured. What it says of the graph's dims holds
    for the passes, and the inputs that it returns are those that parity is checked on.
    """
    _check_options(precision, verify)
    check_weights(weights)
    device = parse_target(target)
    check_version()
    passes = pipeline(exact=exact, assume=assume, ignore_padded_rows=ignore_padded_rows)
    report = Report(model.source, str(device), precision or "fp32")
    with _stage("capture", report.timings, progress):
        captured = trace(model)
    own = own_precision(captured.graph)
    precision = report.precision = precision or own
    check_precision(precision, own, device, model.source)
    if weights is not None and precision != own:
        raise UsageError(
            f"--weights {weights} is for models in their own precision, which is {own}: leave out "
            f"--precision {precision}, or convert the module itself first."
        )
    report.notes.extend(captured.notes)
    report.nodes_before = len(captured.graph)
    cases = None if prepare is None else prepare(captured)
    check = Check(model, captured, own, cases)
    pristine = clone(captured.graph) if verify != "off" else None
    _run_passes(captured.graph, passes, report, progress, check if verify == "each" else None)
    assumed = assumptions_of(report.passes, assume)
    report.notes += assumed
    if ignore_padded_rows:
        require_packed(report.passes, model.source)
        report.notes += notes_of(report.passes)
        check.padding = Padding(packed_tokens(report.passes))
    report.weight_bytes_before = stored_bytes(captured.graph)
    if weights is not None:
        require_linears(captured.graph, weights, model.source)
    options = {"assume": sorted(assume), "exact": exact, "ignore_padded_rows": ignore_padded_rows}

    def build(graph: Graph) -> Optimized:
        with _stage("lower", report.timings, progress):
            if tune:
                kernels = tuned(graph, device, report.notes.append)
            else:
                kernels = choose_all(graph, device)
            onnx = lower(graph, target=device, kernels=kernels)
        onnx.metadata_props[OPTIONS_KEY] = json.dumps(options)
        onnx.metadata_props[PRECISION_KEY] = report.precision
        if report.quantised is not None:
            onnx.metadata_props[WEIGHTS_KEY] = report.quantised.weights
        report.sites = sites_of(report.passes, kernels)
        original = precision == own and report.quantised is None
        return Optimized(graph, onnx, report, device, pristine if original else None)

    def measure(optimized: Optimized) -> Parity:
        dtypes = [value.dtype for value in optimized.graph.inputs]  # a cache may be half

        def candidate(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            pairs = zip(tensors, dtypes, strict=True)
            return optimized.run([tensor.to(dtype) for tensor, dtype in pairs])

        with _stage("parity", report.timings, progress):
            return check.final(candidate)

    if precision == own:
        optimized = build(captured.graph)
        report.parity = None if pristine is None else measure(optimized)
    else:
        check.convert(precision)
        halved = in_half(
            captured.graph, precision, device, build, None if pristine is None else measure
        )
        optimized, report.parity, report.kept = halved.optimized, halved.parity, halved.kept
        report.notes += halved.notes
    if pristine is not None and report.parity is not None:
        report.notes += elsewhere(optimized.session)
        if not report.parity.passed:
            if precision != own:  # nothing that is half is to blame
                optimized = build(captured.graph)
            rows = check.padding.rows(captured.args)
            culprit = check.of_trace(pristine) or blame(
                pristine, passes, captured.graph, optimized, captured.args, rows
            )
            raise ParityError(
                f"The optimised {model.source} is out of its error budget: {report.parity}. "
                f"{' '.join([culprit, *assumed])} Nothing was written."
            )
    if weights is not None:
        optimized.close()
        with _stage("quantise", report.timings, progress), _out_of_memory(captured.graph):
            report.quantised = quantise(captured.graph, weights)
        if not report.quantised.linears:
            raise UsageError(
                f"{model.source} can't have {weights} weights. {' '.join(report.quantised.kept)} "
                "Leave out --weights."
            )
        optimized = build(captured.graph)
        report.notes += report.quantised.kept
        if pristine is not None:
            with _stage("parity", report.timings, progress):
                report.parity, report.quantised.errors = check.few_bits(optimized)
            if not report.parity.passed:
                raise ParityError(
                    f"The {weights} kernels of {model.source} are out of their error budget, "
                    f"against the dequantised weights: {report.parity}. Nothing was written."
                )
    if pristine is not None and report.weight_bytes_before >= LARGE:
        optimized.close()  # the session holds them too, and parity read them all
        release([*_weights(pristine), *_weights(captured.graph)])
    return optimized


def _run_passes(
    graph: Graph,
    passes: Sequence[Pass],
    report: Report,
    progress: Progress | None,
    check: Check | None = None,
) -> None:
    def after(graph: Graph, result: PassResult) -> None:
        if check is not None:
            verify(graph)
            check.after_pass(graph, result)

    with _stage("passes", report.timings, progress), _out_of_memory(graph):
        report.passes = run(graph, passes, after_each=after)
    report.reassociated = reassociations_of(report.passes)
    report.notes += defects_of(report.passes)


@contextlib.contextmanager
def _out_of_memory(graph: Graph) -> Iterator[None]:
    """What passes compute from large weights lies in files, and what they read is released."""
    weights = _weights(graph)
    if sum(data.nbytes for data in weights) < LARGE:
        yield
        return
    graph.keep = Spill(weights)
    try:
        yield
    finally:
        graph.keep = None
        release([*weights, *_weights(graph)])


def _weights(graph: Graph) -> list[torch.Tensor]:
    return [value.data for value in graph.constants.values() if value.data is not None]


class Check:
    """Parity of one model: references are computed once per size."""

    def __init__(
        self, model: Model, captured: Captured, precision: Precision, cases: Cases | None = None
    ) -> None:
        self.cases = cases
        self.padding = Padding([])
        self.model = model
        self.captured = captured
        self.precision = precision
        module = model.module
        if module is None and model.program is not None:
            module = model.program.module()
        assert module is not None
        self.module = module
        self.reference = Reference(module, precision=precision)

    def convert(self, precision: Precision) -> None:
        """From now on the result is held against the module in another precision."""
        self.precision = precision
        self.reference = Reference(self.module, precision=precision, converted=True)

    def references(self, tensors: tuple[torch.Tensor, ...]) -> ReferenceOutputs:
        """Eager's outputs, under the names that the graph's have."""
        args, kwargs = self.captured.call(tensors)
        try:
            found = self.reference(args, kwargs)
        except AttngraphError:
            raise
        except Exception as error:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise UsageError(
                f"{self.model.source} itself fails on inputs of shape {shapes}: "
                f"{type(error).__name__}: {reason(error).rstrip('.')}. Give sample inputs that it "
                "takes, and the range of each dynamic dim."
            ) from error
        names = self.captured.output_names
        return replace(found, names=names) if len(names) == len(found.names) else found

    def compare(self, tensors: tuple[torch.Tensor, ...], outputs: Sequence[Any]) -> Parity:
        """Parity of outputs on these inputs, without what is padding."""
        reference = self.references(tensors)
        if self.reference.converted:
            outputs = reference.in_its_dtypes(outputs)
        reference, outputs, notes = self.padding.cut(reference, outputs, tensors)
        return annotated(compare(reference, outputs, self.precision), notes)

    def few_bits(self, optimized: Optimized) -> tuple[Parity, list[OutputError]]:
        """Parity of kernels with the weights they store, and the outputs' distance to the model."""
        reference = reference_of(optimized.graph, self.precision)
        parities, cases = {}, []
        for label, tensors in (self.cases or self.resized()).items():
            outputs = optimized.run(tensors)
            stored = replace(reference(tensors), names=tuple(self.captured.output_names))
            stored, kept, notes = self.padding.cut(stored, outputs, tensors)
            parities[label] = annotated(compare(stored, kept, self.precision), notes)
            original, kept, _ = self.padding.cut(self.references(tensors), outputs, tensors)
            cases.append((original, kept))
        return merge(parities), errors_of(cases)

    def of_trace(self, graph: Graph) -> str:
        """A sentence, if the captured graph, evaluated by PyTorch, isn't the model already."""
        for label, tensors in (self.cases or self.resized()).items():
            parity = self.compare(tensors, interpret(graph, tensors))
            if not parity.passed:
                worst = parity.worst
                return (
                    f"No pass is to blame: what torch.export traced of {self.model.source} already "
                    f"differs from it at {label} (error {worst.error:.2e}, budget "
                    f"{worst.budget:.2e}). Look for what runs in another way under a trace, such "
                    "as torch.compiler.is_compiling(), or for a number that the trace made a "
                    "constant."
                )
        return ""

    def after_pass(self, graph: Graph, result: PassResult) -> None:
        """Raises ParityError naming the pass, if the graph now computes something else."""
        self.padding = Padding([*self.padding.packed, *packed_tokens([result])])
        parity = self.compare(self.captured.args, interpret(graph, self.captured.args))
        if not parity.passed:
            raise ParityError(f"After the pass {result.name} the graph is wrong: {parity}.")

    def sizes(self) -> list[dict[str, int]]:
        """The sample's sizes, and up to two more."""
        captured = self.captured
        sample = {
            name: int(captured.args[index].shape[axis])
            for (index, axis), name in captured.dynamic.items()
        }
        ranges = {
            name: (captured.graph.dims[name].low, captured.graph.dims[name].high) for name in sample
        }
        return [sample, *choose_sizes(sample, ranges)] if sample else [{}]

    def final(self, candidate: Candidate) -> Parity:
        """Parity over all sizes."""
        return merge(
            {
                label: self.compare(tensors, candidate(tensors))
                for label, tensors in (self.cases or self.resized()).items()
            }
        )

    def resized(self) -> Cases:
        """The sample's inputs at each of the sizes."""
        return {
            ", ".join(f"{name}={size}" for name, size in sizes.items()) or "sample": resized_inputs(
                self.captured.args, self.captured.dynamic, sizes
            )
            for sizes in self.sizes()
        }


__all__ = ["Model", "Target", "analyse", "compile_model", "optimize", "trace"]
