"""A model's own outputs, and how far from them a result is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any

import onnx_ir
import torch
from torch._subclasses.fake_tensor import FakeTensor

from attngraph.checks.cases import Integers, SampleInputs, label_of
from attngraph.checks.chosen import NEARLY_TIED, Chosen, held_as_chosen
from attngraph.checks.coverage import Drawings, coverage_of
from attngraph.checks.padded import Padding, annotated, packed_tokens
from attngraph.checks.reaching import goals_of, largest_value, reach
from attngraph.errors import AttngraphError, ParityError, UsageError
from attngraph.export.formats import Precision
from attngraph.export.parity.budget import Parity, compare, merge
from attngraph.export.parity.reference import Reference, ReferenceOutputs, said_by
from attngraph.export.precision import DTYPES, half_inside
from attngraph.frontend.capture import Captured
from attngraph.frontend.model import Model
from attngraph.frontend.tracing.trace_errors import reason
from attngraph.ir import Graph, clone, interpret
from attngraph.mapped import release_large
from attngraph.passes import PassResult
from attngraph.reports.coverage import Coverage

Cases = Mapping[str, tuple[torch.Tensor, ...]]
"""Inputs by label, in the order of the graph's."""
Candidate = Callable[[tuple[torch.Tensor, ...]], Sequence[torch.Tensor]]
"""What is compared with the model: inputs to outputs, both in the order of the graph's."""
_TRACED = "as traced"
_HALF_INSIDE = {
    half: f"The model computes in {half} inside, as torch.autocast does: outputs are held to the "
    "rounding of that, where they come of it and are out of float32's."
    for half in ("bf16", "fp16")
}
_NEARER = (
    (True, Integers()),
    (False, Integers(turned=False)),
    (False, Integers(turned=False, ended=True)),
    (True, Integers(turned=False)),
    (True, Integers(turned=False, ended=True)),
    (False, Integers(lowered=True)),
    (True, Integers(lowered=True)),
    (False, Integers(filled=True)),
    (False, Integers(summed=True)),
)
"""Whether dims are tied, and what becomes of integers, where inputs are drawn anew."""


def _is_same(said: tuple[str, Any], told: tuple[str, Any]) -> bool:
    """Whether two leaves of outputs, with their paths, are both tensors, or one number or text."""
    (place, one), (other_place, other) = said, told
    numbers = isinstance(one, (bool, int, float)) and isinstance(other, (bool, int, float))
    is_alike = place == other_place and (numbers or type(one) is type(other))
    return is_alike and (one is other or one == other or (one != one and other != other))


def _shown(said: tuple[str, Any], beside: tuple[str, Any]) -> str:
    place, leaf = said
    if place != beside[0]:
        return f"{place!r}"
    return "a tensor" if leaf is ... else str(leaf) if isinstance(leaf, Enum) else repr(leaf)


class Check:
    """Parity of one model, whose own outputs are computed once per size.

    A large model and what is compared with it take turns in memory: the model first runs on all
    cases, then the pages of its mapped weights are released, and then the candidate runs.

    `pristine` is the graph as it was captured; `at` makes inputs of other sizes. Unless
    `hides_rows`, no case leaves a query without a key. `drawn` are the labels of the cases that the
    check made, `rejected` those of drawn inputs that the model itself fails on. `halves` says so
    where the rounding of a half that the model computes in inside was allowed, `ties` where a file
    settles ties of its scores otherwise.
    """

    def __init__(
        self,
        model: Model,
        captured: Captured,
        precision: Precision,
        cases: Cases | None = None,
        *,
        hides_rows: bool = True,
        at: Callable[[Mapping[str, int]], tuple[torch.Tensor, ...]] | None = None,
    ) -> None:
        self.cases = cases
        self.hides_rows = hides_rows
        self.pristine = clone(captured.graph)
        self.samples = SampleInputs(captured, self.pristine)
        self.at = at or self.samples.at
        self.drawn: list[str] = []
        self.rejected: list[str] = []
        self.padding = Padding([])
        self._ties: list[str] = []
        self._left_out: list[str] = []
        self._unreached: list[str] = []
        self._is_given = cases is not None
        self.model = model
        self.captured = captured
        self.precision = precision
        self._half = half_inside(captured.graph) if precision == "fp32" else None
        self.halves: list[str] = []
        self.ties: list[str] = []
        self.module = model.runnable
        self.reference = self._reference()
        self._known: dict[str, ReferenceOutputs] = {}

    @property
    def notes(self) -> list[str]:
        """What the cases leave out: unequal sizes, hidden rows, branches that weren't run. And
        whose rounding was allowed.
        """
        return [*self._ties, *self._left_out, *self._unreached, *self.halves, *self.ties]

    def convert(self, precision: Precision) -> None:
        """From now on the result is held against the module in another precision."""
        self.precision, self._half = precision, None
        self.reference = self._reference(converted=True)
        self._known = {}

    def _reference(self, *, converted: bool = False) -> Reference:
        numbers = self.captured.signature.numbers
        return Reference(
            self.module, precision=self.precision, converted=converted, numbers=numbers
        )

    def references(self, tensors: tuple[torch.Tensor, ...]) -> ReferenceOutputs:
        """Eager's outputs, under the names that the graph's have."""
        args, kwargs = self.captured.call(tensors)
        try:
            found = self.reference(args, kwargs)
        except AttngraphError:
            raise
        except Exception as error:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            fixed = "".join(f" {note}" for note in self.captured.fixed)
            raise UsageError(
                f"{self.model.source} itself fails on inputs of shape {shapes}: "
                f"{type(error).__name__}: {reason(error).rstrip('.')}. Give sample inputs that it "
                f"takes, and the range of each dynamic dim.{fixed}"
            ) from error
        if any(isinstance(output, FakeTensor) for output in found.eager):
            raise UsageError(
                f"{self.model.source} caches a tensor for later calls outside of its modules, and "
                "the one that it cached under the trace holds no numbers. Cache it in the module, "
                "or compute it in each call."
            )
        names = self.captured.output_names
        return replace(found, names=names) if len(names) == len(found.names) else found

    def all_references(self) -> Mapping[str, ReferenceOutputs]:
        """Eager's outputs in every case; what they were computed from is then released."""
        cases = self._runnable()
        missing = [label for label in cases if label not in self._known]
        for label in missing:
            self._known[label] = self.references(cases[label])
        if missing:
            release_large(self.module)
        return self._known

    def _runnable(self) -> Cases:
        """All cases; drawn anew, nearer to the sample, if the model fails on them.

        torch.export may leave axes apart (Dim.AUTO) that the model takes as one, such as those of
        a mask and of what it masks; a column of integers may have categories of its own; and what
        counts along an axis has less to count where it is shorter.
        """
        cases, makes_them = self.all_cases(), not self._is_given
        samples = self.samples
        if samples.tied or samples.integers != Integers() or not makes_them:
            return cases
        sample = self.samples.sizes_of(self.captured.args)
        for label, tensors in cases.items():
            if label in self._known or self.samples.sizes_of(tensors) == sample:
                continue
            try:
                self._known[label] = self.references(tensors)
            except UsageError:
                return self._redrawn(cases)
        return cases

    def _redrawn(self, cases: Cases) -> Cases:
        """Cases with tied dims, or other integers, or both, where the model takes them.

        The cases as they are where it takes none of these.
        """
        sample = self.samples.sizes_of(self.captured.args)
        groups = [
            [name for name in sample if sample[name] == size] for size in set(sample.values())
        ]
        ties = {name: group[0] for group in groups for name in group}
        known, drawn, rejected = dict(self._known), self.drawn, self.rejected
        samples, names = self.samples, self.captured.input_names
        for tied, integers in _NEARER:
            self.samples.tied, self.samples.integers = ties if tied else {}, integers
            self.cases, self.drawn, self.rejected = None, [], []
            # a label names sizes alone
            self._known = dict(known) if integers == Integers() else {}
            try:
                found = self.all_cases()
                for label, tensors in found.items():
                    if label not in self._known:
                        self._known[label] = self.references(tensors)
            except UsageError:
                continue
            self._ties = [
                f"The model was only checked where {' = '.join(sorted(group))}: it fails at sizes "
                "where all dims differ. Give axes that belong together one Dim."
                for group in groups
                if tied and len(group) > 1
            ]
            if integers.filled:
                self._ties += [
                    f"The model was only checked where the largest of {names[place]} is {dim}, as "
                    "in the sample: it fails where it isn't."
                    for place, dim in samples.filled().items()
                ]
            if integers.summed:
                self._ties += [
                    f"The model was only checked where the sum of {names[place]} is {dim}, as in "
                    "the sample: it fails where it isn't."
                    for place, dim in samples.summed().items()
                ]
            if integers.lowered:
                self._ties.append(
                    "At sizes below the sample's the model was only checked with smaller integers: "
                    "it fails on the sample's own there."
                )
            return found
        self.samples.tied, self.samples.integers = {}, Integers()
        self._known = known
        self.cases, self.drawn, self.rejected = cases, drawn, rejected
        return cases

    def covered(self, graph: Graph | None = None) -> Coverage:
        """What the cases exercised of the model, and of the optimised graph's attentions."""
        cases = self.all_cases()
        eager = {label: self._known[label].eager for label in cases if label in self._known}
        drawn = Drawings([label for label in self.drawn if label in cases], self.rejected)
        return coverage_of(self.module, self.captured, self.pristine, cases, eager, drawn, graph)

    def worst_inputs(self, parity: Parity) -> tuple[torch.Tensor, ...]:
        """The inputs on which a result is furthest off; the sample's if these are no case."""
        return self.all_cases().get(parity.worst.case, self.captured.args)

    def after_pass(self, graph: Graph, result: PassResult) -> None:
        """Raises ParityError naming the pass, if the graph now computes something else."""
        self.padding = Padding([*self.padding.packed, *packed_tokens([result])])
        tensors = self.captured.args
        if _TRACED not in self._known:
            self._known[_TRACED] = self.references(tensors)
        parity = self.held(self._known[_TRACED], interpret(graph, tensors), tensors)
        if not parity.passed:
            raise ParityError(f"After the pass {result.name} the graph is wrong: {parity}.")

    def final(
        self,
        candidate: Candidate,
        done: Callable[[], None] = lambda: None,
        chosen: Chosen | None = None,
    ) -> Parity:
        """Parity over all cases. `done` is called when the candidate has run for the last time.

        The model runs first, so that its own failure on the inputs is what gets reported. Where the
        candidate is out of its budget, the model takes the choices that it made, if rounding
        explains them.
        """
        self.require_rows()
        references, cases = self.all_references(), self.all_cases()
        outputs = {label: candidate(tensors) for label, tensors in cases.items()}
        done()
        found = {
            label: self.held(references[label], outputs[label], tensors)
            for label, tensors in cases.items()
        }
        if chosen is not None and chosen.names:
            failed = {label: cases[label] for label, parity in found.items() if not parity.passed}
            as_chosen, note = held_as_chosen(chosen, failed, outputs, self.references, self.held)
            found.update(as_chosen)
            self.ties = [note] if note else [] if self.precision == "fp32" else [NEARLY_TIED]
        return self.required(merge(found))

    def required(self, parity: Parity) -> Parity:
        """Raises ParityError where an output has no finite number to compare in any case."""
        cases = {output.case: None for output in parity.outputs}
        first = [output for output in parity.outputs if output.case == next(iter(cases))]
        # Padding is what the caller's own masks say: theirs must leave something to compare.
        names = (
            replace(parity, outputs=tuple(first)) if self.padding.packed else parity
        ).uncompared
        if not names or not parity.passed:
            return parity
        if self.padding.packed:
            why = "Give samples with valid rows, or leave out --ignore-padded-rows."
        else:
            why = "Give sample inputs on which it returns numbers."
        where = f"in {', '.join(names)}{' outside of padding' if self.padding.packed else ''}"
        raise ParityError(
            f"{self.model.source} returns no finite number {where}, so nothing was compared and "
            f"nothing is known of the result. {why} Nothing was written."
        )

    def require_rows(self) -> None:
        """Raises ParityError where nothing but padding is left to compare in any case."""
        cases = self.all_cases().values()
        self.padding.require_rows(cases, self.captured.graph.output_names)

    def held(
        self,
        reference: ReferenceOutputs,
        outputs: Sequence[torch.Tensor],
        tensors: tuple[torch.Tensor, ...],
    ) -> Parity:
        """Outputs against eager's for the same inputs, without what is padding.

        Raises ParityError where eager returns other numbers or texts than the sample's.
        """
        if otherwise := self.says_otherwise(reference):
            raise ParityError(otherwise)
        if self.reference.converted:
            outputs = reference.in_its_dtypes(outputs)
        cut, outputs, notes = self.padding.cut(reference, outputs, tensors)
        found = compare(cut, outputs, self.precision)
        failed = {at for at, each in enumerate(found.outputs) if not each.passed}
        if failed and self._half is not None and failed <= self._half[1]:
            half, _ = self._half
            sample = partial(cut.sample, torch.finfo(DTYPES[half]).eps)
            found = compare(replace(cut, sample=sample), outputs, half)
            self.halves = [_HALF_INSIDE[half]] if found.passed else self.halves
        return annotated(found, notes, reference.eager)

    def says_otherwise(self, reference: ReferenceOutputs) -> str:
        """A sentence if eager returned a number or text that isn't the file's, else "".

        What differs in two runs on the sample, as the time does, is no function of the inputs.
        """
        said, signature = reference.said, self.captured.signature
        if len(reference.eager) != len(self.captured.output_names):
            return ""
        told = said_by(signature.unflatten(reference.eager, are_tensors=True))
        pairs = enumerate(zip(said, told, strict=True)) if len(said) == len(told) else ()
        apart = [at for at, pair in pairs if not _is_same(*pair)]
        runs = [self.references(self.captured.args).said for _ in range(2)] if apart else []
        for at in apart:
            if _is_same(*(run[at] for run in runs)):
                return (
                    f"{self.model.source} returns {_shown(said[at], told[at])} for some inputs, "
                    f"and a file would return {_shown(told[at], said[at])} for these too: return a "
                    "tensor in its place, or leave it out."
                )
        return ""

    def all_cases(self) -> Cases:
        """The inputs that parity is checked on: by default those of the sample, at all sizes."""
        self.cases = self.cases or self._chosen()
        return self.cases

    def reach(self, graph: Graph, model: onnx_ir.Model, names: Mapping[str, str]) -> None:
        """Adds cases at sizes that enter branches of a file which no other case enters.

        `graph` is what the file computes; `names` maps the file's inputs to those of the graph.
        """
        cases, dims = dict(self.all_cases()), self.pristine.dims
        goals = goals_of(graph, model, names)
        if not goals:
            return
        known = [self.samples.sizes_of(tensors) for tensors in cases.values()]
        reached = reach(goals, known, dims, self.samples.limits, largest_value(graph))
        self._unreached = reached.notes
        for sizes in reached.sizes:
            label = label_of(sizes)
            tensors = self.at(sizes)
            try:
                self._known[label] = self.references(tensors)
            except UsageError:
                self.rejected.append(label)
                self._unreached.append(
                    f"The model itself fails at {label}, where a branch would run."
                )
                continue
            cases[label] = tensors
        self.cases = cases

    def _chosen(self) -> Cases:
        """The sample at several sizes, and inputs of the checker's own that the model takes."""
        found = {label_of(sizes): self.samples.at(sizes) for sizes in self.samples.sizes()}
        for sizes in self.samples.equal_sizes():  # where Python asked, the model may fail
            tensors = self.samples.at(sizes)
            with contextlib.suppress(UsageError):
                self._known[label_of(sizes)] = self.references(tensors)
                found[label_of(sizes)] = tensors
        done: set[tuple[bool, bool | None, bool, bool]] = set()
        weights = sum(each.numel() for each in self.module.parameters())
        for draw in self.samples.draws(hides_rows=self.hides_rows):
            if draw.kind in done:
                continue
            hides_rows, _, padded, _ = draw.kind
            if (hides_rows or padded) and self.samples.is_costly(weights):
                self._left_out = self._left_out or [
                    f"Nothing was checked at {draw.label}: a run of the model takes too long. Give "
                    "a smaller sample to have it checked."
                ]
                continue
            try:
                tensors = draw.make()
                self._known[draw.label] = self.references(tensors)
            except (UsageError, RuntimeError, TypeError, ValueError):  # dtypes without such values
                self.rejected.append(draw.label)
                continue
            found[draw.label] = tensors
            self.drawn.append(draw.label)
            done.add(draw.kind)
        return found
