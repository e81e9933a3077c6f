"""Weights: who reads them, and what they weigh."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from attngraph.ir import Graph, Node, TensorType, Value
from attngraph.ir.ops import attribute, named_inputs
from attngraph.ir.storage import identity_of
from attngraph.mapped import release_read


class Owners:
    """Which constants are stored for one reader only: tied weights may have two names."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._counts: dict[int, int] = {}
        for value in graph.constants.values():
            if value.data is not None and (value.uses or value in graph.outputs):
                address = identity_of(value.data)
                self._counts[address] = self._counts.get(address, 0) + 1

    def is_sole(self, value: Value) -> bool:
        """Whether the constant goes when its one reader no longer needs it."""
        if not value.is_constant or len(value.uses) != 1 or value in self._graph.outputs:
            return False
        return value.data is None or self._counts.get(identity_of(value.data), 1) == 1

    def freed(self, values: Iterable[Value | None]) -> int:
        """The bytes of those among the constants that would go."""
        distinct = dict.fromkeys(value for value in values if value is not None)
        return sum(
            weight_bytes(value.dtype, value.shape) for value in distinct if self.is_sole(value)
        )


@dataclass(frozen=True, slots=True)
class Derivation:
    """How a constant is computed from others. `compute` takes their data in the order of `sources`,
    in any one dtype.
    """

    sources: tuple[Value, ...]
    compute: Callable[[Sequence[torch.Tensor]], torch.Tensor]

    def data(self) -> torch.Tensor | None:
        """The numbers; None where a source has none."""
        given = [value.data for value in self.sources if value.data is not None]
        if len(given) < len(self.sources):
            return None
        with torch.no_grad():
            return self.compute([tensor.detach() for tensor in given])


def weight_bytes(dtype: torch.dtype, shape: Sequence[Any]) -> int:
    """The bytes of a tensor of static shape."""
    return dtype.itemsize * math.prod(int(dim) for dim in shape)


def bytes_of(graph: Graph) -> int:
    """The bytes of all constants of a graph, shared ones counted for each name."""
    kinds = [value.type for value in graph.constants.values()]
    return sum(weight_bytes(k.dtype, k.shape) for k in kinds if isinstance(k, TensorType))


def is_known(value: Value | None) -> TypeGuard[Value]:
    """Whether the value is a floating-point constant whose numbers are at hand."""
    if value is None or not isinstance(value.type, TensorType) or value.data is None:
        return False
    return value.is_constant and value.dtype.is_floating_point and not value.data.is_meta


def is_weight(value: Value) -> bool:
    """Whether the value is a floating-point constant of one dim or more."""
    return value.is_constant and bool(value.shape) and value.dtype.is_floating_point


def weights_of(norm: Node) -> dict[str, Value | None] | None:
    """A norm's weight and bias (H,), by name, of those that its op takes; None where it is of more
    than the last axis.
    """
    if norm.op == "aten.layer_norm" and len(attribute(norm, "normalized_shape")) != 1:
        return None
    return {n: value for n, value in named_inputs(norm).items() if n in ("weight", "bias")}


def wide(value: Value) -> torch.Tensor:
    """A constant's numbers in float64. The value must be known."""
    assert value.data is not None
    found = value.data.detach().double()
    release_read(value.data)
    return found


def derived(value: Value, suffix: str) -> str:
    """A name for what is computed from a constant; computed twice, it keeps one suffix."""
    return f"{value.name.removesuffix(suffix)}{suffix}"


def is_power_of_two(numbers: torch.Tensor) -> bool:
    """Whether multiplying by each of the numbers only moves an exponent."""
    mantissa, _ = torch.frexp(numbers)
    return bool((mantissa.abs() == 0.5).all())


def keeps_digits(numbers: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the numbers of a new weight (N, K, …) or bias (N), in float64, stay what they are in
    a dtype, but for its rounding.

    None may overflow. Below the least normal number there are fewer digits the smaller it is. Next
    to larger ones in the same row and the same column that is within rounding, so each of these
    must reach it, or be 0, or no half be rounded at all: in wider dtypes such numbers may count as
    0. A bias is added to a sum, which has no more digits there than it has.
    """
    if not numbers.numel():
        return True
    limits, cells = torch.finfo(dtype), numbers.abs()
    if numbers.dim() < 2:
        return not bool((cells > limits.max).any())
    cells = cells.flatten(2).amax(2) if cells.dim() > 2 else cells
    largest = torch.cat([cells.amax(0), cells.amax(1)])
    if bool((largest > limits.max).any()):
        return False
    if not bool(((largest > 0) & (largest < limits.tiny)).any()):
        return True
    return dtype == torch.float16 and torch.equal(numbers.to(dtype).double(), numbers)
