"""The conditions that a region depends on, and whether trials have seen both of their sides.

A condition is a bool that is computed from numbers: a comparison, a membership, a cast. Where it
depends on what is drawn, or on sizes that a trial has chosen, trials that leave it constant say
nothing of the other side. Guards against what arithmetic may give (NaN, infinity) aren't meant:
their other side may be out of reach of every input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attngraph.ir import Node, ScalarType, Value
from attngraph.ir.dims import symbols_of
from attngraph.ir.traits import (
    ATTENTION,
    COMPARISON,
    EXPONENTIAL,
    FLOAT_TEST,
    LOG_SUM,
    MAXIMUM_ALONG,
    PRODUCT,
    SOFTMAX,
)
from attngraph.passes.rewriting.regions import Region
from attngraph.passes.rewriting.trials import Aims

_COMPUTED = SOFTMAX | EXPONENTIAL | MAXIMUM_ALONG | LOG_SUM | PRODUCT | ATTENTION
_LARGEST = 64  # elements of a constant whose integers are worth trying
_MOST_AIMS = 8


class Conditions:
    """The conditions of one region, and what was seen of them."""

    def __init__(self, region: Region) -> None:
        self._seen: dict[Value, set[bool]] = {}
        changing = _changing(region)
        computed: set[Value] = set()
        for node in region.nodes:
            given = node.operands
            if node.op in _COMPUTED or not computed.isdisjoint(given):
                computed.update(node.outputs)
            if changing.isdisjoint(given) or not _is_condition(node):
                continue
            if node.op in FLOAT_TEST or _compares_itself(node):
                continue
            if computed.isdisjoint(given):
                self._seen[node.output] = set()

    def note(self, memory: Mapping[Value, Any]) -> None:
        """Takes down what a trial made of them."""
        for value, seen in self._seen.items():
            found = memory.get(value)
            if isinstance(found, torch.Tensor) and found.numel() and len(seen) < 2:
                if bool(found.any()):
                    seen.add(True)
                if not bool(found.all()):
                    seen.add(False)

    @property
    def constant(self) -> list[Value]:
        """The conditions of which one side was not seen."""
        return [value for value, seen in self._seen.items() if len(seen) < 2]


def _is_condition(node: Node) -> bool:
    if len(node.outputs) != 1 or isinstance(node.outputs[0].type, ScalarType):
        return False
    given = [v for v in node.operands if not isinstance(v.type, ScalarType)]
    return node.output.dtype == torch.bool and any(v.dtype != torch.bool for v in given)


def _compares_itself(node: Node) -> bool:
    if node.op not in COMPARISON:
        return False
    if len(node.inputs) == 2:
        return node.inputs[0] is node.inputs[1]
    other = node.attrs.get("other")
    return isinstance(other, float) and not abs(other) < float("inf")


def _changing(region: Region) -> set[Value]:
    """What differs between trials, or would at other sizes."""
    changing = {v for v in region.leaves if not v.is_constant or v.data is None or region.cuts(v)}
    for node in region.nodes:
        attrs = node.attrs if region.general is None else region.general.attrs.get(node, node.attrs)
        counts = node.op.startswith("aten.arange") and bool(symbols_of(list(attrs.values())))
        if counts or any(value in changing for value in node.inputs):
            changing.update(node.outputs)
    return changing


def aims_of(region: Region, conditions: Sequence[Value]) -> Aims:
    """What decides these conditions: numbers that are compared, or added on the way, and leaves."""
    found: dict[float, None] = {}
    deciding = set(conditions)
    for node in reversed(region.nodes):
        if deciding.isdisjoint(node.outputs):
            continue
        deciding.update(node.operands)
        numbers = [number for number in node.attrs.values() if isinstance(number, (int, float))]
        if node.op.startswith("aten.isin") or node.op in COMPARISON:
            for value in node.inputs:
                if value is not None and value.data is not None and not value.data.is_meta:
                    numbers += _numbers(value.data)
        elif not node.op.endswith(".Scalar") and not node.op.startswith("aten.clamp"):
            continue
        found.update(
            (float(number), None)
            for number in numbers
            if not isinstance(number, bool) and abs(number) < 2**31
        )
    return Aims(tuple(found)[:_MOST_AIMS], frozenset(region.leaves) & deciding)


def _numbers(data: torch.Tensor) -> list[float]:
    if data.numel() > _LARGEST or data.dtype == torch.bool or data.is_complex():
        return []
    return [number for number in data.flatten().tolist() if abs(number) < float("inf")]
