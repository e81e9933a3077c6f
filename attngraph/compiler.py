"""The driver: capture, passes, lowering and parity, in that order, timed and reported."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch

from attngraph.bisect import blame
from attngraph.checking import Cases, Check
from attngraph.errors import ParityError, UsageError
from attngraph.export.buffers import Buffers, require_in_place
from attngraph.export.kernels import check_version, choose_all
from attngraph.export.lower import lower
from attngraph.export.parity import Parity
from attngraph.export.precision import own_precision, stored_bytes
from attngraph.export.quantize import (
    Weights,
    check_weights,
    quantise,
    require_linears,
)
from attngraph.export.reference import Precision
from attngraph.export.session import elsewhere
from attngraph.export.target import Target, parse_target
from attngraph.export.tune import tuned
from attngraph.frontend.capture import Captured
from attngraph.ir import Graph, clone, verify
from attngraph.mapped import Spill, are_large, release
from attngraph.model import Model, trace
from attngraph.optimized import Optimized
from attngraph.padded import Padding, notes_of, packed_tokens, require_packed
from attngraph.passes import Pass, PassResult, run
from attngraph.pipeline import pipeline
from attngraph.precision import check_precision, in_half
from attngraph.report import (
    Report,
    assumptions_of,
    defects_of,
    loops_of,
    reassociations_of,
    sites_of,
)

VERIFY = ("final", "each", "off")
Progress = Callable[[str], None]
OPTIONS_KEY = "attngraph.options"
"""The file's metadata: what the passes it was made with depend on, as JSON."""
PRECISION_KEY = "attngraph.precision"
"""The file's metadata: the precision it was made in."""
WEIGHTS_KEY = "attngraph.weights"
"""The file's metadata: the few bits that its weights are stored in, if they are."""


@dataclass(frozen=True)
class Prepared:
    """What is known of a model beside its inputs: the cases to check it on, a static cache."""

    cases: Cases | None = None
    buffers: Buffers | None = None


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


def _check_options(precision: str | None, verification: str) -> None:
    if verification not in VERIFY:
        raise UsageError(f"verify is {verification!r}; it can be {', '.join(VERIFY)}.")
    if precision is not None and precision not in get_args(Precision):
        raise UsageError(f"precision is {precision!r}; it can be {', '.join(get_args(Precision))}.")


def _has_packed_attention(target: Target) -> bool:
    """Whether the provider has kernels for attention over rows without padding."""
    return target.provider == "cuda"


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
    passes = pipeline(
        assume=assume,
        ignore_padded_rows=ignore_padded_rows,
        packed_attention=_has_packed_attention(device),
    )
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
    prepare: Callable[[Captured], Prepared] | None = None,
    assume: Collection[str] = (),
    ignore_padded_rows: bool = False,
    weights: Weights | None = None,
    session: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Optimized:
    """As `optimize`, for any form of model.

    `prepare` is called with the model as it was captured. What it says of the graph's dims holds
    for the passes; it returns the inputs that parity is checked on, and where a cache is static,
    its buffers. `session` are keyword arguments of `Session.open`, for the sessions that check,
    tune and are handed over.
    """
    session = session or {}
    _check_options(precision, verify)
    check_weights(weights)
    device = parse_target(target)
    check_version()
    options: dict[str, Any] = {
        "assume": sorted(assume),
        "exact": exact,
        "ignore_padded_rows": ignore_padded_rows,
        "packed_attention": _has_packed_attention(device),
        "few_bits": weights is not None,
    }
    passes = pipeline(**options)
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
    prepared = Prepared() if prepare is None else prepare(captured)
    buffers, static = prepared.buffers, prepared.buffers is not None
    check = Check(model, captured, own, prepared.cases)
    pristine = clone(captured.graph) if verify != "off" else None
    large = are_large(_weights(captured.graph))
    placed: list[str] = []
    _run_passes(captured.graph, passes, report, progress, check if verify == "each" else None)
    if buffers is not None:
        require_in_place(captured.graph, buffers, model.source)
    assumed = assumptions_of(report.passes, assume)
    report.notes += assumed
    if ignore_padded_rows:
        require_packed(report.passes, model.source)
        report.notes += notes_of(report.passes)
        check.padding = Padding(packed_tokens(report.passes))
    report.weight_bytes_before = stored_bytes(captured.graph)
    if weights is not None:
        require_linears(captured.graph, weights, model.source)

    def build(graph: Graph) -> Optimized:
        with _stage("lower", report.timings, progress):
            if tune:
                threads = session.get("threads")
                kernels = tuned(graph, device, report.notes.append, threads=threads, static=static)
            else:
                kernels = choose_all(graph, device, static=static)
            onnx = lower(graph, target=device, kernels=kernels, buffers=buffers)
        onnx.metadata_props[OPTIONS_KEY] = json.dumps(options)
        onnx.metadata_props[PRECISION_KEY] = report.precision
        if report.quantised is not None:
            onnx.metadata_props[WEIGHTS_KEY] = report.quantised.weights
        report.sites = sites_of(report.passes, kernels)
        original = precision == own and report.quantised is None
        origin = pristine if original else None
        return Optimized(graph, onnx, report, device, origin, session, buffers)

    def measure(optimized: Optimized) -> Parity:
        dtypes = [value.dtype for value in optimized.graph.inputs]  # a cache may be half

        def candidate(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            pairs = zip(tensors, dtypes, strict=True)
            return optimized.evaluate([tensor.to(dtype) for tensor, dtype in pairs])

        def done() -> None:
            placed[:] = elsewhere(optimized.session)
            if large:  # the session has a copy of them
                optimized.close()

        with _stage("parity", report.timings, progress):
            return check.final(candidate, done)

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
        report.notes += placed
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
                report.parity, report.quantised.errors = check.few_bits(
                    optimized.graph, optimized.evaluate
                )
            if not report.parity.passed:
                raise ParityError(
                    f"The {weights} kernels of {model.source} are out of their error budget, "
                    f"against the dequantised weights: {report.parity}. Nothing was written."
                )
    if pristine is not None and large:
        optimized.close()
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
    report.notes += [*defects_of(report.passes), *loops_of(report.passes)]


@contextlib.contextmanager
def _out_of_memory(graph: Graph) -> Iterator[None]:
    """What passes compute from large weights lies in files, and what they read is released."""
    weights = _weights(graph)
    if not are_large(weights):
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


__all__ = ["Model", "Target", "analyse", "compile_model", "optimize", "trace"]
