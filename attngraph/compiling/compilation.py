"""One compile: the state of a model on its way to ONNX, and the steps in their order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from attngraph.analysis.masks.masking import NO_MASKED_ROWS
from attngraph.analysis.values.denormals import KEPT_KEY
from attngraph.checks.bisect import blame
from attngraph.checks.check import Check
from attngraph.checks.chosen import Chosen, choices_of
from attngraph.checks.padded import Padding, notes_of, packed_tokens, require_packed
from attngraph.checks.probing import HIDDEN
from attngraph.checks.rounded import taken_apart
from attngraph.checks.stored import held_as_stored
from attngraph.checks.traced import trace_differs
from attngraph.compiling.beginning import Prepare, begin, stage
from attngraph.compiling.pipeline import pipeline
from attngraph.compiling.precision_search import in_half
from attngraph.compiling.provenance import Provenance
from attngraph.compiling.quantizing import Quantizing
from attngraph.errors import ParityError
from attngraph.export.files.save import in_one_file
from attngraph.export.files.staged import Staged
from attngraph.export.formats import Precision
from attngraph.export.kernels import choose_all
from attngraph.export.kernels.crossovers import timed_family
from attngraph.export.kernels.weight_only import cost_on_cpu
from attngraph.export.lowering.emission.buffers import Buffers, part_joined, require_in_place
from attngraph.export.lowering.lower import lower
from attngraph.export.parity.budget import Parity
from attngraph.export.precision import gates, stored_bytes
from attngraph.export.precision.quantize import Rounding, require_linears
from attngraph.export.runtime.session import elsewhere
from attngraph.export.tuning.tune import tuned
from attngraph.frontend.capture import Captured
from attngraph.frontend.model import Model
from attngraph.ir import Graph, clone, verify
from attngraph.ir.ranges import RANGES_KEY, Ranges
from attngraph.mapped import Spill, are_large, release
from attngraph.optimized import Optimized
from attngraph.options import Options
from attngraph.passes import Pass, PassResult, run
from attngraph.reports.report import (
    Report,
    assumptions_of,
    defects_of,
    fills_of,
    hidden_rows_of,
    loops_of,
    reassociations_of,
    sites_of,
)

_LITTLE_BF16 = "onnxruntime's CPU provider computes little in bf16"


@dataclass
class Compilation:
    """A model between two steps.

    `graph` is rewritten by the passes; `pristine` is as it was captured, None where nothing is
    verified. `own` is the precision of the weights, that of the result is `report.precision`.
    """

    model: Model
    options: Options
    captured: Captured
    own: Precision
    report: Report
    check: Check
    pristine: Graph | None
    passes: Sequence[Pass]
    buffers: Buffers | None
    is_large: bool
    staged: Staged | None
    assumed: list[str] = field(default_factory=list)
    placed: list[str] = field(default_factory=list)
    rounding: Rounding | None = None

    @classmethod
    def of(
        cls,
        model: Model,
        options: Options,
        prepare: Prepare | None,
        staged: Staged | None,
    ) -> Compilation:
        """Captures the model. Raises UsageError if it has no such precision or weights."""
        device = options.device
        report = Report(model.source, str(device), options.precision or "fp32", device.operators)
        passes = pipeline(**options.of_pipeline())
        begun = begin(model, options, prepare, report)
        captured = begun.captured
        report.precision = options.precision or begun.own
        report.notes += begun.notes
        report.nodes_before = len(captured.graph)
        return cls(
            model,
            options,
            captured,
            begun.own,
            report,
            begun.check,
            clone(captured.graph) if options.verifies else None,
            passes,
            begun.buffers,
            are_large(_weights(captured.graph)),
            staged,
        )

    @property
    def graph(self) -> Graph:
        return self.captured.graph

    def rewrite(self) -> None:
        """Runs the passes. Raises UsageError where what was asked for isn't in the model."""
        options, report, source = self.options, self.report, self.model.source
        each = self.check if options.verify == "each" else None
        run_passes(self.graph, self.passes, report, each)
        if self.buffers is not None:
            require_in_place(self.graph, self.buffers, source)
            part_joined(self.graph, self.buffers)
        self.assumed = assumptions_of(report.passes, options.assume)
        report.notes += self.assumed
        if options.ignore_padded_rows:
            require_packed(report.passes, source)
            report.notes += notes_of(report.passes)
            self.check.padding = Padding(packed_tokens(report.passes))
        report.weight_bytes_before = stored_bytes(self.graph)
        if options.weights is not None:
            require_linears(self.graph, options.weights, source)

    def lowered(self) -> Optimized:
        """The model in ONNX, in the precision asked for and within its error budget.

        Raises ParityError if it is out of the budget, naming what is to blame.
        """
        report = self.report
        measure = self._measure if self.options.verifies else None
        if report.precision == self.own:
            optimized = self._build(self.graph)
            report.parity = None if measure is None else measure(optimized)
            if self._needs_exact_gates(report.parity):
                optimized.close()
                optimized = self._build(self.graph)
                report.parity = self._measure(optimized)
                report.notes.append(gates.TOLD)
        else:
            self.check.convert(report.precision)
            device = self.options.device
            halved = in_half(self.graph, report.precision, device, self._build, measure)
            optimized, report.parity, report.kept = halved.optimized, halved.parity, halved.kept
            report.notes += halved.notes
        report.notes += [*self.placed, *self.check.notes]
        if report.parity is not None and not report.parity.passed:
            raise self._out_of_budget(optimized, report.parity)
        if report.parity is not None:
            report.notes += report.parity.rounded_in_eager
            with stage("parity", report):
                report.coverage = self.check.covered(optimized.graph)
            report.notes += report.coverage.notes
        return optimized

    def _needs_exact_gates(self, parity: Parity | None) -> bool:
        """Whether the result is out of its budget, or within it only as the kernels' gates are
        coarse, and has gates that were written anew for it.
        """
        is_fine = parity is None or (parity.passed and not parity.saturated)
        if is_fine or self.options.device.provider != "cpu":
            return False
        return self.own == "fp32" and gates.in_exponentials(self.graph) > 0

    def quantized(self, optimized: Optimized) -> Optimized:
        """The model with quantized weights of its linears, and kernels within their error budget.

        Raises UsageError where no weight can be stored so, ParityError where a kernel is off.
        """
        report, source, weights = self.report, self.model.source, self.options.weights
        assert weights is not None
        optimized.close()
        with stage("quantise", report), out_of_memory(self.graph):
            quantizing = Quantizing(self.graph, self.options, source, self.check, self.is_large)
            report.quantised = quantizing.run(weights)
            self.rounding = quantizing.rounding
        optimized = self._build(self.graph)
        report.notes += report.quantised.kept
        if report.quantised.chosen:
            report.notes.append(
                f"The codes of {len(report.quantised.chosen)} weights were chosen on "
                f"{self.options.calibrate or 'the sample'}, as GPTQ does."
            )
        in_floats = self.options.activations is None
        if self.options.device.provider == "cpu" and self.own == "fp32" and in_floats:
            report.notes.append(cost_on_cpu(weights, portable=self.options.portable))
        if not self.options.verifies:
            return optimized
        with stage("parity", report):
            self._reach(optimized)
            apart = partial(taken_apart, optimized)
            report.parity, report.quantised.errors = held_as_stored(
                self.check, optimized.graph, optimized.evaluate, apart, optimized.buffers
            )
        if not report.parity.passed:
            raise ParityError(
                f"The {weights} kernels of {source} are out of their error budget, against the "
                f"dequantised weights: {report.parity}. Nothing was written."
            )
        return optimized

    def release(self, optimized: Optimized) -> None:
        """Frees the memory that verifying a large model took."""
        if self.pristine is not None and self.is_large:
            optimized.close()
            release([*_weights(self.pristine), *_weights(self.graph)])

    def _build(self, graph: Graph) -> Optimized:
        """A graph in ONNX, each attention in its best form by the table or by measurement."""
        options, report, device = self.options, self.report, self.options.device
        static = self.buffers is not None
        with stage("lower", report):
            if options.tune:
                threads = options.session.get("threads")
                kernels = tuned(graph, device, report.notes.append, threads=threads, static=static)
            else:
                kernels = choose_all(graph, device, static=static)
            onnx = lower(graph, target=device, kernels=kernels, buffers=self.buffers)
            if options.single_file:
                in_one_file(onnx)
        stored = None if report.quantised is None else report.quantised.weights
        made = Provenance(
            options.of_pipeline(),
            report.precision,
            stored,
            self.rounding,
            device.opset,
            device.portable,
            {} if report.quantised is None else report.quantised.chosen,
        )
        made.write(onnx.metadata_props)
        if place := onnx.metadata_props.get(KEPT_KEY):
            note = (
                f"{place} computes with denormal numbers, so sessions don't flush these to zero, "
                "and masked attentions take longer on the CPU."
            )
            report.notes += [] if note in report.notes else [note]
        if report.precision == "bf16" and device.provider == "cpu":
            casts = sum(node.op_type == "Cast" for node in onnx.graph)
            report.notes[:] = [note for note in report.notes if not note.startswith(_LITTLE_BF16)]
            report.notes += [
                f"{_LITTLE_BF16}: {casts} of the file's {len(onnx.graph)} nodes are casts, which "
                "the model in float32 (model.float()) doesn't have."
            ]
        onnx.metadata_props[RANGES_KEY] = Ranges.of(graph).to_json()
        report.sites = sites_of(report.passes, kernels)
        if device.provider == "cpu":
            report.timed_on = timed_family(device.family)
            if device.family not in (None, report.timed_on):
                note = (
                    f"No times of forms were measured on {device.family}: those of "
                    f"{report.timed_on}, the nearest family of CPUs, decided."
                )
                report.notes += [] if note in report.notes else [note]
        is_original = report.precision == self.own and stored is None
        origin = self.pristine if is_original else None
        session, buffers = options.session, self.buffers
        signature = self.captured.signature if buffers is None else None
        return Optimized(
            graph, onnx, report, device, origin, session, buffers, self.staged, signature
        )

    def _measure(self, optimized: Optimized) -> Parity:
        """How far it is from eager. Notes which of its nodes run elsewhere."""
        dtypes = [value.dtype for value in optimized.graph.inputs]  # a cache may be half

        def given(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return tuple(x.to(dtype) for x, dtype in zip(tensors, dtypes, strict=True))

        def candidate(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return optimized.evaluate(given(tensors))

        def done() -> None:
            self.placed = elsewhere(optimized.session)
            if self.is_large:  # the session has a copy of them
                optimized.close()

        with stage("parity", self.report):
            self._reach(optimized)
            apart = partial(taken_apart, optimized)
            chosen = Chosen(choices_of(optimized.model), apart, given)
            return self.check.final(candidate, done, chosen)

    def _reach(self, optimized: Optimized) -> None:
        """Adds the cases that it takes to run every branch."""
        names = {value.name: value.name for value in optimized.graph.inputs}
        self.check.reach(optimized.graph, optimized.model, names)

    def _out_of_budget(self, optimized: Optimized, parity: Parity) -> ParityError:
        """The error that names the first pass or node to diverge, or the trace."""
        assert self.pristine is not None
        if self.report.precision != self.own:  # nothing that is half is to blame
            optimized = self._build(self.graph)
        inputs = self.check.worst_inputs(parity)
        rows = self.check.padding.rows(inputs)
        culprit = trace_differs(self.check, self.pristine) or blame(
            self.pristine, self.passes, self.graph, optimized, inputs, rows
        )
        return ParityError(
            f"The optimised {self.model.source} is out of its error budget: {parity}. "
            f"{' '.join([culprit, *self.assumed, *of_hidden_rows(parity)])} Nothing was written."
        )


def of_hidden_rows(parity: Parity) -> list[str]:
    """What helps where a result is out of budget in nothing but rows without a key."""
    cases = [output.case for output in parity.outputs if not output.passed]
    if not cases or not all(HIDDEN in case for case in cases):
        return []
    return [
        "Of the inputs tried, only those whose masks hide all keys of a row are: if yours never "
        f"do, say so with --assume {NO_MASKED_ROWS}."
    ]


def run_passes(
    graph: Graph,
    passes: Sequence[Pass],
    report: Report,
    check: Check | None = None,
) -> None:
    """Runs the passes on a graph and reports of them; `check` compares after each with eager."""

    def after(graph: Graph, result: PassResult) -> None:
        if check is not None:
            verify(graph)
            check.after_pass(graph, result)

    with stage("passes", report), out_of_memory(graph):
        report.passes = run(graph, passes, after_each=after)
    report.reassociated = reassociations_of(report.passes)
    report.notes += [
        *defects_of(report.passes),
        *loops_of(report.passes),
        *fills_of(report.passes),
        *hidden_rows_of(report.passes),
    ]


@contextlib.contextmanager
def out_of_memory(graph: Graph) -> Iterator[None]:
    """Within it, what passes compute from large weights is kept in files, not in memory."""
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
