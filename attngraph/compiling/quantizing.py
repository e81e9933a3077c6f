"""Decides before weights are quantized which outliers move and which linears stay in float."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from attngraph.checks.check import Check
from attngraph.checks.shares import allotted, error, errors_of_each
from attngraph.errors import AttngraphError, UsageError
from attngraph.export.formats import Weights
from attngraph.export.precision.calibrated import chosen_on
from attngraph.export.precision.quantize import Linear, Moved, Quantised, Rounding, Stored, quantise
from attngraph.export.precision.smooth import exponents, move
from attngraph.export.runtime.saturation import saturates
from attngraph.frontend.files.specs import read_npz
from attngraph.ir import Graph, clone, interpret
from attngraph.options import Options

_PATIENCE = 10.0
"""Seconds for the errors of all linears, where no budget asks for them."""


@dataclass
class Quantizing:
    """A graph whose linears are to be quantized. `keep` are the names of what those return that
    stay in float, `fine` of those that are given 16 bits, `moves` the exponents of the features
    that were divided (smooth.py), `chosen` the codes of weights that were chosen on --calibrate or
    on samples (calibrated.py).
    """

    graph: Graph
    options: Options
    source: str
    check: Check
    is_large: bool
    keep: frozenset[str] = frozenset()
    fine: frozenset[str] = frozenset()
    moves: Mapping[str, str] = field(default_factory=dict)
    chosen: Mapping[str, Stored] = field(default_factory=dict)

    def run(self, weights: Weights) -> Quantised:
        """Quantizes the graph. Raises UsageError where no weight can be, or none in the budget."""
        samples = self._samples()
        moved = self._smooth(weights, samples)
        if samples:
            most = max(samples, key=lambda tensors: sum(tensor.numel() for tensor in tensors))
            given = self.options.calibrate is not None
            self.chosen = chosen_on(self.graph, most, weights, self.rounding, calibrates=given)
        errors = self._allot(weights)
        found = quantise(self.graph, weights, self.rounding, self.chosen)
        found.moved = moved
        stored = {linear.weight for linear in found.forms}
        found.chosen = {n: made.digest for n, made in self.chosen.items() if n in stored}
        _tell_shares(found, self.graph, errors)
        if not found.linears:
            raise UsageError(
                f"{self.source} can't have {weights} weights. {' '.join(found.kept)} "
                "Leave out --weights."
            )
        return found

    @property
    def rounding(self) -> Rounding | None:
        """How the inputs of quantized linears are rounded; None where they aren't."""
        activations = self.options.activations
        if activations is None:
            return None
        return Rounding(activations, saturates(), self.keep, self.moves, self.fine)

    def _smooth(
        self, weights: Weights, samples: Sequence[tuple[torch.Tensor, ...]]
    ) -> Moved | None:
        """Moves outliers out of activations that are to be rounded, where that makes the first
        output more accurate on the samples: those of --calibrate, else what is checked.
        """
        if self.options.activations is None or not samples:
            return None
        moves = exponents(self.graph, samples)
        moved = clone(self.graph)
        count = move(moved, moves)
        if not count:
            return None
        exact = [interpret(self.graph, tensors) for tensors in samples]

        def lost(graph: Graph) -> float:
            quantise(graph, weights, self.rounding)
            each = [
                error(outputs, interpret(graph, tensors))
                for outputs, tensors in zip(exact, samples, strict=True)
            ]
            return max(each)

        before, after = lost(clone(self.graph)), lost(moved)
        if not after < before:
            return None
        move(self.graph, moves)
        self.moves = moves
        return Moved(count, before, after)

    def _samples(self) -> list[tuple[torch.Tensor, ...]]:
        """Inputs as they are met in use. None of a large model, which takes long, nor unverified,
        unless they are given.

        Raises UsageError where those of --calibrate don't fit the model.
        """
        path = self.options.calibrate
        if path is None:
            if self.options.activations is None or not self.options.verifies or self.is_large:
                return []
            cases = self.check.all_cases()
            return [tensors for label, tensors in cases.items() if label not in self.check.drawn]
        arrays, inputs = read_npz(path, option="--calibrate"), self.graph.inputs
        if missing := [value.name for value in inputs if value.name not in arrays]:
            raise UsageError(
                f"--calibrate {path} has no {missing[0]}; it has {', '.join(arrays)}, and "
                f"{self.source} takes {', '.join(value.name for value in inputs)}."
            )
        given = tuple(arrays[value.name].to(value.dtype) for value in inputs)
        try:
            interpret(self.graph, given)
        except (AttngraphError, RuntimeError, IndexError) as error:
            raise UsageError(
                f"{self.source} can't be run on --calibrate {path}: {error}"
            ) from error
        return [given]

    def _allot(self, weights: Weights) -> Mapping[str, float]:
        """Decides which linears have 16 bits or stay in float. Returns the errors of all, where
        they are measured: for a budget, or where it takes little time.
        """
        share = self.options.share
        if self.options.activations is None or not self.options.verifies:
            return {}
        tensors, trial = self.check.captured.args, clone(self.graph)
        linears = quantise(trial, weights, self.rounding, self.chosen).linears
        start = time.perf_counter()
        interpret(self.graph, tensors)
        if share is None:
            patient = linears * (time.perf_counter() - start) <= _PATIENCE
            return errors_of_each(self.graph, trial, tensors) if patient else {}
        self.keep, self.fine, errors = allotted(self.graph, trial, tensors, share)
        if linears and self.keep >= errors.keys():
            raise UsageError(
                f"No linear of {self.source} can have {weights} weights and int8 activations "
                f"within {self.options.budget} of the output's rms: allow more, or leave out "
                "--activations."
            )
        return errors


def _tell_shares(found: Quantised, graph: Graph, errors: Mapping[str, float]) -> None:
    """Adds the share of each linear, and those that stay in float for the budget's sake."""
    stored = {linear.returns for linear in found.forms}
    for node in graph:
        if node.op == "aten.linear" and node.output.name in errors.keys() - stored:
            weight = node.input(1)
            found.forms.append(Linear(weight.name, "float32", node.output.name))
    total = sum(error**2 for error in errors.values())
    for linear in found.forms:
        if linear.returns in errors and total:
            linear.share = errors[linear.returns] ** 2 / total
