"""Logits as a tree of fills: which numbers they hold where masks hide keys.

Any logits can be read so, products of queries and keys or not. It shows where a softmax that is
spelled out differs from `aten.softmax`: in rows that masks hide.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from attngraph.analysis.layout.index_maps import Index, aligned, source_index
from attngraph.analysis.masks.choices import Choice
from attngraph.analysis.masks.predicates import (
    TRUE,
    VARIABLES,
    Const,
    Domain,
    Predicate,
    conjunction,
    negation,
)
from attngraph.analysis.masks.reach import Moderates
from attngraph.analysis.masks.reading import Reader
from attngraph.analysis.masks.row_policy import WEAKEST_FILL, Formula, Rows, agree, rows
from attngraph.analysis.values.scalars import blend_of, converted, fill_of, scale_of, widens
from attngraph.ir import Builder, DimInfo, Node, Value
from attngraph.ir.ops import attribute
from attngraph.ir.traits import ADDITIVE, LAYOUT

_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Literal:
    """Where a predicate holds: that of an atom, or its opposite."""

    atom: int
    holds: bool = True


@dataclass(frozen=True, slots=True)
class Moderate:
    """Logits or biases that hide no key."""

    value: Value


@dataclass(frozen=True, slots=True)
class Unknown:
    """A bias by which a caller may hide keys."""

    value: Value
    place: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """A bias of two numbers: `yes` where the literal holds, `no` elsewhere."""

    value: Value
    literal: Literal
    yes: float
    no: float


@dataclass(frozen=True, slots=True)
class Filled:
    """`source` where the literal holds, `fill` elsewhere; `predicate` is the literal's tensor."""

    node: Node
    source: Tree
    literal: Literal
    predicate: Value
    keep: bool
    fill: float


@dataclass(frozen=True, slots=True)
class Summed:
    """left ± right."""

    node: Node
    left: Tree
    right: Tree


@dataclass(frozen=True, slots=True)
class Carried:
    """`factor` times `source`, laid out anew, in the dtype of the node's result."""

    node: Node
    source: Tree
    factor: float = 1.0


Tree: TypeAlias = Moderate | Unknown | Chosen | Filled | Summed | Carried


@dataclass(frozen=True, slots=True)
class Settled:
    """The logits whose softmax is equal to a formula in every row.

    `assumed` says: in every row that has a key, as the user says all rows do; `proved`, as is
    proved of all rows.
    """

    logits: Value
    assumed: bool = False
    proved: bool = False


class Fills:
    """The fills of one tensor of logits, which is normalised over the axes `over`."""

    def __init__(self, x: Value, over: tuple[int, ...], dims: Mapping[str, DimInfo]) -> None:
        self.x = x
        self._keys_last = over == (len(x.shape) - 1,)
        self._atoms: list[Hashable] = []
        self._unknown: list[Value] = []
        self._visible: list[Predicate | None] = []
        self._reader: Reader | None = None
        missing = len(VARIABLES) - len(x.shape)
        index: Index | None = None
        if missing >= 0:
            self._reader = Reader(Domain((*[1] * missing, *x.shape), dims))
            index = tuple(map(self._reader.domain.index, VARIABLES[missing:]))
        self._index = index
        self._moderates = Moderates()
        self.tree = self._read(x, index, _DEPTH, is_logits=True)

    @property
    def has_unknown(self) -> bool:
        """Whether a bias that a caller gives is among them."""
        return bool(self._unknown)

    def settle(
        self,
        build: Builder,
        formula: Formula,
        kept: Value | None,
        keep: bool,
        *,
        assume: bool,
    ) -> Settled | None:
        """The logits to take the softmax of in the place of a formula; None if there are none.

        `kept` masks the exponentials: they are zero where it isn't `keep`. With `assume`, each row
        has a key.
        """
        literal = None if kept is None else self._literal(kept, self._index, keep)
        sample = rows(len(self._atoms), len(self._unknown), self.x.dtype)
        if sample is None:
            return None
        # In float64 too, where rewrites are compared: a fill times ln 3 isn't infinite there.
        samples = [sample, sample.wide()]
        for with_key in (False, True):
            if with_key and not (assume or self._always_a_key()):
                return None
            for lowered in (False, True):
                if lowered and not any(_fills(self.tree)):
                    continue
                ways = literal, lowered, with_key
                if all(self._is_equal(formula, each, *ways) for each in samples):
                    x = _lowered(build, self.tree) if lowered else self.x
                    proved = with_key and self._always_a_key()
                    return Settled(x, assumed=with_key and not proved, proved=proved)
        return None

    def _is_equal(
        self, formula: Formula, sample: Rows, literal: Literal | None, lowered: bool, with_key: bool
    ) -> bool:
        held = torch.ones_like(sample.logits, dtype=torch.bool)
        if literal is not None:
            held = _held(literal, sample)
        kept = held.to(sample.logits.dtype)
        logits = _evaluate(self.tree, sample, False)
        try:
            old = formula.weights(logits, kept)
            new = formula.raised(_evaluate(self.tree, sample, True) if lowered else logits, kept)
        except RuntimeError:  # torch has no such kernel for the dtype
            return False
        if with_key:
            found = (_evaluate(self.tree, sample, True) > WEAKEST_FILL) & held
            there = found.any(-1)
            old, new = old[there], new[there]
        return agree(old, new)

    def _always_a_key(self) -> bool:
        """Whether every row is proved to have a key that nothing hides."""
        if self._reader is None or self._unknown or not self._keys_last:
            return False
        parts = [part for part in self._visible if part is not None]
        if len(parts) < len(self._visible):
            return False
        domain = self._reader.domain
        return domain.always_a_key(domain.simplify(conjunction(*parts)))

    def _read(self, value: Value, index: Index | None, depth: int, *, is_logits: bool) -> Tree:
        node = value.producer
        if self._moderates.holds(value, is_logits=is_logits):
            return Moderate(value)
        if (chosen := self._chosen(value, index)) is not None:
            return chosen
        if node is None or depth == 0 or len(node.outputs) != 1:
            return self._opaque(value)

        def into(source: Value, index: Index | None, *, is_added: bool = False) -> Tree:
            return self._read(source, index, depth - 1, is_logits=is_logits and not is_added)

        filling = fill_of(node) or blend_of(node)
        if filling is not None and not math.isnan(filling[3]) and filling[3] < math.inf:
            source, predicate, keep, fill = filling
            inner = into(source, _into(source, index))
            literal = self._literal(predicate, index, keep)
            fill = converted(fill, value.dtype)
            return Filled(node, inner, literal, predicate, keep, fill)
        if node.op in ADDITIVE and attribute(node, "alpha") == 1:
            left, right = node.operands
            first, second = (_into(side, index) for side in (left, right))
            # What is added to a mask is logits; of two inputs either may be the mask.
            is_sum = node.op == "aten.add.Tensor"
            is_bias = is_sum and self._chosen(right, second) is None
            is_term = not is_sum or self._chosen(left, first) is None
            tree = into(left, first, is_added=is_bias)
            return Summed(node, tree, into(right, second, is_added=is_term))
        scaling = scale_of(node)
        if scaling is not None and scaling[1] > 0:
            return Carried(node, into(scaling[0], index), scaling[1])
        above = node.inputs[0] if node.inputs else None
        if above is not None and above.dtype.is_floating_point:
            if widens(node):
                return Carried(node, into(above, index))
            if node.op in LAYOUT:
                found = None
                if index is not None and self._reader is not None:
                    found = source_index(value, index, self._reader.domain)
                return Carried(node, into(above, found[1] if found else None))
        return self._opaque(value)

    def _opaque(self, value: Value) -> Unknown:
        if value not in self._unknown:
            self._unknown.append(value)
        return Unknown(value, self._unknown.index(value))

    def _chosen(self, value: Value, index: Index | None) -> Chosen | None:
        if index is None or self._reader is None:
            return None
        found = self._reader.read(value, index)
        if not isinstance(found, Choice) or any(map(math.isnan, (found.yes, found.no))):
            return None
        if min(found.yes, found.no) > WEAKEST_FILL:
            return None
        is_low = found.yes <= WEAKEST_FILL, found.no <= WEAKEST_FILL
        visible = {
            (False, False): TRUE,
            (False, True): found.predicate,
            (True, False): negation(found.predicate),
            (True, True): Const(False),
        }[is_low]
        return Chosen(value, self._atom(found.predicate, visible), found.yes, found.no)

    def _literal(self, predicate: Value, index: Index | None, keep: bool) -> Literal:
        """Where a tensor is `keep`, which is visible."""
        place = _into(predicate, index)
        if place is not None and self._reader is not None:
            found = self._reader.read(predicate, place)
            if isinstance(found, Choice) and {found.yes, found.no} <= {0.0, 1.0}:
                held = self._holds(found, keep)
                return self._atom(held, held)
        key = ("tensor", predicate)
        self._visible.append(None)
        if key not in self._atoms:
            self._atoms.append(key)
        return Literal(self._atoms.index(key), keep)

    @staticmethod
    def _holds(found: Choice, keep: bool) -> Predicate:
        if found.yes == found.no:
            return Const((found.yes == 1) == keep)
        return found.predicate if (found.yes == 1) == keep else negation(found.predicate)

    def _atom(self, predicate: Predicate, visible: Predicate) -> Literal:
        assert self._reader is not None
        predicate = self._reader.domain.simplify(predicate)
        self._visible.append(visible)
        if (opposite := negation(predicate)) in self._atoms:
            return Literal(self._atoms.index(opposite), False)
        if predicate not in self._atoms:
            self._atoms.append(predicate)
        return Literal(self._atoms.index(predicate))


def _into(value: Value, index: Index | None) -> Index | None:
    """The index into an operand that is broadcast to what `index` is of."""
    if index is None or len(value.shape) > len(index):
        return None
    return aligned(value, index)


def _held(literal: Literal, sample: Rows) -> torch.Tensor:
    atom = sample.atoms[literal.atom]
    return atom if literal.holds else ~atom


def _evaluate(tree: Tree, sample: Rows, lowered: bool) -> torch.Tensor:
    """The logits of sample rows; `lowered`: with -inf in the place of every fill."""

    def low(fill: float) -> float:
        return -math.inf if lowered and fill <= WEAKEST_FILL else fill

    def of(value: Value) -> torch.dtype:
        return torch.float64 if sample.is_wide else value.dtype

    match tree:
        case Moderate():
            return sample.logits
        case Unknown(_, place):
            return sample.unknown[place]
        case Chosen(value, literal, yes, no):
            first, second = (torch.tensor(low(n), dtype=of(value)) for n in (yes, no))
            return torch.where(_held(literal, sample), first, second)
        case Filled(node, source, literal, _, _, fill):
            inner = _evaluate(source, sample, lowered)
            return inner.to(of(node.output)).masked_fill(~_held(literal, sample), low(fill))
        case Summed(node, left, right):
            sides = [_evaluate(side, sample, lowered) for side in (left, right)]
            if isinstance(right, Moderate):
                sides[1] = sides[1].flip(-1) / 2  # other numbers than those that it is added to
            first, second = (side.to(of(node.output)) for side in sides)
            return first + second if node.op == "aten.add.Tensor" else first - second
        case Carried(node, source, factor):
            return _evaluate(source, sample, lowered).to(of(node.output)) * factor


def _fills(tree: Tree) -> Iterator[float]:
    """The finite fills."""
    match tree:
        case Chosen(_, _, yes, no):
            numbers = (yes, no)
        case Filled(_, source, _, _, _, fill):
            yield from _fills(source)
            numbers = (fill, 0.0)
        case Summed(_, left, right):
            yield from _fills(left)
            yield from _fills(right)
            return
        case Carried(_, source):
            yield from _fills(source)
            return
        case _:
            return
    yield from (n for n in numbers if -math.inf < n <= WEAKEST_FILL)


def _lowered(build: Builder, tree: Tree) -> Value:
    """The logits with -inf in the place of every finite fill."""
    value = _value(tree)
    if not any(_fills(tree)):
        return value
    low = build.constant(torch.tensor(-torch.inf, dtype=value.dtype), "masked")
    match tree:
        case Chosen(_, _, yes, no):
            is_low = build("aten.le.Scalar", value, other=min(yes, no) / 2)
            return build("aten.where.self", is_low, low, value)
        case Filled(_, source, _, predicate, keep, fill):
            inner, predicate = _lowered(build, source), build.cast(predicate, torch.bool)
            if fill > WEAKEST_FILL:
                low = build.constant(torch.tensor(fill, dtype=value.dtype), "fill")
            return build("aten.where.self", predicate, *((inner, low) if keep else (low, inner)))
        case Summed(node, left, right):
            inputs = [_lowered(build, side) for side in (left, right)]
            return build(node.op, *inputs, **node.attrs)
        case Carried(node, source):
            old, new = _value(source), _lowered(build, source)
            laid_out = [new if one is old else one for one in node.inputs]
            return build(node.op, *laid_out, **node.attrs)
    return value


def _value(tree: Tree) -> Value:
    return tree.value if isinstance(tree, Moderate | Unknown | Chosen) else tree.node.output
