"""Which complex numbers can be computed as a pair of reals, and which op is in the way."""

from __future__ import annotations

from collections.abc import Callable

from attngraph.ir import Graph, Node, TensorType, Value
from attngraph.ir.ops import attribute
from attngraph.ir.traits import (
    ADDITIVE,
    CHOICE,
    FILL,
    FOURIER,
    INDEX,
    JOIN,
    LAYOUT,
    MATMUL,
    MEAN,
    NEGATION,
    PAD,
    ROLL,
    SCALE,
    SCATTER,
    SHIFT,
    SUM,
    TRIANGLE,
)

_WRITES = SCATTER | CHOICE
"""Numbers of one operand or another, by place: their other operands say which."""
ON_BOTH = LAYOUT | JOIN | INDEX | ROLL | SUM | MEAN | SCALE | NEGATION | PAD | TRIANGLE | _WRITES
"""Ops that do the same to the real and to the imaginary part, and nothing between them.

What they put in place of a number has to be complex itself, or zero.
"""
CONJUGATES = frozenset(["aten._conj", "aten.conj", "aten.conj_physical"])
REST = "aten.rsub.Scalar"
QUOTIENTS = frozenset(["aten.div.Tensor", "aten.reciprocal"])
POWER, _MOST_FACTORS = "aten.pow.Tensor_Scalar", 8
_BY_FORMULA = frozenset(["aten._to_copy", "aten.exp"]) | CONJUGATES | QUOTIENTS
_FROM_REALS = frozenset(["aten.complex", "aten.polar", "aten.view_as_complex"])
_FILLED = "aten.fill.Scalar"
TO_REALS = frozenset(["aten.abs", "aten.angle", "aten.imag", "aten.real", "aten.view_as_real"])


def is_complex(value: Value | None) -> bool:
    """Whether a value is a tensor of complex numbers."""
    return value is not None and isinstance(value.type, TensorType) and value.dtype.is_complex


def is_product(node: Node) -> bool:
    """Whether both operands multiply each other."""
    return node.op in MATMUL or node.op == "aten.mul.Tensor"


def scalar_of(node: Node) -> complex | None:
    """The complex number that a node multiplies by, divides by, adds or subtracts from."""
    number = node.attrs.get("other")
    if node.op == REST and isinstance(number, (int, float, complex)):
        return complex(number)
    return number if node.op in SCALE | SHIFT and isinstance(number, complex) and number else None


class Splittable:
    """Which complex values have parts. `is_read` says of a Fourier transform whether products can
    be written for it.
    """

    def __init__(self, is_read: Callable[[Node], bool]) -> None:
        self._is_read = is_read
        self._known: dict[Value, bool] = {}

    def known(self, value: Value) -> bool:
        """Whether the parts of a complex value can be written."""
        if value not in self._known:
            self._known[value] = value.data is not None or self._splits(value.producer)
        return self._known[value]

    def known_op(self, node: Node) -> bool:
        """Whether a node is no Fourier transform, or one that products can be written for."""
        return node.op not in FOURIER or self._is_read(node)

    def in_the_way(self, graph: Graph) -> Node | None:
        """The first op whose complex operands have parts, as inputs do, but no form on these."""
        self._known.update((value, True) for value in graph.inputs)
        for node in graph:
            taken, given = (
                [value for value in values if value is not None and is_complex(value)]
                for values in (node.inputs, node.outputs)
            )
            to_reals = node.op in TO_REALS or (node.op in FOURIER and self.known_op(node))
            has_form = all(map(self.known, given)) if given else to_reals or not taken
            if all(map(self.known, taken)) and not has_form:
                return node
        return None

    def _splits(self, node: Node | None) -> bool:
        if node is None:
            return False
        operands = node.operands
        numbers = [value for value in operands if is_complex(value)]
        if node.op in FOURIER:
            return self.known_op(node) and all(self.known(value) for value in numbers)
        if node.op in FILL or node.op == _FILLED:
            return True
        if scalar_of(node) is not None:
            plain = not isinstance(node.attrs.get("alpha"), complex)
            return plain and all(self.known(value) for value in numbers)
        if node.op == "aten.copy":  # of the second operand, in the first one's shape
            return not is_complex(operands[1]) or self.known(operands[1])
        if node.op in _FROM_REALS or (node.op == "aten._to_copy" and not numbers):
            return not numbers
        return self._has_form(node, operands, numbers) and all(map(self.known, numbers))

    def _has_form(self, node: Node, operands: list[Value], numbers: list[Value]) -> bool:
        if node.op in ON_BOTH:
            if node.op in JOIN and len(numbers) < len(operands):
                return False
            if "dtype" in node.attrs:
                return False
            if node.op in PAD | _WRITES and not _puts_in_both(node):
                return False
        elif node.op in SHIFT or node.op in ADDITIVE:
            if isinstance(attribute(node, "alpha"), complex):
                return False
        elif node.op == "aten.einsum":
            if len(operands) != 2:
                return False
        elif node.op == POWER:
            if attribute(node, "exponent") not in range(1, _MOST_FACTORS + 1):
                return False
        elif not is_product(node) and node.op not in _BY_FORMULA:
            return False
        return bool(numbers)


def _puts_in_both(node: Node) -> bool:
    """Whether what a node puts in place of a complex number is complex, or zero: no lone real."""
    fills = (node.attrs.get(name) for name in ("value", "other", "self"))
    if any(fills) or "reduce" in node.attrs:
        return False
    dtypes = (value.dtype for value in node.operands)
    return not any(dtype.is_floating_point for dtype in dtypes)
