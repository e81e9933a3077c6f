"""What stands between an expert's two products, read by its values.

Between them all is pointwise, or takes apart the features of a product. So it is evaluated on rows
of random features, and is the activation that gives the same numbers. Where it switches, as a clamp
does, some of these lie on each side of where it does; what none reaches isn't read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from attngraph.analysis.experts.products import Product
from attngraph.analysis.values.scalars import keeps_values
from attngraph.analysis.values.widening import wide_node
from attngraph.dialect.experts import ACTIVATIONS, GATED, activated
from attngraph.errors import IRError
from attngraph.ir import Node, Value
from attngraph.ir.ops import attribute, evaluate
from attngraph.ir.traits import (
    ACTIVATION,
    ARITHMETIC,
    CAST,
    CLAMP,
    EXPONENTIAL,
    LAYOUT,
    PART,
    POWER,
    RESHAPE,
    SLICE,
    WAVE,
)

_LEAST_ROWS = 24
_FEATURES = 1 << 12  # random ones of each product
_CLOSE = 1e-9
_MOST_NUMBERS = 6
_FAR = 1e3
_BEYOND = 10.0  # how far the largest features are above the largest number
_SMOOTH = (
    ARITHMETIC | POWER | EXPONENTIAL | WAVE
    | ACTIVATION | CAST
)  # fmt: skip
_SIDES = 4  # elements that are to lie on either side of a switch, and between two


@dataclass(frozen=True, slots=True)
class Activation:
    """One of `ACTIVATIONS` with its numbers, and the order in which it takes features.

    `order` are the places, among the features of the products one after the other, of what is to be
    the first feature, the second, and so on.
    """

    kind: str
    order: str
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None

    def places(self, width: int) -> list[int]:
        """The order as places, of `width` features of all products together."""
        halves = [list(range(width // 2)), list(range(width // 2, width))]
        pairs = [list(range(0, width, 2)), list(range(1, width, 2))]
        match self.order:
            case "halves":
                gate, linear = halves
            case "swapped halves":
                linear, gate = halves
            case "pairs":
                gate, linear = pairs
            case "swapped pairs":
                linear, gate = pairs
            case _:
                return list(range(width))
        return [place for both in zip(gate, linear, strict=True) for place in both]


_ORDERS = ("halves", "swapped halves", "pairs", "swapped pairs")


def read_activation(
    products: Sequence[Product], hidden: Value, first: Activation | None = None
) -> Activation | None:
    """What makes `hidden` of the results of an expert's first products; None if no known one, or if
    not the `first`.
    """
    given, made, numbers = _drawn(products, hidden, _FAR)
    if made is not None and any(abs(number) > _FAR / _BEYOND for number in numbers):
        given, made, numbers = _drawn(products, hidden, max(map(abs, numbers)) * _BEYOND)
    if made is None:
        return None
    guesses = _guesses(list(numbers)[:_MOST_NUMBERS]) if first is None else [first]
    for guess in guesses:
        if guess.kind == GATED and given.shape[1] % 2:
            continue
        taken = given[:, guess.places(given.shape[1])]
        expected = activated(taken, guess.kind, guess.alpha, guess.beta, guess.limit)
        if expected.shape == made.shape and torch.allclose(expected, made, _CLOSE, _CLOSE):
            return guess
    return None


def _drawn(
    products: Sequence[Product], hidden: Value, far: float
) -> tuple[torch.Tensor, torch.Tensor | None, dict[float, None]]:
    """Features, half of them within a few units and others of all magnitudes up to `far`; what they
    become, if nothing in between is missed by them; and the numbers that occur there.
    """
    seed = torch.Generator().manual_seed(0)
    features = []
    for product in products:
        shape = max(_LEAST_ROWS, _FEATURES // product.width), product.width
        near = torch.randn(shape, generator=seed, dtype=torch.float64) * 3
        exponent = torch.rand(shape, generator=seed, dtype=torch.float64) * math.log(far * 1e3)
        wide = near.sign() * exponent.exp() * 1e-3
        features.append(torch.where(torch.rand(shape, generator=seed) < 0.5, near, wide))
    known = {product.result: data for product, data in zip(products, features, strict=True)}
    numbers: dict[float, None] = {}
    found = _evaluated(hidden, known, numbers)
    given = torch.cat(features, 1)
    return given, None if found is None else found.reshape(len(given), -1), numbers


def _guesses(numbers: Sequence[float]) -> Iterator[Activation]:
    for kind in ACTIVATIONS:
        if kind != GATED:
            yield Activation(kind, "as they are")
    limits = [None, *(number for number in numbers if number > 0)]
    for order, alpha, beta, limit in itertools.product(
        _ORDERS, (1.0, *numbers), (0.0, *numbers), limits
    ):
        yield Activation(GATED, order, alpha, beta, limit)


def _evaluated(
    value: Value, known: dict[Value, torch.Tensor], numbers: dict[float, None]
) -> torch.Tensor | None:
    """The value for rows of features (R, …) in the place of whatever rows there are."""
    if value in known:
        return known[value]
    if value.is_constant and value.data is not None and value.data.numel() == 1:
        number = value.data.detach().double().reshape(())
        numbers[float(number)] = None
        return number
    node = value.producer
    if node is None:
        return None
    if node.op in LAYOUT:
        source = node.inputs[0]
        above = None if source is None else _evaluated(source, known, numbers)
        return None if source is None or above is None else _laid_out(node, value, source, above)
    if node.op not in _SMOOTH | CLAMP and node.op != "aten.glu":
        return None
    if node.op in CAST and not _holds(node.output.dtype, known):
        return None
    for attr in node.attrs.values():
        if isinstance(attr, (int, float)) and not isinstance(attr, bool):
            numbers[float(attr)] = None
    inputs = [None if side is None else _evaluated(side, known, numbers) for side in node.inputs]
    if any(
        side is not None and data is None for side, data in zip(node.inputs, inputs, strict=True)
    ):
        return None
    try:
        (result,) = evaluate(wide_node(node), inputs, {})
        if not _sees_both_sides(node, inputs[0]):
            return None
    except (IRError, RuntimeError, TypeError, ValueError):
        return None
    known[value] = result
    return result if isinstance(result, torch.Tensor) else None


def _holds(dtype: torch.dtype, products: Iterable[Value]) -> bool:
    """Whether a dtype holds what the products' dtype does."""
    others = [value.dtype for value in products if not value.is_constant]
    return dtype.is_floating_point and all(keeps_values(other, dtype) for other in others)


def _sees_both_sides(node: Node, data: torch.Tensor | None) -> bool:
    """Whether some elements are on each side of all places at which a node switches."""
    ends: list[object] = [0.0] if node.op == "aten.relu" else []
    if node.op in CLAMP:
        if any(value is not None for value in node.inputs[1:]):
            return False
        ends = [node.attrs.get(name) for name in ("min", "max")]
    numbers = sorted(float(end) for end in ends if isinstance(end, (int, float)))
    if node.op in CLAMP and (not numbers or len(numbers) != sum(end is not None for end in ends)):
        return False
    if not numbers:
        return True
    assert data is not None
    bounds = torch.tensor(numbers, dtype=torch.float64)
    place = torch.bucketize(data.contiguous(), bounds).flatten()
    return int(place.bincount(minlength=len(numbers) + 1).min()) >= _SIDES


def _laid_out(node: Node, value: Value, source: Value, above: torch.Tensor) -> torch.Tensor | None:
    """A layout op on the features (R, F…) of rows; rows themselves go anywhere."""
    rank = above.dim() - 1
    if node.op in PART:
        dim = attribute(node, "dim") % len(source.shape) - len(source.shape)
        if dim >= -rank:
            return _part(node, value, above, dim)
        return None
    if node.op in RESHAPE:
        count = above[0].numel()
        trailing: list[int] = []
        for size in reversed(value.shape):
            if math.prod(trailing) == count:
                break
            if not isinstance(size, int):
                return None
            trailing.insert(0, size)
        if math.prod(trailing) != count:
            return None
        return above.reshape(len(above), *trailing)
    if len(source.shape) >= rank and value.shape[-rank:] == above.shape[1:]:
        return above  # the features are where they were, or else no guess is equal
    return None


def _part(node: Node, value: Value, above: torch.Tensor, dim: int) -> torch.Tensor | None:
    attrs: Mapping[str, object] = {**node.attrs, "dim": dim}
    place = node.outputs.index(value)
    if node.op in SLICE and not all(
        isinstance(attrs.get(name, 0) or 0, int) for name in ("start", "end", "step", "length")
    ):
        return None
    moved = _WithAttrs(node.op, attrs)
    try:
        results = evaluate(moved, [above], {})  # type: ignore[arg-type]
    except (IRError, RuntimeError, TypeError, ValueError):
        return None
    return results[place] if place < len(results) else None


@dataclass(frozen=True, slots=True)
class _WithAttrs:
    op: str
    attrs: Mapping[str, object]
