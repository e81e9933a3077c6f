"""Whether rows reach their experts, and come back, alike at all numbers of rows and of all values.

A mixture is confirmed on drawn numbers, at a few numbers of rows. That says something about the
others only where nothing can switch between what was drawn and what wasn't: a capacity that drops
the thousandth row, a weight below 1e-9 that counts as none, numbers cut at 1e6. So between x, the
choices and their weights on one side and the result on the other, each value is of one of these
kinds, and an operator takes it only as what it is:

- floats, which are added, scaled, moved, and multiplied: at most one factor of a product is a
  weight, one is of x or of what an expert gives, and one says which expert was chosen. Outside of
  the experts, nothing else is done to them: the result is linear in the weights and in what
  experts give.
- numbers of experts, which are moved, sorted, counted, and compared with constants, each of which
  some drawn row has;
- which of them are equal to a constant: added, moved, and factors of floats, but not of each other
  or compared again, so no pair of experts is told from others;
- places of rows, and of the one choice of a row that is some expert, which are moved, and computed
  with by the number of choices and of rows only;
- counts of rows, which are no divisors, aren't compared and are nothing's factors.

What an expert does between its products is read by itself (activation.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import sympy
import torch

from attngraph.analysis.experts.gates import tells_which
from attngraph.analysis.experts.kinds import (
    Kind,
    Rows,
    SwitchError,
    What,
    gathered,
    multiplied,
    require,
    summed,
)
from attngraph.analysis.experts.products import GROUPED, Product
from attngraph.analysis.experts.reading import Mixture
from attngraph.analysis.values.scalars import keeps_values
from attngraph.ir import Node, ScalarType, TensorType, Value
from attngraph.ir.dims import CHOOSING, DIVIDING, functions_of
from attngraph.ir.ops import attribute
from attngraph.ir.slices import backward_slice
from attngraph.ir.traits import (
    ADDITION,
    ADDMM,
    CAST,
    CHOICE,
    CLAMP,
    COMPARISON,
    COUNTED,
    FILL,
    GATHERED,
    JOIN,
    LARGEST,
    LAYOUT,
    LINEAR,
    LOGICAL,
    MATMUL,
    MULTIPLICATION,
    NEGATION,
    ONE_HOT,
    PART,
    PLACED,
    POINTWISE,
    QUOTIENT,
    RANGE,
    ROUNDED_DIVISION,
    RUNNING_SUM,
    SCATTER,
    SORTED,
    SUM,
    TRUTH,
    UNSET,
)

_PRODUCT = MULTIPLICATION | MATMUL | LINEAR
_SAME_EVERYWHERE = FILL | UNSET | LAYOUT | POINTWISE | CAST | CHOICE
_EXACT_TO = 127  # what every dtype that numbers of experts are cast to holds
_NUMBERS = ("fill_value", "value", "other")  # attributes that are elements
_OFFSETS = 2  # the place of a grouped product's offsets among its inputs
_COUNTING = (torch.int64, torch.int32, torch.float32, torch.float64)


def switch_in(
    mixture: Mixture, given: Collection[Value], weights: Value, *, is_gate: bool = False
) -> Node | None:
    """A node that may do something else to other rows, or at other numbers of them, than to those
    that were tried; None where there is none. `given` are x, its layouts and the choices.

    Of a gate each element has its expert's number, as a weight has when a match says which it is.
    """
    reading = _Reading(mixture)
    for value in given:
        reading.known[value] = Rows(features=1)
    reading.known[mixture.choice.indices] = Kind.CHOSEN
    reading.known[weights] = Rows(weights=1, matches=int(is_gate))
    return reading.blamed(mixture.result)


@dataclass
class _Reading:
    mixture: Mixture
    known: dict[Value, What] = field(default_factory=dict)
    blame: dict[Value, Node] = field(default_factory=dict)

    def blamed(self, result: Value) -> Node | None:
        """The node to blame where the result isn't a sum of what weighted experts give."""
        downs = {expert.down.result: expert for expert in self.mixture.experts}
        ups = {up.result: up for expert in self.mixture.experts for up in expert.ups}
        leaves, nodes = backward_slice(
            [result], lambda value: value in self.known or value.is_constant
        )
        for leaf in leaves:
            if leaf.is_constant:
                self.known.setdefault(leaf, Kind.FIXED)
            elif isinstance(leaf.type, ScalarType):
                self.known.setdefault(leaf, Kind.SIZED)
        for node in nodes:
            expert = next((downs[value] for value in node.outputs if value in downs), None)
            up = next((ups[value] for value in node.outputs if value in ups), None)
            try:
                if expert is not None:
                    for each in expert.ups:
                        self.of(each.result)
                    self._multiplied(expert.down, expert.down.rows)
                    found: list[What] = [Rows(features=1)]
                elif up is not None:
                    rows = self.of(up.rows)
                    self._multiplied(up, up.rows)
                    if not isinstance(rows, Rows) or rows.weights or rows.matches > 1:
                        raise SwitchError
                    found = [Rows(features=1)]
                else:
                    found = self._made(node)
            except SwitchError:
                above = (self.blame.get(value) for value in node.operands)
                self.blame.update(
                    dict.fromkeys(node.outputs, next(filter(None, above), node)),
                )
            else:
                self.known.update(zip(node.outputs, found, strict=True))
        if isinstance(self.known.get(result), Rows):
            return None
        return self.blame.get(result, result.producer)

    def of(self, value: Value | None) -> What:
        if value is None or value not in self.known:
            raise SwitchError
        return self.known[value]

    def _multiplied(self, product: Product, rows: Value) -> None:
        """Matrices and biases are chosen by the number of an expert, or by counts of rows."""
        leaves, inside = backward_slice(
            [product.result], lambda value: value is rows or not _is_float(value)
        )
        if any(_is_float(leaf) and leaf is not rows and not leaf.is_constant for leaf in leaves):
            raise SwitchError
        for node in inside:
            for place, value in enumerate(node.inputs):
                if value is None or _is_float(value):
                    continue
                offsets = node.op in GROUPED and place == _OFFSETS
                require(self.of(value) in (Kind.FIXED, Kind.COUNT if offsets else Kind.CHOSEN))

    def _made(self, node: Node) -> list[What]:
        """What the outputs of a node are. Raises SwitchError where that may switch."""
        if node.op in FILL | UNSET and not is_sized(node, _NUMBERS):
            return [Kind.FIXED] * len(node.outputs)
        given = [self.of(value) for value in node.operands]
        if _switches(node) or _cuts_rows(node):
            raise SwitchError
        if all(kind in (Kind.FIXED, Kind.SIZED) for kind in given):
            return [self._fixed(node, given)] * len(node.outputs)
        if node.op in SORTED:
            return self._sorted(node, given)
        if node.op in PLACED:
            require(given[0] is Kind.MATCH)
            return [Kind.PLACE] * len(node.outputs)
        if node.op in LARGEST:
            require(given == [Kind.MATCH] and tells_which(self.mixture.choice, node))
            return [*([Kind.MATCH] * (len(node.outputs) - 1)), Kind.PLACE]
        return [self._one(node, given)] * len(node.outputs)

    def _one(self, node: Node, given: list[What]) -> What:
        first = given[0]
        if node.op in LAYOUT:
            require(len(given) == 1)
            return first
        if node.op in CAST:
            return self._cast(node, first)
        if node.op in JOIN:
            return summed(given)
        if node.op in GATHERED:
            source = node.source
            if source.producer is not None and source.producer.op in FILL:
                return Kind.FIXED
            return gathered(first, given[1:])
        if node.op in SCATTER:
            return _scattered(node, given)
        if node.op in COMPARISON:
            require(sorted(kind is Kind.FIXED for kind in given) in ([False], [False, True]))
            require(Kind.CHOSEN in given and not is_sized(node))
            return Kind.MATCH
        if node.op in ONE_HOT:
            require(first is Kind.CHOSEN)
            return Kind.MATCH
        if node.op in LOGICAL:
            require([kind for kind in given if kind is not Kind.FIXED] == [Kind.MATCH])
            return Kind.MATCH
        if node.op in CLAMP:
            low, high = node.attrs.get("min"), node.attrs.get("max")
            last = self.mixture.choice.experts - 1
            require(first is Kind.CHOSEN and len(given) == 1)
            require(low is None or (isinstance(low, int) and low <= 0))
            require(high is None or (isinstance(high, int) and high >= last))
            return Kind.CHOSEN
        if node.op in CHOICE:
            at = 1 if "masked_fill" in node.op else 0
            either = [kind for place, kind in enumerate(given) if place != at]
            if given[at] is Kind.FIXED:
                return summed(either)
            require(given[at] is Kind.MATCH and not is_sized(node))
            require(all(kind is Kind.FIXED or isinstance(kind, Rows) for kind in either))
            return multiplied([Kind.MATCH, summed([*either, Kind.FIXED])])
        if node.op in SUM | TRUTH:
            return self._reduced(node, first)
        if node.op in RUNNING_SUM | COUNTED:
            counted = (Kind.CHOSEN,) if node.op in COUNTED else (Kind.MATCH, Kind.COUNT)
            require(first in counted and "cumprod" not in node.op)
            return Kind.COUNT
        return self._computed(node, given)

    def _computed(self, node: Node, given: list[What]) -> What:
        """Sums and products of numbers."""
        if any(kind in (Kind.PLACE, Kind.COUNT) for kind in given):
            return self._places(node, given)
        require(not is_sized(node))
        if node.op in ADDITION | NEGATION:
            return summed([*given, Kind.FIXED])
        if node.op in ADDMM:
            return summed([given[0], multiplied(given[1:])])
        require(node.op in _PRODUCT)
        if node.op in LINEAR and len(given) == 3:
            return summed([given[2], multiplied(given[:2])])
        require("div" not in node.op or given[-1] is Kind.FIXED or len(given) == 1)
        return multiplied(given)

    def _places(self, node: Node, given: list[What]) -> What:
        """Numbers of places and of rows, computed with by those of choices and of rows."""
        is_count = Kind.COUNT in given
        divides = QUOTIENT | ROUNDED_DIVISION
        require(node.op in ADDITION | MULTIPLICATION | NEGATION | divides)
        if node.op in divides:
            require(not is_count and node.output.dtype in (torch.int64, torch.int32))
            require(given[0] is Kind.PLACE)
        require(all(isinstance(kind, Kind) for kind in given))
        require(not {Kind.CHOSEN, Kind.MATCH} & {*given})
        choice = self.mixture.choice
        allowed = {0, 1, -1, choice.count, choice.experts}
        named = ("other", "alpha", "value")
        numbers = [node.attrs[name] for name in named if name in node.attrs]
        for value in node.inputs:
            if value is not None and self.known[value] is Kind.FIXED:
                data = value.data if value.is_constant else None
                if data is None or data.numel() != 1:
                    require(not _is_dynamic(value) and _is_range(value))
                else:
                    numbers.append(int(data))
        for number in numbers:
            require(isinstance(number, sympy.Basic) or number in allowed or not _dynamic(node))
        return Kind.COUNT if is_count else Kind.PLACE

    def _cast(self, node: Node, given: What) -> What:
        dtype = node.output.dtype
        if isinstance(given, Rows):
            require(dtype.is_floating_point and keeps_values(self.mixture.x.dtype, dtype))
        elif given is Kind.CHOSEN:
            few = self.mixture.choice.experts <= _EXACT_TO and dtype != torch.bool
            require(dtype in _COUNTING or few)
        elif given is not Kind.MATCH:
            require(dtype in _COUNTING)
        return given

    def _reduced(self, node: Node, given: What) -> What:
        if isinstance(given, Rows):
            require(node.op in SUM)
            return given
        require(given in (Kind.MATCH, Kind.COUNT))
        source = node.source
        dims = node.attrs.get("dim")
        listed = dims if isinstance(dims, (list, tuple)) else [dims]
        choice = self.mixture.choice
        own = isinstance(dims, (int, list, tuple)) and all(
            isinstance(dim, int) and source.shape[dim] in (choice.count, choice.experts)
            for dim in listed
        )
        if own and given is Kind.MATCH:
            return Kind.MATCH
        require(node.op in SUM)
        return Kind.COUNT

    def _sorted(self, node: Node, given: list[What]) -> list[What]:
        require(given[0] in (Kind.CHOSEN, Kind.PLACE))
        places: list[What] = [Kind.PLACE]
        return places if len(node.outputs) == 1 else [given[0], *places]

    def _fixed(self, node: Node, given: list[What]) -> What:
        """What is made of constants and sizes alone."""
        if node.op in RANGE:
            return Kind.PLACE if is_sized(node) else Kind.FIXED
        if Kind.SIZED in given and node.op not in LAYOUT:
            return Kind.SIZED
        if _dynamic(node) and (
            node.op not in _SAME_EVERYWHERE or (node.op not in LAYOUT and is_sized(node))
        ):
            return Kind.SIZED
        return summed(given)


def _scattered(node: Node, given: list[What]) -> What:
    """Some elements set, or added to, at places."""
    require(node.attrs.get("reduce", "sum") in ("sum", "add"))
    is_number = "value" in node.attrs or node.op.endswith((".value", ".value_reduce"))
    base, indices = given[0], given[1:] if is_number else given[1:-1]
    source = Kind.FIXED if is_number else given[-1]
    require(bool(indices))
    require(not is_sized(node, ("value",)))
    require(all(isinstance(kind, Kind) and kind is not Kind.SIZED for kind in indices))
    chosen = Kind.CHOSEN in indices
    if source is Kind.FIXED and base is Kind.FIXED:
        if chosen or not _is_integer(node.output):
            return Kind.MATCH
        return Kind.PLACE
    made = summed([base, source])
    require(made is not Kind.CHOSEN)
    return multiplied([made, Kind.MATCH]) if chosen else made


def _is_float(value: Value) -> bool:
    return isinstance(value.type, TensorType) and value.dtype.is_floating_point


def _is_integer(value: Value) -> bool:
    return not value.dtype.is_floating_point and value.dtype != torch.bool


def _is_dynamic(value: Value) -> bool:
    kind = value.type
    return isinstance(kind, TensorType) and any(not isinstance(size, int) for size in kind.shape)


def _dynamic(node: Node) -> bool:
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    return any(map(_is_dynamic, values))


def _is_range(value: Value) -> bool:
    return value.producer is not None and value.producer.op in RANGE


def _cuts_rows(node: Node) -> bool:
    """Whether a part is taken of an axis whose size isn't known."""
    source = node.inputs[0] if node.op in PART else None
    return source is not None and not isinstance(source.shape[attribute(node, "dim")], int)


def is_sized(node: Node, names: Collection[str] | None = None) -> bool:
    """Whether a size that isn't known is among a node's numbers."""
    attrs: Mapping[str, object] = node.attrs
    return any(
        isinstance(attr, sympy.Basic)
        for name, attr in attrs.items()
        if names is None or name in names
    )


def _switches(node: Node) -> bool:
    """Whether a size is one of several expressions, by the number of rows."""
    shapes = [value.shape for value in node.outputs if isinstance(value.type, TensorType)]
    return bool(functions_of([*shapes, *node.attrs.values()]) & (CHOOSING | DIVIDING))
