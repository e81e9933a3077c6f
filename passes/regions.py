"""Regions of a graph, evaluated in float64.

Weights have their real values, but are never multiplied at full size: the activations that meet a
large weight are zero in most places, and only the weight's rows that matter are read.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from attngraph.errors import IRError
from attngraph.ir import Node, ScalarType, Value
from attngraph.ir.dims import substitute
from attngraph.ir.ops import evaluate
from attngraph.passes.axes import COPIES, LAYOUTS, RESHAPES
from attngraph.passes.cse import hashable
from attngraph.passes.sparse_products import PRODUCTS, only_needed
from attngraph.passes.trials import sample
from attngraph.passes.weights import Derivation

_HEAVY = 1 << 16  # elements of a constant that stays as it is stored
_VIEWS = RESHAPES | LAYOUTS | COPIES


@dataclass(frozen=True, slots=True)
class Region:
    """The leaves and nodes of both forms, inputs first; `special` leaves may hold -inf.

    `known` are the leaves of the old form, which may be drawn. `derived` says of new constants what
    they are made of, `unrounded` what they were before they were rounded to their dtype.
    """

    leaves: Sequence[Value]
    nodes: Sequence[Node]
    special: frozenset[Value] = frozenset()
    known: frozenset[Value] = frozenset()
    derived: Mapping[Value, Derivation] = field(default_factory=dict)
    unrounded: Mapping[Value, torch.Tensor] = field(default_factory=dict)

    def key(self, roots: Sequence[Value]) -> Hashable:
        """Equal for regions that differ in names and in the data of weights only."""
        number: dict[Value, int] = {}
        head = []
        for value in self.leaves:
            number[value] = len(number)
            made = self.derived.get(value)
            sources = tuple(number.get(source, -1) for source in made.sources) if made else ()
            head.append((value.type, value in self.special, _identity(value), sources))
        body = []
        for node in self.nodes:
            inputs = tuple(None if value is None else number[value] for value in node.inputs)
            body.append((node.op, inputs, hashable(node.attrs)))
            for value in node.outputs:
                number.setdefault(value, len(number))
        return tuple(head), tuple(body), tuple(number[value] for value in roots)

    def unknown(self) -> Value | None:
        """A constant of the new form alone that has no data and isn't made of what has a value."""
        for value in self.leaves:
            if value in self.known or not value.is_constant or has_data(value):
                continue
            made = self.derived.get(value)
            if made is None or not self.known.issuperset(made.sources):
                return value
        return None

    def fixed(self) -> dict[Value, Any]:
        """What doesn't change between trials: constants, and large ones laid out anew.

        Large ones keep the dtype in which they are stored, so most take no memory.
        """
        memory: dict[Value, Any] = {}
        heavy: set[Value] = set()
        for value in self.leaves:
            data = self.unrounded.get(value, value.data)
            if data is not None and not data.is_meta:
                is_heavy = data.numel() > _HEAVY
                memory[value] = data.detach() if is_heavy else widened(data.detach())
                heavy |= {value} if is_heavy else set()
        for node in self.nodes:
            if node.op in _VIEWS and node.inputs and all(value in heavy for value in node.inputs):
                try:
                    results = evaluate(node, [memory[v] for v in node.inputs if v], {})
                except (IRError, RuntimeError, IndexError, TypeError, ValueError):
                    continue
                memory.update(zip(node.outputs, results, strict=True))
                heavy.update(node.outputs)
        return memory

    def elements(self, sizes: Mapping[str, int], fixed: Mapping[Value, Any]) -> int:
        """The largest tensor that a trial would compute."""
        made = [value for node in self.nodes for value in node.outputs if value not in fixed]
        shapes = [value.tensor_type for value in made if not isinstance(value.type, ScalarType)]
        return max((int(substitute(shape.numel, sizes)) for shape in shapes), default=0)

    def run(
        self, sizes: Mapping[str, int], kind: str, fixed: Mapping[Value, Any]
    ) -> dict[Value, Any]:
        """Every value that can be computed in one trial."""
        known = dict(sizes)
        memory: dict[Value, Any] = dict(fixed)
        sparse = any(is_heavy(tensor) for tensor in fixed.values())
        drawn = [value for value in self.leaves if value not in memory]
        for value in drawn:
            if value in self.known or value not in self.derived:
                try:
                    special = value in self.special
                    memory[value] = sample(value, known, kind, may_mask=special, sparse=sparse)
                except (IRError, KeyError, RuntimeError, TypeError, ValueError):
                    return {}
        for value in drawn:
            if value not in memory:
                made_of = self.derived[value]
                memory[value] = made_of.compute([widened(memory[v]) for v in made_of.sources])
        for node in self.nodes:
            made = [value for value in node.outputs if value not in memory]
            if not made or any(value is not None and value not in memory for value in node.inputs):
                continue
            inputs = [None if value is None else memory[value] for value in node.inputs]
            if node.op in PRODUCTS:
                inputs = only_needed(node, inputs)
            try:
                with torch.no_grad():
                    results = evaluate(wide_node(node), list(map(widened, inputs)), known)
            except Exception:
                continue  # operators raise what they like; the caller sees that the value lacks
            results_of = zip(node.outputs, results, strict=True)
            memory.update((value, result) for value, result in results_of if value in made)
        return memory


def has_data(value: Value) -> bool:
    return value.data is not None and not value.data.is_meta


def is_heavy(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.numel() > _HEAVY


def _identity(value: Value) -> Hashable:
    """The data of weights is no part of what a region is; a small constant's is."""
    data = value.data
    if data is None or data.is_meta or data.numel() > 16:
        return None
    return str(data.flatten().tolist())


class _Wide:
    """A node whose dtype attributes ask for float64 where the original's ask for less."""

    def __init__(self, node: Node, attrs: Mapping[str, Any]) -> None:
        self.op, self.attrs = node.op, attrs


def wide_node(node: Node) -> Any:
    """The node to evaluate on float64 in its place."""
    if not any(isinstance(value, torch.dtype) for value in node.attrs.values()):
        return node
    return _Wide(node, {name: _wide(value) for name, value in node.attrs.items()})


def _wide(value: Any) -> Any:
    if isinstance(value, torch.dtype) and value.is_complex:
        return torch.complex128
    is_narrow = isinstance(value, torch.dtype) and value.is_floating_point
    return torch.float64 if is_narrow else value


def widened(value: Any) -> Any:
    """A tensor of floats in float64; anything else as it is."""
    return value.to(_wide(value.dtype)) if isinstance(value, torch.Tensor) else value
