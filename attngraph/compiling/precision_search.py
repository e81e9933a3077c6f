"""Half precision within the error budget: a search for the nodes that must stay in float32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from attngraph.errors import UsageError
from attngraph.export.formats import Precision
from attngraph.export.parity.budget import Parity
from attngraph.export.precision import DTYPES, Converted, Group, Plan, convert
from attngraph.export.precision.policy import KINDS
from attngraph.export.target import Target
from attngraph.ir import Graph
from attngraph.optimized import Optimized

Measure = Callable[[frozenset[Group]], Parity]


@dataclass
class Halved:
    """The model in half precision. `keep` are the groups that stay in float32, `error` by how much
    the budget was exceeded without them; `parity` is None where nothing was measured.
    """

    optimized: Optimized
    parity: Parity | None
    keep: frozenset[Group] = frozenset()
    notes: list[str] = field(default_factory=list)
    kept: list[dict[str, Any]] = field(default_factory=list)


def check_precision(precision: Precision, own: Precision, target: Target, source: str) -> None:
    """Raises UsageError if a model of precision `own` can't be compiled to another one."""
    if precision == own:
        return
    if own != "fp32":
        raise UsageError(
            f"The weights of {source} are {_name(own)}, and it is compiled as it is: leave out "
            f"--precision {precision}, or convert the module itself first."
        )
    if precision == "bf16" and target.provider == "cpu":
        raise UsageError(
            "onnxruntime's CPU provider has no bfloat16 kernels for products or attention: use "
            "--precision fp16 or fp32, or --target cuda for bf16."
        )


def in_half(
    graph: Graph,
    precision: Precision,
    target: Target,
    build: Callable[[Graph], Optimized],
    check: Callable[[Optimized], Parity] | None,
) -> Halved:
    """The float32 graph in half precision, built, and checked unless `check` is None.

    Out of budget, groups of nodes are kept in float32: the cheapest kind that is enough, in as few
    layers as are enough. If none is, the result is wholly in float32, and its parity says that it
    failed.
    """
    plan = Plan(DTYPES[precision], target.provider)
    weights: dict[Hashable, torch.Tensor] = {}

    def halved(keep: frozenset[Group]) -> tuple[Converted, Optimized]:
        converted = convert(graph, replace(plan, keep=keep), weights)
        return converted, build(converted.graph)

    converted, optimized = halved(frozenset())
    notes = list(converted.notes)
    if target.provider == "cpu":
        notes.append(
            "The CPU provider computes products in float32: weights are stored in "
            f"{_name(precision)}, and widened when a session is opened."
        )
    if check is None:
        return Halved(optimized, None, notes=notes)
    first = check(optimized)
    if first.passed:
        return Halved(optimized, first, notes=notes)

    def measure(keep: frozenset[Group]) -> Parity:
        return check(halved(keep)[1])

    keep = search(converted.halves, measure)
    optimized = halved(keep)[1]
    parity = check(optimized)
    if parity.passed:
        notes += _explained(keep, converted.halves, first, precision)
    kept = [
        {"kind": group.kind, "layer": group.layer, "nodes": converted.halves[group]}
        for group in sorted(keep)
    ]
    return Halved(optimized, parity, keep, notes, kept)


def search(halves: Counter[Group], measure: Measure) -> frozenset[Group]:
    """Groups that are enough to keep in float32; all of them where nothing less passes.

    First one kind of nodes, from the cheapest on; then several kinds, those first that help most;
    then fewer kinds; then those kinds in fewer layers.
    """
    kinds = [kind for kind in KINDS if any(group.kind == kind for group in halves)]

    def of(names: Iterable[str]) -> frozenset[Group]:
        chosen = set(names)
        return frozenset(group for group in halves if group.kind in chosen)

    def passes(keep: frozenset[Group]) -> bool:
        return measure(keep).passed

    ratios: dict[str, float] = {}
    for kind in kinds:
        parity = measure(of([kind]))
        if parity.passed:
            return _in_fewer_layers(of([kind]), passes)
        ratios[kind] = parity.worst.ratio
    ranked = sorted(kinds, key=lambda kind: ratios[kind])
    for count in range(2, len(ranked) + 1):
        chosen = ranked[:count]
        if passes(of(chosen)):
            for kind in reversed(kinds):  # the dearest first
                fewer = [other for other in chosen if other != kind]
                if len(fewer) < len(chosen) and fewer and passes(of(fewer)):
                    chosen = fewer
            return _in_fewer_layers(of(chosen), passes)
    return frozenset(halves)


def _in_fewer_layers(
    keep: frozenset[Group], passes: Callable[[frozenset[Group]], bool]
) -> frozenset[Group]:
    """Halves the layers as long as one half of them is enough."""
    layers = list(dict.fromkeys(group.layer for group in sorted(keep, key=_natural)))
    while len(layers) > 1:
        middle = len(layers) // 2
        for part in (layers[:middle], layers[middle:]):
            fewer = frozenset(group for group in keep if group.layer in part)
            if passes(fewer):
                keep, layers = fewer, part
                break
        else:
            break
    return keep


def _natural(group: Group) -> tuple[list[tuple[int, str]], str]:
    """Layer 10 after layer 9."""
    parts = [(int(p) if p.isdigit() else -1, p) for p in group.layer.split(".")]
    return parts, group.kind


def _explained(
    keep: frozenset[Group], halves: Counter[Group], first: Parity, precision: Precision
) -> list[str]:
    found = []
    for kind in KINDS:
        layers = _sorted_layers(group for group in keep if group.kind == kind)
        if not layers:
            continue
        nodes = sum(halves[group] for group in keep if group.kind == kind)
        named = [layer for layer in layers if layer]
        where = f" of {named[0]}" + (f" to {named[-1]}" if len(named) > 1 else "") if named else ""
        found.append(
            f"The {kind}{where} stay in float32 ({nodes} nodes): in {_name(precision)} the error "
            f"is {first.worst.ratio:.3g} times its budget."
        )
    return found


def _sorted_layers(groups: Iterable[Group]) -> Sequence[str]:
    return [group.layer for group in sorted(groups, key=_natural)]


def _name(precision: Precision) -> str:
    return str(DTYPES[precision]).removeprefix("torch.")
