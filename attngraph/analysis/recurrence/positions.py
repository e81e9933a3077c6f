"""Which numbers may be computed from positions in a formula that is the same at every length.

Trials at some lengths say nothing of a window of 1000 tokens, and a soft window is one too:
e^(i − j − 1000) is analytic. So numbers that stand beside an unknown number of tokens are of a few
kinds, which are closed under what may be done with them:

- PLACE: positions and their differences, give or take one; comparisons of these are
- GATE: 0, 1 or an infinite fill, by which place comes first and no distance between them;
- SCALED: a number times a place, such as the logarithm of a decay to a power; its sign still says
  which place comes first;
- LINEAR: sums of these and of numbers, whose sign doesn't: (i − j) / 1000 − 1 is below 0 within a
  window, so that nothing may be cut, compared or mirrored at 0;
- GEOMETRIC: e to the power of a linear number, which no sum of others hides at a few places;
- NUMBERS: of no place.

Sums of geometric numbers, quotients by them plus one, polynomials and roundings are of none.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from attngraph.analysis.values.running import run_nodes
from attngraph.analysis.values.widening import widened
from attngraph.ir import Node, TensorType, Value
from attngraph.ir.dims import CHOOSING, DIVIDING, functions_of
from attngraph.ir.traits import (
    ADDITIVE,
    CAST,
    CHOICE,
    CLAMP,
    COMPARISON,
    EXPONENTIAL,
    FILL,
    JOIN,
    LAYOUT,
    LOGICAL,
    MAGNITUDE,
    MATMUL,
    MULTIPLICATIVE,
    NEGATION,
    PAD,
    PART,
    POWER,
    RANGE,
    REVERSED,
    RUNNING_SUM,
    SCALE,
    SHIFT,
    TRIANGLE,
)

_ENDLESS = 1e9  # from here on a fill is as good as infinite: no linear number comes up to it
_SEEN = 1e-4, 1e4  # a factor or summand in this range shows in a trial in float64
_MOST = 1 << 16  # elements of numbers that are looked at


class Kind(enum.Enum):
    """What an element is, as a function of its place."""

    NUMBERS = "numbers"
    PLACE = "place"
    SCALED = "scaled"
    LINEAR = "linear"
    GATE = "gate"
    GEOMETRIC = "geometric"


_LINEARS = {Kind.PLACE, Kind.SCALED, Kind.LINEAR}
_SUMS = {
    (Kind.PLACE, Kind.PLACE): Kind.PLACE,
    (Kind.PLACE, Kind.SCALED): Kind.LINEAR,
    (Kind.SCALED, Kind.SCALED): Kind.LINEAR,
    (Kind.SCALED, Kind.LINEAR): Kind.LINEAR,
    (Kind.SCALED, Kind.GATE): Kind.LINEAR,
    (Kind.PLACE, Kind.LINEAR): Kind.LINEAR,
    (Kind.PLACE, Kind.GATE): Kind.LINEAR,
    (Kind.LINEAR, Kind.LINEAR): Kind.LINEAR,
    (Kind.LINEAR, Kind.GATE): Kind.LINEAR,
    (Kind.GATE, Kind.GATE): Kind.GATE,
}
_PRODUCTS = {
    (Kind.PLACE, Kind.GATE): Kind.SCALED,
    (Kind.SCALED, Kind.GATE): Kind.SCALED,
    (Kind.LINEAR, Kind.GATE): Kind.LINEAR,
    (Kind.GATE, Kind.GATE): Kind.GATE,
    (Kind.GATE, Kind.GEOMETRIC): Kind.GEOMETRIC,
    (Kind.GEOMETRIC, Kind.GEOMETRIC): Kind.GEOMETRIC,
}


@dataclass(frozen=True)
class Part:
    """An operand: `numbers` are those of kind NUMBERS, None where they aren't known."""

    kind: Kind
    numbers: Any = None

    def all(self, holds: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Whether something holds for each of its numbers."""
        if self.numbers is None:
            return False
        if isinstance(self.numbers, sympy.Basic):
            return are_near(self.numbers)
        return bool(holds(torch.as_tensor(self.numbers, dtype=torch.float64)).all())

    def is_near(self) -> bool:
        return self.all(_is_near)

    def are(self, size: int) -> bool:
        """Whether each of its numbers has that magnitude, which no open size is known to have."""
        is_open = isinstance(self.numbers, sympy.Basic)
        return not is_open and self.all(lambda x: x.abs() == size)


def _is_near(x: torch.Tensor) -> torch.Tensor:
    return x.abs() <= 1


def _is_filled(x: torch.Tensor) -> torch.Tensor:
    """Of a gate: near numbers and infinite fills."""
    return ((x.abs() <= 1) & _is_visible(x)) | (x.abs() >= _ENDLESS)


def _is_visible(x: torch.Tensor) -> torch.Tensor:
    return (x == 0) | ((x.abs() >= _SEEN[0]) & (x.abs() <= _SEEN[1]))


def are_near(*sizes: object) -> bool:
    """Whether numbers and expressions of sizes name no place but the first and the last.

    Expressions that divide may hold numbers up to the divisor: trials go around these.
    """
    return all(map(_is_near_size, sizes))


def _is_near_size(size: object) -> bool:
    if isinstance(size, (list, tuple)):
        return are_near(*size)
    if isinstance(size, (int, float)):
        return abs(size) <= 1
    if not isinstance(size, sympy.Basic):
        return True
    if functions_of(size) & CHOOSING:
        return False
    divisors = [1]
    for part in sympy.preorder_traversal(size):
        if part.func.__name__ in DIVIDING:
            divisors += [int(arg) for arg in part.args[1:] if arg.is_Integer]
        elif isinstance(part, sympy.Rational):
            divisors.append(int(part.q))
    return all(abs(int(n)) <= max(divisors) for n in size.atoms(sympy.Integer))


@dataclass
class Positions:
    """The kinds of a region's values that no operand reaches; `take` asks node by node.

    `tables` are constants of which each entry is known to be a power of a decay, as far as the
    model's length goes.
    """

    parts: dict[Value, Part] = field(default_factory=dict)
    tables: Collection[Value] = ()

    def constant(self, leaf: Value) -> None:
        data = leaf.data
        if data is None or data.is_meta or data.numel() > _MOST:
            self.parts[leaf] = Part(Kind.NUMBERS)
        else:
            self.parts[leaf] = Part(Kind.NUMBERS, widened(data.detach()))

    def numbers(self, node: Node) -> None:
        """A node beside which no number of tokens stands: it gives numbers, whatever it does."""
        given = [None if value is None else self.parts[value].numbers for value in node.inputs]
        results: Sequence[Any] = [None] * len(node.outputs)
        if node.op in FILL:
            results = [_filled_with(node)]
        elif node.op in LAYOUT:
            results = [given[0]] * len(node.outputs)
        elif _is_small(node):
            known = {v: x for v, x in zip(node.inputs, given, strict=True) if v and x is not None}
            made = run_nodes([node], known, {})
            results = results if made is None else [made[value] for value in node.outputs]
        for value, x in zip(node.outputs, results, strict=True):
            is_read = not isinstance(x, torch.Tensor) or not x.is_complex()
            self.parts[value] = Part(Kind.NUMBERS, x if is_read else None)

    def take(self, node: Node) -> bool:
        """Whether a node among the tokens gives numbers of a kind, which its outputs then have."""
        part = self._part(node)
        if part is None or (part.kind in (Kind.PLACE, Kind.LINEAR) and _rounds(node)):
            return False
        self.parts.update(dict.fromkeys(node.outputs, part))
        return True

    def admits(self, node: Node) -> bool:
        """Whether a node may bring numbers together with operands."""
        fixed = [self.parts[v] for v in node.inputs if v is not None and v in self.parts]
        beside = {part.kind for part in fixed} - {Kind.NUMBERS, Kind.GATE}
        if node.op in ADDITIVE | SHIFT | REVERSED | MULTIPLICATIVE | SCALE:
            numbers = [part for part in fixed if is_one_number(part.numbers)]
            numbers += _given(node, "other", "alpha")
            if not all(part.all(_is_visible) for part in numbers):
                return False
        if node.op in ADDITIVE | REVERSED:
            return beside <= _LINEARS
        if node.op in CHOICE:
            branches = [self.parts[v] for v in _branches(node) if v in self.parts]
            branches += _given(node, "value", "self", "other")
            return not beside and all(
                each.kind is Kind.NUMBERS and each.all(_is_visible_fill) for each in branches
            )
        return beside <= ({Kind.GEOMETRIC} if node.op in MULTIPLICATIVE | MATMUL else set())

    def _part(self, node: Node) -> Part | None:
        given = [self.parts[value] for value in node.inputs if value is not None]
        kinds = [part.kind for part in given]
        op = node.op
        if op in RANGE:
            return Part(Kind.PLACE) if _is_plain_range(node) else None
        if op in FILL:
            return Part(Kind.NUMBERS, _filled_with(node))
        if op in PART and kinds == [Kind.NUMBERS] and _cuts_to_length(node):
            return self._cut(node, given[0])
        if op in LAYOUT | NEGATION:
            return given[0]
        if op in TRIANGLE:
            return _halved(given[0])
        if op in MAGNITUDE:
            return None if kinds[0] in (Kind.NUMBERS, Kind.LINEAR) else given[0]
        if op in JOIN | PAD:
            given += _given(node, "value")
            near = all(part.kind is not Kind.NUMBERS or part.is_near() for part in given)
            varied = set(kinds) - {Kind.NUMBERS}
            return Part(*varied) if near and len(varied) == 1 else None
        if op in CAST:
            return given[0] if _keeps(node, kinds[0]) else None
        if op in COMPARISON:
            return self._compared([*given, *_given(node, "other")])
        if op in LOGICAL:
            return Part(Kind.GATE) if set(kinds) <= {Kind.GATE} and not node.attrs else None
        if op in CLAMP:
            return _clamped(given[0], _given(node, "min", "max"), len(given))
        if op in CHOICE:
            return self._chosen(node)
        if op in ADDITIVE | SHIFT | REVERSED:
            both = [*given, *_given(node, "other")]
            alpha = node.attrs.get("alpha", 1)
            return _combined(both, _SUMS, _shifted) if alpha in (1, -1) else None
        if op in MULTIPLICATIVE | SCALE:
            return _multiplied([*given, *_given(node, "other")], divided=".div." in f".{op}")
        if op in EXPONENTIAL:
            return _raised(given[0].kind)
        if op == "aten.nan_to_num":  # RetNet's masks: e^(−∞ · log a) is 0 already
            is_plain = not node.attrs.get("nan") and kinds == [Kind.GEOMETRIC]
            return given[0] if is_plain else None
        if op in POWER:
            return _powered(given)
        if op in RUNNING_SUM:
            if kinds != [Kind.NUMBERS]:
                return None
            if "cumsum" not in op:
                return Part(Kind.GEOMETRIC)
            if given[0].are(1):
                return Part(Kind.PLACE)
            return Part(Kind.SCALED if is_one_number(given[0].numbers) else Kind.LINEAR)
        return None

    def _cut(self, node: Node, part: Part) -> Part | None:
        """What is left of numbers of all places, of which no trial reads the last."""
        if is_one_number(part.numbers):
            return part
        is_from_first = not node.attrs.get("start", 0)
        return Part(Kind.GEOMETRIC) if is_from_first and node.inputs[0] in self.tables else None

    def _compared(self, sides: list[Part]) -> Part | None:
        kinds = {part.kind for part in sides}
        numbers = [part for part in sides if part.kind is Kind.NUMBERS]
        is_plain = kinds <= {Kind.PLACE, Kind.NUMBERS} or kinds == {Kind.GATE, Kind.NUMBERS}
        if is_plain and all(part.is_near() for part in numbers):
            return Part(Kind.GATE)
        is_sign = kinds == {Kind.SCALED, Kind.NUMBERS} and all(part.are(0) for part in numbers)
        return Part(Kind.GATE) if is_sign else None

    def _chosen(self, node: Node) -> Part | None:
        predicate = node.input(1 if "masked_fill" in node.op else 0)
        if self.parts[predicate].kind is not Kind.GATE:
            return None
        branches = [self.parts[value] for value in _branches(node)]
        branches += _given(node, "value", "self", "other")
        varied = {part.kind for part in branches} - {Kind.NUMBERS}
        filled = all(p.all(_is_visible_fill) for p in branches if p.kind is Kind.NUMBERS)
        if not filled:
            return None
        if varied <= {Kind.GATE}:
            return Part(Kind.GATE)
        if varied <= _LINEARS | {Kind.GATE}:
            return Part(Kind.LINEAR)
        return Part(Kind.GEOMETRIC) if varied <= {Kind.GEOMETRIC, Kind.GATE} else None


def _is_visible_fill(x: torch.Tensor) -> torch.Tensor:
    return _is_filled(x) | x.isinf()


def _branches(node: Node) -> list[Value]:
    at = 1 if "masked_fill" in node.op else 0
    return [v for place, v in enumerate(node.inputs) if place != at and v is not None]


def _given(node: Node, *names: str) -> list[Part]:
    """The numbers among a node's attributes."""
    values = [node.attrs[name] for name in names if node.attrs.get(name) is not None]
    return [Part(Kind.NUMBERS, value) for value in values]


def _cuts_to_length(node: Node) -> bool:
    """Whether it is so many places of an axis of which no chunk is the end."""
    size, whole = node.outputs[0].shape, node.source
    open_sizes = [
        x
        for x, y in zip(size, whole.shape, strict=False)
        if isinstance(x, sympy.Basic) and isinstance(y, int)
    ]
    return any(not functions_of(x) & DIVIDING for x in open_sizes)


def _is_plain_range(node: Node) -> bool:
    start, step = node.attrs.get("start", 0), node.attrs.get("step", 1)
    return step in (1, -1) and are_near(start, node.attrs.get("end", 0))


def _keeps(node: Node, kind: Kind) -> bool:
    """Whether a cast leaves a kind: one to integers or bool rounds all but places and gates."""
    to = node.outputs[0].dtype
    return to.is_floating_point or (
        kind in (Kind.PLACE, Kind.GATE) and (to != torch.bool or kind is Kind.GATE)
    )


def _clamped(part: Part, limits: list[Part], inputs: int) -> Part | None:
    if inputs > 1:
        return None
    if part.kind is Kind.PLACE and all(limit.is_near() for limit in limits):
        return part
    is_sign = part.kind is Kind.SCALED and all(limit.are(0) for limit in limits)
    return part if is_sign else None


def _combined(
    parts: list[Part],
    table: dict[tuple[Kind, Kind], Kind],
    with_numbers: Callable[[Kind, Part], Kind | None],
) -> Part | None:
    numbers = [part for part in parts if part.kind is Kind.NUMBERS]
    varied = [part.kind for part in parts if part.kind is not Kind.NUMBERS]
    if len(parts) != 2 or len(numbers) == 2:
        return Part(Kind.NUMBERS) if len(numbers) == 2 else None
    if numbers:
        kind = with_numbers(varied[0], numbers[0])
    else:
        kind = table.get((varied[0], varied[1])) or table.get((varied[1], varied[0]))
    return None if kind is None else Part(kind)


def _shifted(kind: Kind, by: Part) -> Kind | None:
    if kind is Kind.GATE:
        return kind if by.all(_is_filled) else None
    if kind not in _LINEARS or not by.is_near():
        return None
    return Kind.LINEAR if kind is Kind.SCALED and not by.are(0) else kind


def _scaled(kind: Kind, by: Part) -> Kind | None:
    if kind in _LINEARS:
        if isinstance(by.numbers, sympy.Basic):
            return None
        return kind if by.are(1) or kind is Kind.LINEAR else Kind.SCALED
    if kind is Kind.GATE and by.all(_is_filled):
        return kind
    return Kind.GEOMETRIC if by.all(_is_visible) else None


def _multiplied(parts: list[Part], *, divided: bool) -> Part | None:
    divisor = parts[-1].kind
    if divided and divisor not in (Kind.NUMBERS, Kind.GEOMETRIC):
        return None
    if divided and parts[0].kind is Kind.NUMBERS and divisor is Kind.NUMBERS:
        return Part(Kind.NUMBERS)
    return _combined(parts, _PRODUCTS, _scaled)


def _raised(kind: Kind) -> Part | None:
    if kind in _LINEARS:
        return Part(Kind.GEOMETRIC)
    return Part(Kind.GATE) if kind is Kind.GATE else None


def _powered(parts: list[Part]) -> Part | None:
    kinds = [part.kind for part in parts]
    if kinds == [Kind.GATE]:
        return Part(Kind.GATE)
    return _raised(kinds[1]) if len(kinds) == 2 and kinds[0] is Kind.NUMBERS else None


def _halved(part: Part) -> Part | None:
    if part.kind is Kind.NUMBERS:
        return Part(Kind.GATE) if part.all(_is_filled) else None
    return Part(Kind.SCALED) if part.kind is Kind.PLACE else part


def _filled_with(node: Node) -> object:
    return node.attrs.get("fill_value", 0 if "zeros" in node.op else 1)


def is_one_number(numbers: object) -> bool:
    """Whether numbers are known and one for all elements."""
    return numbers is not None and (not isinstance(numbers, torch.Tensor) or numbers.numel() == 1)


def _is_small(node: Node) -> bool:
    shapes = [value.shape for value in node.outputs if isinstance(value.type, TensorType)]
    is_static = all(isinstance(size, int) for shape in shapes for size in shape)
    return is_static and all(math.prod(shape) <= _MOST for shape in shapes)


def _rounds(node: Node) -> bool:
    """Whether its dtype has no room for the places of long sequences."""
    dtype = node.outputs[0].dtype
    return dtype.is_floating_point and torch.finfo(dtype).eps > torch.finfo(torch.float32).eps
