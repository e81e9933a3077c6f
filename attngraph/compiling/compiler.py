"""The driver: capture, passes, lowering and parity, in that order, timed and reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch

from attngraph.checks.branches import followed
from attngraph.compiling.beginning import Prepare, stage
from attngraph.compiling.compilation import Compilation, run_passes
from attngraph.compiling.pipeline import pipeline
from attngraph.errors import ParityError
from attngraph.export.files.staged import Staged
from attngraph.export.kernels import check_version, choose_all
from attngraph.frontend.model import Model
from attngraph.ir import Graph
from attngraph.keywords import EncoderKeywords, spelled_out
from attngraph.optimized import Optimized
from attngraph.options import DEFAULTS, Options
from attngraph.reports.report import Reassociation, Report, assumptions_of, sites_of
from attngraph.stages import Progress, telling


@spelled_out(EncoderKeywords)
def optimize(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    progress: Progress | None = None,
    **options: Unpack[EncoderKeywords],
) -> Optimized:
    """Compiles `module` for an execution provider and checks the result against it.

    `args` and `kwargs` are sample inputs and `dynamic_shapes` is `torch.export.export`'s, where a
    name may stand for a Dim (`{0: "batch"}`). `target` is "cpu", "cuda" or "cuda:sm80". `precision`
    is "fp32", "fp16" or "bf16", by default that of the weights; inputs and outputs keep their
    dtypes in any of them, but for caches. `verify` is "final" (the result, at the sample's sizes
    and at two more where dims are dynamic), "each" (after every pass as well) or "off". With
    `exact` no rewrite is made that reassociates: each result is computed by the model's own
    formula.
    `tune` measures the forms that each distinct attention may have, once for each machine.
    `assume` may hold "no-fully-masked-rows": every query has a key, so a finite fill may count as
    -inf. With `ignore_padded_rows` an encoder computes its linears, norms and the like for valid
    tokens only; the rows of tokens that its mask hides as keys are then unspecified. `weights`
    "int8" or "int4" quantizes those of linears: parity is then that of the kernels, and
    `report.quantised` says how far the outputs are from the original model's. `activations` "int8"
    beside it rounds what these linears are given, each row by itself; `budget`, such as "1%", is
    how far the first output may then be off: the linears that cost the most stay in float, and
    `calibrate` an .npz of inputs by name, on which codes of weights are chosen so that layers lose
    the least (GPTQ), and outliers are looked for that can be moved into weights.
    `portable` writes standard ONNX operators only, none of onnxruntime's own, and `opset` is
    theirs, 21 to 24. With `single_file` the weights are saved inside the ONNX file, up to 2 GiB.

    Raises CaptureError, LoweringError, ProviderError, UsageError where no padded row can be
    ignored, and ParityError where the result is out of its error budget; the message names the
    first node that diverges. Where scores are not as a rewrite takes them to be, or another order
    of sums is out of that budget and the model's own is not, it is compiled with `exact`, and a
    note says so.
    """
    name = type(module).__name__
    model = Model(module, None, args, dict(kwargs or {}), dynamic_shapes, name)
    with telling(progress):
        return compile_model(model, Options(**options))


def compile_model(
    model: Model,
    options: Options = DEFAULTS,
    *,
    prepare: Prepare | None = None,
    staged: Staged | None = None,
) -> Optimized:
    """As `optimize`, for any form of model.

    `prepare` is called with the model as it was captured. What it changes in the graph's dims holds
    for the passes; it returns the inputs that parity is checked on, and where a cache is static,
    its buffers. Large weights are `staged` where the result will be saved.
    """
    check_version(provider=options.device.provider)
    compilation = Compilation.of(model, options, prepare, staged)
    compilation.rewrite()
    try:
        return _finished(compilation)
    except ParityError:
        reassociated = compilation.report.reassociated
        if not reassociated or prepare is not None:
            raise
        compilation = Compilation.of(model, replace(options, exact=True), None, staged)
        compilation.rewrite()
        try:
            optimized = _finished(compilation)
        except ParityError:
            optimized = None
        if optimized is None:
            raise
    optimized.report.notes.append(_exact_note(reassociated))
    return optimized


def _finished(compilation: Compilation) -> Optimized:
    """The rewritten model in ONNX. Raises ParityError where it is out of its error budget."""
    optimized = compilation.lowered()
    if compilation.options.weights is not None:
        optimized = compilation.quantized(optimized)
    compilation.release(optimized)
    return optimized


def _exact_note(reassociated: Sequence[Reassociation]) -> str:
    """Why a model was compiled as with --exact, given what was reassociated otherwise.

    What fuse-attention takes for granted of scores, that none comes near a fill, say, may be false
    of some. Under a fill as large as -1e9 any other order of sums may be another function.
    """
    assumed = dict.fromkeys(r.what for r in reassociated if r.made_by == "fuse-attention")
    if assumed:
        return f"Compiled as with --exact, for these don't hold on the samples: {' '.join(assumed)}"
    passes = ", ".join(dict.fromkeys(r.made_by for r in reassociated))
    return (
        "Compiled as with --exact: the model amplifies rounding so far that it was out of its "
        f"error budget with what {passes} reassociate."
    )


def analyse(model: Model, options: Options = DEFAULTS) -> tuple[Graph, Report]:
    """Capture and passes only: the optimised graph and a report of its attention sites."""
    check_version(provider=options.device.provider)
    report = Report(model.source, str(options.device), "fp32")
    with stage("capture", report):
        graph = followed(model).graph
    run_passes(graph, pipeline(**options.of_pipeline()), report)
    report.notes += assumptions_of(report.passes, options.assume)
    report.sites = sites_of(report.passes, choose_all(graph, options.device))
    return graph, report


__all__ = ["Model", "analyse", "compile_model", "optimize"]
