"""Evaluates what a mask and bias do to attention before and after a rewrite, at several sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from attngraph.analysis.masks.masking import Masking
from attngraph.analysis.masks.row_policy import ABSORBING_FILL
from attngraph.errors import IRError
from attngraph.ir import Dim, DimInfo, ScalarType, Value
from attngraph.ir.dims import substitute
from attngraph.ir.ops import evaluate
from attngraph.ir.slices import backward_slice
from attngraph.passes.rewriting.conditions import Conditions, aims_of
from attngraph.passes.rewriting.outcomes import Different, Equal, NotEvaluated, Outcome
from attngraph.passes.rewriting.regions import Region
from attngraph.passes.rewriting.trials import (
    AIMED,
    Aims,
    aimed,
    discrete,
    seed_of,
    shown,
    trial_sizes,
)

_ROWS = 48
_KINDS = ("mixed", "sparse", "none", "all")
_TOLERANCE = 1e-9  # softmax in float64 of equal logits, in another order at most


def compare_maskings(
    before: Masking,
    after: Masking,
    shape: Sequence[Dim],
    dims: Mapping[str, DimInfo],
    is_leaf: Callable[[Value], bool],
    *,
    every_row: bool = True,
) -> Outcome:
    """Whether the same random scores give the same probabilities.

    Without `every_row`, rows whose every key is masked by `before` are not compared.

    Values that `is_leaf` accepts are sampled: padding with holes, rows without keys, integers from
    0 to 2, and those that decide a condition which these leave constant. `Unreached` is what
    agrees wherever it was tried, though a condition stayed constant. `shape` is (B, H, S, T).
    """
    roots = (*before.values, *after.values)
    sampled, nodes = backward_slice(roots, is_leaf)
    region = Region(sampled, nodes)
    conditions = Conditions(region, of_sizes=False)
    trials = trial_sizes(dims)

    def tried(kinds: Sequence[str], aims: Aims) -> Outcome | None:
        for sizes, kind in itertools.product(trials, kinds):
            try:
                memory = {value: _sample(value, sizes, kind, aims) for value in sampled}
                for node in nodes:
                    inputs = [None if v is None else memory[v] for v in node.inputs]
                    results = evaluate(node, inputs, sizes)
                    for value, result in zip(node.outputs, results, strict=True):
                        memory.setdefault(value, result)
                full = [int(substitute(dim, sizes)) for dim in shape]
                past = int(substitute(before.past, sizes))
                logits = _logits(before, full, past, memory)
                expected = _probabilities(before, logits)
                found = _probabilities(after, _logits(after, full, past, memory))
                if not every_row:
                    dead = (logits <= ABSORBING_FILL).all(-1, keepdim=True)
                    expected, found = expected.masked_fill(dead, 0), found.masked_fill(dead, 0)
            except (IRError, RuntimeError, IndexError, TypeError, ValueError) as error:
                return NotEvaluated(f"at {shown(sizes)} it can't be evaluated: {error}")
            conditions.note(memory)
            wide = (found + expected).shape  # torch 2.11 compares equal shapes only
            found, expected = found.expand(wide), expected.expand(wide)
            if not torch.allclose(found, expected, rtol=0, atol=_TOLERANCE, equal_nan=True):
                return Different(f"at {shown(sizes)} it gives other probabilities")
        return None

    if (outcome := tried(_KINDS, Aims())) is not None:
        return outcome
    if constant := conditions.constant:
        aims = aims_of(region, constant)
        forms = [f"{form} {place}" for place in range(len(aims.numbers)) for form in AIMED]
        outcome = tried(forms, aims)
        if isinstance(outcome, Different):
            return outcome
    if constant := conditions.constant:
        return Unreached(f"no trial has seen both sides of %{constant[0].name}")
    return Equal()


class Unreached(NotEvaluated):
    """Equal in every trial, none of which has seen both sides of some condition."""


def _sample(value: Value, sizes: Mapping[str, int], kind: str, aims: Aims) -> Any:
    if value.data is not None:
        return value.data
    if isinstance(value.type, ScalarType):
        return sizes[value.type.name or ""]
    seed = seed_of(value, kind)
    shape = [int(substitute(dim, sizes)) for dim in value.shape]
    if value.dtype.is_complex:
        raise ValueError(f"%{value.name} is complex.")
    form, _, place = kind.rpartition(" ")
    if form in AIMED and value in aims.leaves:
        drawn = aimed(value, shape, seed, form, aims.numbers[int(place)], aims.numbers)
        return drawn.to(value.dtype)
    if value.dtype.is_floating_point:
        return torch.randn(shape, generator=seed).to(value.dtype)
    chance = {"mixed": 0.7, "sparse": 0.2, "none": 0.0, "all": 1.0}.get(kind, 0.7)
    return discrete(value, shape, seed, chance)


def _logits(
    masking: Masking, shape: Sequence[int], past: int, memory: Mapping[Value, torch.Tensor]
) -> torch.Tensor:
    """Masked random scores in float64 for at most `_ROWS` queries, broadcastable to `shape`."""
    *_, queries, keys = shape
    rows = torch.arange(queries)
    if queries > _ROWS:
        rows = torch.linspace(0, queries - 1, _ROWS).long()

    def rowwise(value: Value) -> torch.Tensor:
        data = memory[value]
        data = data.reshape([1] * (4 - data.ndim) + list(data.shape))
        for size, full in zip(data.shape, shape, strict=True):
            if size not in (1, full):
                raise ValueError(f"%{value.name} doesn't broadcast to the scores.")
        return data if data.shape[-2] == 1 else data[..., rows, :]

    seed = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 1, len(rows), keys, generator=seed, dtype=torch.float64)
    allowed = torch.ones(1, 1, len(rows), keys, dtype=torch.bool)
    if masking.bias is not None:
        logits = logits + rowwise(masking.bias).double()
    if masking.mask is not None:
        allowed = allowed & rowwise(masking.mask)
    if masking.causal:
        allowed = allowed & (torch.arange(keys) <= rows[:, None] + past)
    if masking.window:
        allowed = allowed & (torch.arange(keys) > rows[:, None] + past - masking.window)
    if masking.lengths is not None:
        allowed = allowed & (torch.arange(keys) < memory[masking.lengths].view(-1, 1, 1, 1))
    mean = masking.masked_rows == "mean"
    fill = torch.finfo(torch.float64).min if mean else -torch.inf
    return logits.masked_fill(~allowed, fill)


def _probabilities(masking: Masking, logits: torch.Tensor) -> torch.Tensor:
    """Their softmax, with what the policy gives rows of -inf."""
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    found = weights / weights.sum(-1, keepdim=True)  # NaN where every score is -inf, as softmax
    if masking.masked_rows == "zero":
        found = found.masked_fill((logits == -torch.inf).all(-1, keepdim=True), 0.0)
    return found
