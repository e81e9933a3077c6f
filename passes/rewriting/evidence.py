"""Evaluates a region before and after a rewrite, on inputs chosen to tell them apart.

What the inputs are is in trials.py, how a region is evaluated in regions.py. Equal regions (the
layers of a model) are evaluated once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from attngraph.analysis.values.weights import Derivation
from attngraph.ir import Graph, Node, Value
from attngraph.ir.conditions import multiples
from attngraph.ir.ranges import Ranges
from attngraph.ir.slices import backward_slice
from attngraph.ir.traits import EXPONENTIAL, LOG_SUM
from attngraph.passes.rewriting.conditions import Conditions, aims_of
from attngraph.passes.rewriting.outcomes import Different, Equal, NotEvaluated, Outcome, Unreached
from attngraph.passes.rewriting.regions import Misread, Region
from attngraph.passes.rewriting.trials import (
    AIMED,
    ATTENTION,
    Aims,
    general_sizes,
    parts_of_the_sample,
    sample_sizes,
    shown,
    trial_sizes,
)

TOLERANCE = 1e-6  # of float64 against itself: reassociation gives 1e-13, fills in float32 1e-8
_CHEAP = 1 << 19  # elements of a trial up to which a region is evaluated at its own sizes
_SMALL = 1 << 21  # elements of the largest tensor of a trial
_MOST_ELEMENTS = 1 << 24
_NUDGE = 2.0**-48
_NO_NUMBER = NotEvaluated("the original form gave no number in any trial")


@dataclass
class Evidence:
    """Compares regions of one graph. Remembers those it has compared."""

    graph: Graph
    _known: dict[Hashable, Outcome] = field(default_factory=dict)

    def compare(
        self,
        pairs: Sequence[tuple[Value, Value]],
        leaves: Iterable[Value],
        biases: Iterable[Value] = (),
        *,
        kinds: Sequence[str] = ATTENTION,
        tolerance: float = TOLERANCE,
        depth: int | None = None,
        unrounded: Mapping[Value, torch.Tensor] | None = None,
        derived: Mapping[Value, Derivation] | None = None,
        final: bool = True,
        as_typed: bool = False,
    ) -> Outcome:
        """Whether each pair of (old, new) values agrees wherever the old one can run.

        Both are functions of `leaves`, and of what lies above otherwise, `depth` nodes at most.
        `biases` are leaves that may hold -inf and finfo.min. The tolerance is relative to the
        largest element; 0 asks for equal bits. `unrounded` are constants before they were rounded
        to their dtype. `derived` says how new constants follow from old ones: where those have no
        data, both are drawn. Where other values at smaller sizes than its own may be told from
        values that are other, they are only if this is the `final` comparison of the pairs.

        All of it is evaluated in float64. With `as_typed` it is in the graph's own dtypes, in which
        the fills of a mask overflow and absorb, and what is equal at smaller sizes than its own is
        so only if these show both sides of every condition: of a window, say.
        """
        asked, cut = _Asked(pairs, tuple(kinds), tolerance), set(leaves)
        roots = [value for pair in pairs for value in pair]
        sampled, nodes = backward_slice(roots, cut.__contains__, depth)
        old, _ = backward_slice([old for old, _ in pairs], cut.__contains__)
        if as_typed:
            whole = {value for value in sampled if value.is_constant and not _counts(value)}
            region = Region(sampled, nodes, known=frozenset(sampled) - whole, as_typed=True)
            return self._compare_typed(asked, region)
        region = Region(
            sampled, nodes, frozenset(biases), frozenset(old), derived or {}, unrounded or {}
        )
        key = (region.key(roots), asked.kinds, tolerance)
        if key not in self._known or (final and isinstance(self._known[key], _AtOtherSizes)):
            self._known[key] = self._compare(asked, region, final)
        return self._known[key]

    def _compare(self, asked: _Asked, region: Region, final: bool) -> Outcome:
        if (unknown := region.unknown()) is not None:
            return NotEvaluated(f"%{unknown.name} has no data, and nothing says what it is made of")
        own = self._own_sizes(region)
        fixed = region.fixed(own[0])
        cost = [region.elements(sizes, fixed) for sizes in own]
        cheap = [sizes for sizes, (total, _) in zip(own, cost, strict=True) if total <= _CHEAP]
        if cheap:
            found = asked.tried(region, [(sizes, fixed) for sizes in cheap])
            return self._at_the_samples(asked, region, found)
        outcome = self._at_other_sizes(asked, region)
        if isinstance(outcome, Equal) or (isinstance(outcome, Different) and not final):
            return outcome
        largest = [most for _, most in cost]
        small = [sizes for sizes, most in zip(own, largest, strict=True) if most <= _SMALL]
        if not small and min(largest) <= _MOST_ELEMENTS:  # one trial, at full size
            small = [own[largest.index(min(largest))]]
            asked = replace(asked, kinds=asked.kinds[:1])
        if not small:
            return outcome or NotEvaluated(f"its largest tensor has {min(largest):,} elements")
        return asked.tried(region, [(sizes, fixed) for sizes in small])

    def _own_sizes(self, region: Region) -> list[dict[str, int]]:
        """The usual sizes; of a model that takes multiples only, such.

        A quotient of one size by another has no number where the latter is 0: if that is so in all
        of them, those of the sample.
        """
        if not (steps := multiples(self.graph.conditions)):
            return trial_sizes(self.graph.dims)
        own = trial_sizes(self.graph.dims, steps)
        return [sizes for sizes in own if region.has(sizes)] or sample_sizes(self.graph.dims)

    def _at_the_samples(self, asked: _Asked, region: Region, outcome: Outcome) -> Outcome:
        """The outcome, or that at sizes like the sample's where the usual ones are too small.

        A frame of 16 samples fits into no signal of 5, and nothing says so but that it fails. Where
        the sample is a second of sound, and an attention over it too large, it is a part of that.
        """
        if outcome != _NO_NUMBER:
            return outcome
        trials = [(sizes, region.fixed(sizes)) for sizes in sample_sizes(self.graph.dims)]
        trials = [trial for trial in trials if 0 < region.elements(*trial)[0] <= _CHEAP]
        if not trials:
            parts = (
                (sizes, region.fixed(sizes))
                for sizes in parts_of_the_sample(self.graph.dims)
                if not Ranges.of(self.graph).broken(sizes)
            )
            cheap = (trial for trial in parts if 0 < region.elements(*trial)[0] <= _CHEAP)
            trials = list(itertools.islice(cheap, 2))
        return asked.tried(region, trials) if trials else outcome

    def _compare_typed(self, asked: _Asked, region: Region) -> Outcome:
        """As `_compare`, for a region that is evaluated as typed."""
        trials = [(sizes, region.fixed(sizes)) for sizes in self._own_sizes(region)]
        if max(region.elements(*trial)[0] for trial in trials) > _CHEAP:
            outcome = self._at_other_sizes(asked, region)
            if type(outcome) is Equal:
                return outcome
        return asked.tried(region, trials)

    def _at_other_sizes(self, asked: _Asked, region: Region) -> Outcome | None:
        """The outcome at smaller sizes of the same structure; None where there are none."""
        general = region.generalized(asked.pairs, self.graph.dims)
        if general is None or general.general is None:
            return None
        trials = []
        steps = multiples(self.graph.conditions)
        drawn = general_sizes(self.graph.dims, general.general.infos, steps)
        for place, sizes in enumerate(drawn):
            # The head of a mask is the mask of fewer positions; its tail is not.
            fixed = general.fixed(sizes, tail=place % 2 == 1 and not region.as_typed)
            if general.elements(sizes, fixed)[1] <= _SMALL:
                trials.append((sizes, fixed))
        if not trials:
            return None
        try:
            outcome = asked.tried(general, trials)
        except Misread:
            return None
        return _AtOtherSizes(outcome.reason) if isinstance(outcome, Different) else outcome


@dataclass(frozen=True, slots=True)
class _AtOtherSizes(Different):
    """Different at sizes that the region doesn't have."""


_Trial: TypeAlias = tuple[Mapping[str, int], Mapping[Value, Any]]


@dataclass
class _Comparison:
    """Pairs of values of a region, compared in one trial after another."""

    pairs: Sequence[tuple[Value, Value]]
    region: Region
    tolerance: float
    tells: bool = False

    def __post_init__(self) -> None:
        self.conditions = Conditions(self.region)

    def run(
        self, trials: Sequence[_Trial], kinds: Iterable[str], aims: Aims | None = None
    ) -> Different | None:
        """The first difference that some kinds of trial at some sizes show."""
        for (sizes, fixed), kind in itertools.product(trials, kinds):
            memory = self.region.run(sizes, kind, fixed, aims)
            if not all(old in memory for old, _ in self.pairs):
                continue  # the model itself rejects this input
            for old, new in self.pairs:
                if new not in memory:
                    return Different(f"at {shown(sizes)} the rewritten region can't be evaluated")
                if not _close(memory[new], memory[old], self.tolerance):
                    if aims is None and self._is_beyond(memory, sizes, kind, fixed):
                        break
                    return Different(f"at {shown(sizes)} it gives other values ({kind})")
            else:
                self.tells |= all(_tells(memory[old]) for old, _ in self.pairs)
                self.conditions.note(memory)
        return None

    def _is_beyond(
        self,
        memory: Mapping[Value, Any],
        sizes: Mapping[str, int],
        kind: str,
        fixed: Mapping[Value, Any],
    ) -> bool:
        """Whether the original form is beyond float64 here, so that a difference tells nothing.

        Its exponentials overflow, or its logits are so large that inputs which are off by a few
        roundings give other weights. Products of several levels grow as large as that.
        """
        if self.region.as_typed:
            return False
        olds = [old for old, _ in self.pairs]
        _, nodes = backward_slice(olds, {*self.region.leaves}.__contains__)
        powers = [node for node in nodes if node.op in EXPONENTIAL | LOG_SUM]
        if any(_overflows(node, memory) for node in powers):
            return True
        if not powers:
            return False
        again = self.region.run(sizes, kind, fixed, nudge=_NUDGE)
        return any(not _close(again.get(old), memory[old], self.tolerance) for old in olds)


@dataclass(frozen=True)
class _Asked:
    """Pairs of values that are to agree, and in which kinds of trial, how closely."""

    pairs: Sequence[tuple[Value, Value]]
    kinds: tuple[str, ...]
    tolerance: float

    def tried(self, region: Region, trials: Sequence[_Trial]) -> Outcome:
        """The outcome of trials that see both sides of every condition.

        Where the usual ones leave a condition constant, inputs are aimed at the numbers that decide
        it. One that stays constant is drawn itself: what is equal then is so whatever decides it.
        """
        comparison = _Comparison(self.pairs, region, self.tolerance)
        if (difference := comparison.run(trials, self.kinds)) is not None:
            return difference
        if constant := comparison.conditions.constant:
            aims = aims_of(region, constant)
            aimed = [f"{form} {place}" for place in range(len(aims.numbers)) for form in AIMED]
            if (difference := comparison.run(trials, aimed, aims)) is not None:
                return difference
        if not comparison.tells:
            return _NO_NUMBER
        if not (constant := comparison.conditions.constant):
            return Equal()
        free = _Comparison(self.pairs, region.freed(self.pairs, constant), self.tolerance)
        kinds = list(dict.fromkeys([*self.kinds, "holes", "open", "masked"]))
        if free.run(trials, kinds) is None and free.tells:
            return Equal()
        named = " and ".join(f"%{value.name}" for value in constant[:2])
        return Unreached(f"no trial has seen both sides of {named}")


def _counts(constant: Value) -> bool:
    """Whether a constant holds positions, or integers to compare: a part of it says as much."""
    return not constant.dtype.is_floating_point and constant.dtype != torch.bool


def _overflows(power: Node, memory: Mapping[Value, Any]) -> bool:
    """Whether the exponential of some number is infinite, or a sum of such."""
    found = memory.get(power.output)
    return isinstance(found, torch.Tensor) and bool((found == torch.inf).any())


def _tells(found: Any) -> bool:
    """Whether a result could have been another one: an empty one, or NaN alone, could not."""
    return not isinstance(found, torch.Tensor) or bool(found.isfinite().any())


def _close(found: Any, expected: Any, tolerance: float) -> bool:
    if not isinstance(found, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return bool(found == expected)
    if found.shape != expected.shape:
        return False
    if found.dtype.is_complex and expected.dtype.is_complex:
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    found, expected = found.double(), expected.double()
    if not expected.numel():
        return True
    apart = float((found - expected).abs_().max())
    if math.isfinite(apart):  # as all numbers are, then
        return apart <= tolerance * max(float(torch.linalg.vector_norm(expected, math.inf)), 1e-3)
    finite = expected[expected.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    atol = tolerance * max(scale, 1e-3)
    return torch.allclose(found, expected, rtol=0, atol=atol, equal_nan=True)
