"""Weights: who reads them, what they weigh, and whether new ones do the work of the old."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from attngraph.errors import IRError
from attngraph.ir import DimInfo, Graph, Node, ScalarType, TensorType, Value
from attngraph.ir.dims import substitute
from attngraph.ir.ops import evaluate
from attngraph.passes.cse import hashable
from attngraph.passes.trials import backward_slice, trial_sizes

_TOLERANCE = 1e-9  # of float64 against itself, in another order
_MOST_ELEMENTS = 1 << 24


class Owners:
    """Which constants are stored for one reader only: tied weights may have two names."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._counts: dict[int, int] = {}
        for value in graph.constants.values():
            if value.data is not None and (value.uses or value in graph.outputs):
                address = _address(value.data)
                self._counts[address] = self._counts.get(address, 0) + 1

    def is_sole(self, value: Value) -> bool:
        """Whether the constant goes when its one reader no longer needs it."""
        if not value.is_constant or len(value.uses) != 1 or value in self._graph.outputs:
            return False
        return value.data is None or self._counts.get(_address(value.data), 1) == 1

    def freed(self, values: Iterable[Value | None]) -> int:
        """The bytes of those among the constants that would go."""
        distinct = dict.fromkeys(value for value in values if value is not None)
        return sum(
            weight_bytes(value.dtype, value.shape) for value in distinct if self.is_sole(value)
        )


def _address(data: torch.Tensor) -> int:
    return id(data) if data.is_meta else data.data_ptr()


def weight_bytes(dtype: torch.dtype, shape: Sequence[Any]) -> int:
    """The bytes of a tensor of static shape."""
    return dtype.itemsize * math.prod(int(dim) for dim in shape)


def is_known(value: Value | None) -> bool:
    """Whether the value is a floating-point constant whose numbers are at hand."""
    if value is None or not isinstance(value.type, TensorType) or value.data is None:
        return False
    return value.is_constant and value.dtype.is_floating_point and not value.data.is_meta


def wide(value: Value) -> torch.Tensor:
    """A constant's numbers in float64. The value must be known."""
    assert value.data is not None
    return value.data.detach().double()


def derived(value: Value, suffix: str) -> str:
    """A name for what is computed from a constant; computed twice, it keeps one suffix."""
    return f"{value.name.removesuffix(suffix)}{suffix}"


def discard(graph: Graph, values: Iterable[Value | None]) -> None:
    """Erases the constants that nobody reads any more, and lets go of their memory."""
    for value in dict.fromkeys(values):
        if value is None or value.name not in graph.constants:
            continue
        if not value.uses and value not in graph.outputs:
            graph.erase_constant(value)
            value.data = None  # erased nodes still refer to it until they are collected


def is_power_of_two(numbers: torch.Tensor) -> bool:
    """Whether multiplying by each of the numbers only moves an exponent."""
    mantissa, _ = torch.frexp(numbers)
    return bool((mantissa.abs() == 0.5).all())


@dataclass
class WeightEvidence:
    """Evaluates a value in float64 on random activations, before and after weights are replaced.

    Equal regions (the layers of a model) are evaluated once.
    """

    dims: Mapping[str, DimInfo]
    _known: set[Hashable] = field(default_factory=set)

    def results(
        self, root: Value, source: Value, exact: Mapping[Value, torch.Tensor] | None = None
    ) -> dict[int, torch.Tensor]:
        """`root` as a function of `source`, by trial size; not where that is large or rejected.

        `exact` gives constants before they were rounded to their dtype.
        """
        leaves, nodes = backward_slice([root], lambda value: value is source)
        found = {}
        for trial, sizes in enumerate(trial_sizes(self.dims)):
            if _most_elements(nodes, sizes) > _MOST_ELEMENTS:
                continue
            memory = {leaf: _leaf(leaf, sizes, exact or {}) for leaf in leaves}
            try:
                with torch.no_grad():
                    for node in nodes:
                        inputs = [None if value is None else memory[value] for value in node.inputs]
                        memory.update(zip(node.outputs, evaluate(node, inputs, sizes), strict=True))
            except (IRError, RuntimeError):
                continue  # the model takes no input of this size
            found[trial] = memory[root]
        return found

    def is_known(self, key: Hashable) -> bool:
        """Whether a region with this key was evaluated before; from now on it was."""
        known = key in self._known
        self._known.add(key)
        return known


def region_key(root: Value, source: Value) -> Hashable:
    """Equal for regions of equal ops, attributes and types; the weights' numbers don't count."""
    leaves, nodes = backward_slice([root], lambda value: value is source)
    number = {leaf: index for index, leaf in enumerate(leaves)}
    body: list[Hashable] = []
    for node in nodes:
        body.append((node.op, tuple(number.get(v, -1) for v in node.inputs if v is not None)))
        body.append((hashable(node.attrs), tuple(value.type for value in node.outputs)))
        for value in node.outputs:
            number[value] = len(number)
    return tuple(leaf.type for leaf in leaves), tuple(body), root.index


def agree(before: Mapping[int, torch.Tensor], after: Mapping[int, torch.Tensor]) -> bool:
    """Whether there are float64 results, and all are equal but for the order of their sums."""
    if not before or before.keys() != after.keys():
        return False
    for trial, old in before.items():
        new = after[trial]
        scale = float(old.abs().max()) if old.numel() else 0.0
        if old.shape != new.shape or not torch.allclose(new, old, rtol=0, atol=_TOLERANCE * scale):
            return False
    return True


def _most_elements(nodes: Sequence[Node], sizes: Mapping[str, int]) -> int:
    shapes = [v.tensor_type.numel for node in nodes for v in node.outputs]
    return max((int(substitute(numel, sizes)) for numel in shapes), default=0)


def _leaf(value: Value, sizes: Mapping[str, int], exact: Mapping[Value, torch.Tensor]) -> Any:
    if value in exact:
        return exact[value]
    if value.data is not None:
        return wide(value) if value.dtype.is_floating_point else value.data
    if isinstance(value.type, ScalarType):
        return sizes[value.type.name or ""]
    seed = torch.Generator().manual_seed(0)
    shape = [int(substitute(dim, sizes)) for dim in value.shape]
    return torch.randn(shape, generator=seed, dtype=torch.float64)
