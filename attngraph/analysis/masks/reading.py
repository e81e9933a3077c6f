"""Reads what a mask's elements are, from the ops that built it, as a function of their index.

An element is an integer expression of the index (positions), or one of two numbers told apart by a
predicate (bools, padding multipliers, float fills). Ops on the latter are read from their truth
table, so no spelling needs a rule of its own. A bool tensor that isn't understood is a leaf of the
predicate, an integer tensor is a function of its index; any other tensor reads as None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any, TypeAlias

import sympy
import torch

from attngraph.analysis.layout.index_maps import Index, aligned, settled, source_index
from attngraph.analysis.masks.bands import band, progression
from attngraph.analysis.masks.choices import Choice, choice, table
from attngraph.analysis.masks.predicates import (
    TRUE,
    VARIABLES,
    Dense,
    Domain,
    Expr,
    Predicate,
    at_most,
    element,
    elements,
    equal,
    from_table,
    negation,
    variables,
)
from attngraph.ir import Node, ScalarType, TensorType, Value
from attngraph.ir.dims import greatest, least, symbol
from attngraph.ir.ops import attribute, input_of, inputs_of
from attngraph.ir.traits import (
    ADDITION,
    ARITHMETIC,
    CAST,
    CHOICE,
    CLAMP,
    COMPARISON,
    FLOAT_TEST,
    LAYOUT,
    LOGARITHM,
    LOGICAL,
    MAGNITUDE,
    MAXIMUM,
    MINIMUM,
    NEGATION,
    ROUNDED_DIVISION,
)

Reading: TypeAlias = Choice | Expr | None

_COMPARISONS: dict[str, Callable[[Expr, Expr], Predicate]] = {
    "le": lambda a, b: at_most(a - b),
    "lt": lambda a, b: at_most(a - b + 1),
    "ge": lambda a, b: at_most(b - a),
    "gt": lambda a, b: at_most(b - a + 1),
    "eq": equal,
    "ne": lambda a, b: negation(equal(a, b)),
}
_POSITIONS: dict[str, Callable[[Expr, Expr], Expr]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "rsub": lambda a, b: b - a,
    "mul": lambda a, b: sympy.expand(a * b),
    "floor_divide": lambda a, b: sympy.floor(a / b),
    "__rshift__": lambda a, b: sympy.floor(a / 2**b),
    "bitwise_right_shift": lambda a, b: sympy.floor(a / 2**b),
    "remainder": lambda a, b: sympy.Mod(a, b),
}
_SHIFTS = ("__rshift__", "bitwise_right_shift")
_BITS = 31
_EXACT = 2.0**53  # below it a float is the integer that it was read from
_SUMS = ADDITION | NEGATION
ELEMENTWISE = (
    ARITHMETIC
    | MAGNITUDE
    | LOGARITHM
    | LOGICAL
    | COMPARISON
    | MAXIMUM
    | MINIMUM
    | CLAMP
    | CAST
    | CHOICE
    | FLOAT_TEST
)
_INTEGERS = (torch.int64, torch.int32)
_LARGEST_CONSTANT = 1 << 24
_DEPTH = 64


class Reader:
    """Readings over one box of indices, remembered by value and index.

    `known` maps a predicate to the first bool tensor that holds it, with the index into it, where
    the tensor has no dim that the predicate doesn't depend on. `understood` are the values read;
    `opaque` those of them that are leaves of a predicate; `numbers` are the two that one may hold;
    `integers` the opaque ones that expressions name.
    """

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self.known: dict[Predicate, tuple[Value, Index]] = {}
        self.understood: set[Value] = set()
        self.opaque: set[Value] = set()
        self.numbers: dict[Value, tuple[float, float]] = {}
        self.integers: dict[str, Value] = {}
        self._memory: dict[tuple[Value, Index], Reading] = {}
        self._constants: dict[Value, Value] = {}
        self._depth = 0

    def read(self, value: Value, index: Index) -> Reading:
        """The element of `value` at `index`."""
        index = settled(value, index)
        key = (value, index)
        if key not in self._memory:
            found = self._constant(value, index) if value.data is not None else None
            if found is None and value.producer is not None and self._depth < _DEPTH:
                self._depth += 1
                found = self._node(value.producer, value, index)
                self._depth -= 1
            if found is None and value.dtype == torch.bool:
                found = Choice(Dense(value, index), 1.0, 0.0)
                self.opaque.add(value)
            if found is None and value.dtype in _INTEGERS:
                found = element(value.name, index)
                self.integers[value.name] = value
                self.opaque.add(value)
            self._memory[key] = found
            if found is not None:
                self.understood.add(value)
            if isinstance(found, Choice):
                self.numbers[value] = (found.yes, found.no)
                if value.dtype == torch.bool:
                    self._learn(found, value, index)
        return self._memory[key]

    def predicate(self, value: Value, index: Index) -> Predicate:
        """Where a bool tensor is true."""
        found = self.read(value, index)
        assert isinstance(found, Choice)
        return from_table([found.predicate], [found.yes == 1, found.no == 1])

    def _learn(self, found: Choice, value: Value, index: Index) -> None:
        held = from_table([found.predicate], [found.yes == 1, found.no == 1])
        used = {s for place in index for s in place.free_symbols} & set(self.domain.sizes)
        if used == variables(held):
            self.known.setdefault(held, (value, index))

    def _node(self, node: Node, value: Value, index: Index) -> Reading:
        if (source := source_index(value, index, self.domain)) is not None:
            return self.read(*source)
        if node.op in ELEMENTWISE:
            return self._elementwise(node, value, index)
        stem = node.op.removeprefix("aten.").split(".")[0]
        if stem in _POSITIONS or node.op in ROUNDED_DIVISION:
            return self._positions(node, value, self._operands(node, index))
        match stem:
            case "arange":
                return _arange(node, value, index)
            case "tril" | "triu":
                return self._triangle(node, value, index)
            case "index":
                return self._indexed(node, index)
            case "cumsum":
                return self._cumulated(node, index)
            case "diff":
                return self._difference(node, index)
            case "cat" | "stack":
                return self._joined(node, index)
            case "full":
                return _filled(node, value)
        return None

    def _operands(self, node: Node, index: Index) -> list[Reading]:
        """The readings of a node's inputs; a runtime integer is its symbol."""
        found: list[Reading] = []
        for source in node.inputs:
            if source is None:
                found.append(None)
            elif isinstance(source.type, ScalarType):
                is_size = source.type.kind == "int" and source.type.name is not None
                found.append(symbol(source.type.name or "") if is_size else None)
            else:
                found.append(self.read(source, aligned(source, index)))
        return found

    def _elementwise(self, node: Node, value: Value, index: Index) -> Reading:
        operands = self._operands(node, index)
        if any(operand is None for operand in operands):
            return None
        choices = [operand for operand in operands if isinstance(operand, Choice)]
        if len(choices) == len(operands):
            return table(node, value, choices)
        if node.op in CAST:
            source = input_of(node, "self").dtype
            widens = source in _INTEGERS and value.dtype in (source, torch.int64)
            is_whole = value.dtype in _INTEGERS and (widens or not elements(operands[0]))
            return operands[0] if is_whole else None
        return self._positions(node, value, operands)

    def _positions(self, node: Node, value: Value, operands: Sequence[Reading]) -> Reading:
        """Arithmetic and comparisons of integers."""
        stem = node.op.removeprefix("aten.").split(".")[0]
        read = [integer(operand) for operand in operands]
        if "other" in node.attrs:
            read.append(_symbolic(node.attrs["other"]))
        places = [place for place in read if place is not None]
        if len(places) < len(read):
            return None
        if stem in _COMPARISONS and len(places) == 2:
            if not _says_where(places[0] - places[1]):
                return None
            return Choice(_COMPARISONS[stem](*places), 1.0, 0.0)
        if value.dtype not in _INTEGERS:
            return None
        if any(map(elements, places)) and (node.op not in _SUMS or value.dtype != torch.int64):
            return None  # it may wrap around: an integer of its own
        if node.op in CLAMP | MAXIMUM | MINIMUM:
            return _bounded(node, stem, places)
        if stem in ("neg", "abs"):
            return -places[0] if stem == "neg" else sympy.Abs(places[0])
        if node.op in ROUNDED_DIVISION:
            stem = "floor_divide" if node.attrs.get("rounding_mode") == "floor" else ""
        if stem not in _POSITIONS or len(places) != 2:
            return None
        if stem in ("floor_divide", "remainder") and not places[1].is_positive:
            return None
        if stem in _SHIFTS and not (places[1].is_Integer and 0 <= places[1] < _BITS):
            return None
        if (alpha := node.attrs.get("alpha")) is not None:
            if not isinstance(alpha, int) or any(map(elements, places)):
                return None
            places[0 if stem == "rsub" else 1] *= alpha
        return _POSITIONS[stem](*places)

    def _triangle(self, node: Node, value: Value, index: Index) -> Reading:
        source = input_of(node, "self")
        operand = self.read(source, index)
        diagonal = attribute(node, "diagonal")
        if not isinstance(operand, Choice):
            return None
        beyond = index[-1] - index[-2] - diagonal
        kept = at_most(beyond if node.op == "aten.tril" else -beyond)
        elements = [operand.yes, operand.no, 0.0, 0.0]
        return choice(value, [kept, operand.predicate], elements)

    def _indexed(self, node: Node, index: Index) -> Reading:
        """x[i, j, …] with integer tensors for leading dims, or for dims after whole ones."""
        source, places = inputs_of(node, "self", "indices")
        given = [dim for dim, place in enumerate(places) if place is not None]
        if not given or given != list(range(given[0], given[-1] + 1)):
            return None
        rank = max(len(places[dim].shape) for dim in given)
        start = given[0]
        lead, inner, rest = index[:start], index[start : start + rank], index[start + rank :]
        found = list(lead)
        for dim in given:
            place = places[dim]
            if place.dtype not in _INTEGERS:
                return None
            position = integer(self.read(place, aligned(place, inner)))
            if position is None or not self.domain.never_positive(-position):
                return None  # a negative one would count from the end
            found.append(position)
        return self.read(source, (*found, *rest))

    def _joined(self, node: Node, index: Index) -> Reading:
        """An element at a place that is known, of values joined along an axis."""
        parts, dim = input_of(node, "tensors"), attribute(node, "dim") % len(index)
        place = index[dim]
        for part in parts if place.is_Integer else ():
            size = 1 if node.op == "aten.stack" else part.shape[dim]
            if not isinstance(size, int):
                return None
            if place < size:
                after = index[dim + 1 :]
                inner = after if node.op == "aten.stack" else (place, *after)
                return self.read(part, (*index[:dim], *inner))
            place -= size
        return None

    def _cumulated(self, node: Node, index: Index) -> Reading:
        source, dim = input_of(node, "self"), attribute(node, "dim")
        step, place = integer(self.read(source, index)), index[dim]
        if step is None or node.output.dtype not in _INTEGERS:
            return None
        if source.shape[dim] == 1:
            return step
        is_same = place in VARIABLES and not step.free_symbols and not elements(step)
        return step * (place + 1) if is_same else None

    def _difference(self, node: Node, index: Index) -> Reading:
        """x[i] - x[i - 1], where that is the same expression at the first element."""
        source, before = inputs_of(node, "self", "prepend")
        if attribute(node, "n") != 1 or input_of(node, "append") is not None or before is None:
            return None
        dim = attribute(node, "dim") % len(index)
        if before.shape[dim] != 1:
            return None

        def at(value: Value, place: Expr) -> Expr:
            return integer(self.read(value, (*index[:dim], place, *index[dim + 1 :])))

        places = [at(source, index[dim]), at(source, index[dim] - 1)]
        first = [at(source, sympy.Integer(0)), at(before, sympy.Integer(0))]
        if any(place is None for place in (*places, *first)):
            return None
        step = places[0] - places[1]
        return step if step == first[0] - first[1] else None

    def _constant(self, value: Value, index: Index) -> Reading:
        data = value.data
        assert data is not None
        if data.is_complex() or data.is_meta or not 0 < data.numel() <= _LARGEST_CONSTANT:
            return None
        data, index = _narrowed(data, index)
        if data.dtype in _INTEGERS and (found := progression(data, index)) is not None:
            return found
        yes = torch.tensor(True) if data.dtype == torch.bool else data.flatten()[0]
        held = data == yes
        if bool(held.all()):
            return Choice(TRUE, float(yes), float(yes))
        no = data[~held][0]
        if not bool((data[~held] == no).all()):
            return None
        predicate = band(held, index) or Dense(self._held(value, held), index)
        return Choice(predicate, float(yes), float(no))

    def _held(self, value: Value, held: torch.Tensor) -> Value:
        """A bool constant, which joins the graph only if a mask is built from it."""
        if value.dtype == torch.bool and value.shape == tuple(held.shape):
            return value
        if value not in self._constants:
            kind = TensorType(torch.bool, tuple(held.shape))
            made = Value(f"{value.name}.mask", kind, data=held, is_constant=True)
            self._constants[value] = made
        return self._constants[value]


def leaf_test(reader: Reader, kept: Set[Value]) -> Callable[[Value], bool]:
    """A test for values that a rewrite did not look into, and so may be drawn; none of `kept`."""

    def is_leaf(value: Value) -> bool:
        node = value.producer
        if node is None:
            return True
        if value in kept:
            return False
        is_spelled = node.op in ELEMENTWISE or node.op in LAYOUT
        if value in reader.understood:
            return value in reader.opaque and not is_spelled
        return not is_spelled or (
            isinstance(value.type, TensorType) and value.dtype.is_floating_point
        )

    return is_leaf


def _narrowed(data: torch.Tensor, index: Index) -> tuple[torch.Tensor, Index]:
    """A constant with size 1 along each axis on which its elements are alike, as of a batch."""
    for dim, size in enumerate(data.shape):
        first = data.narrow(dim, 0, 1)
        if size > 1 and bool((data == first).all()):
            data, index = first, (*index[:dim], sympy.Integer(0), *index[dim + 1 :])
    return data, index


def integer(reading: Reading) -> Expr | None:
    """A position: an expression, or the only value of a choice."""
    if not isinstance(reading, Choice):
        return reading
    value = reading.constant
    if value is None or not value.is_integer() or abs(value) >= _EXACT:
        return None
    return sympy.Integer(int(value))


def _says_where(difference: Expr) -> bool:
    """Whether a comparison is more than one integer of a tensor against a number."""
    found = elements(difference)
    rest = difference.xreplace(dict.fromkeys(found, sympy.Integer(0)))
    return len(found) != 1 or bool(rest.free_symbols & set(VARIABLES))


def _bounded(node: Node, stem: str, places: Sequence[Expr]) -> Expr | None:
    """The larger or the smaller of sizes; of positions it would be no linear expression."""
    found, *others = places
    lows = others if stem == "maximum" else [node.attrs.get("min")]
    highs = others if stem == "minimum" else [node.attrs.get("max")]
    given = [bound for bound in (*lows, *highs) if bound is not None]
    sizes = [found, *(size for bound in given if (size := _symbolic(bound)) is not None)]
    is_tensor = bool(others) and stem.startswith("clamp")
    if is_tensor or len(sizes) <= len(given):
        return None
    if any(size.free_symbols & set(VARIABLES) for size in sizes):
        return None
    for low in lows:
        found = found if low is None else greatest(found, low)
    for high in highs:
        found = found if high is None else least(found, high)
    return sympy.sympify(found)


def _symbolic(value: Any) -> Expr | None:
    if isinstance(value, sympy.Basic):
        return value if value.is_integer else None
    return sympy.Integer(value) if isinstance(value, int) else None


def _arange(node: Node, value: Value, index: Index) -> Reading:
    if value.dtype not in _INTEGERS:
        return None
    start = _symbolic(node.attrs.get("start", 0))
    step = _symbolic(node.attrs.get("step", 1))
    return None if start is None or step is None else start + step * index[0]


def _filled(node: Node, value: Value) -> Reading:
    number = attribute(node, "fill_value")
    if isinstance(number, sympy.Basic):
        return _symbolic(number) if value.dtype in _INTEGERS else None
    widest = torch.float64 if isinstance(number, float) else None  # float32 has no float64's fills
    rounded = float(torch.tensor(number, dtype=widest).to(value.dtype))
    return Choice(TRUE, rounded, rounded)
