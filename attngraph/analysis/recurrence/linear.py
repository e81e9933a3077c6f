"""Recurrences of outer products, whatever their form: read off what the first tokens give.

A loop, chunks with a state between them, a product under a mask of decays and cumulative sums all
compute o_t = scale · q_tᵀ S_t. Nothing is matched by the shape of code. The region between the
products with weights and a result o is run once, on drawn numbers and a state of zeros, and the
terms are found among the values in it by what they must satisfy:

- o_0 = scale · (q_0·k_0) β_0 v_0 in each head, whatever the decay: v_0 is parallel to o_0, and of
  q, k and β only the right ones leave one number for scale;
- o_1 is affine in the decay a_1, whose slope and offset q, k, v and β give: so a_1 is known, and
  the value that is a, or log a, at every token is looked up;
- all tokens of both must then agree, at lengths on both sides of each chunk size that occurs among
  the sizes, and with a state that isn't zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace

import torch

from attngraph.analysis.recurrence.mixing import (
    MOST,
    Runs,
    Tokens,
    Trace,
    has_order,
    leaves_of,
    sizes_around,
)
from attngraph.analysis.recurrence.own_places import is_of_own
from attngraph.analysis.recurrence.tables import exact_tables
from attngraph.analysis.recurrence.terms import (
    Decay,
    Operand,
    Recurrence,
    State,
    Unread,
    as_state,
)
from attngraph.analysis.values.intervals import Intervals
from attngraph.analysis.values.running import is_near
from attngraph.ir import Graph, Node, TensorType, Value
from attngraph.ir.dims import bounds

_FIRST = 7  # tokens of the run in which the terms are looked for
_EXACT = 1e-8  # of float64 against itself, after some tens of tokens
_NO_DECAY = 1e-12  # Lightning attention's last layers have slopes of 1e-8, a tenth after 10⁷ tokens
_MANY = 48  # operands of one width
_FEW = 4  # heads
_NAMED = 12  # candidates for each term: the last ones are what the formula reads


def read_linear(
    graph: Graph, tokens: Tokens, candidates: Sequence[Value], found: dict[Value, Recurrence]
) -> Iterator[Recurrence | Unread]:
    """Each recurrence that gives one of the values, in their order; `found` are those known."""
    runs = Runs(graph, tokens)
    for output in candidates:
        if not _is_float(output) or len(output.shape) not in (3, 4):
            continue
        leaves, nodes = leaves_of([output], found)
        if any(leaf in found for leaf in leaves) or not has_order(leaves, nodes, tokens):
            continue
        reading = _Reading(runs, output, leaves, nodes).read()
        if isinstance(reading, Recurrence):
            found[output] = reading
        if reading is not None:
            yield reading


class _Reading:
    def __init__(
        self, runs: Runs, output: Value, leaves: Sequence[Value], nodes: Sequence[Node]
    ) -> None:
        self.runs, self.output = runs, output
        self.graph, self.tokens = runs.graph, runs.tokens
        self.leaves, self.nodes = leaves, nodes
        self.values = [value for node in nodes for value in node.outputs]
        self.values = [*(v for v in leaves if v not in self.values), *self.values]
        self.intervals = Intervals()
        sizes = (v.shape[-2] for v in self.values if _is_float(v) and len(v.shape) > 3)
        self.exact: dict[tuple[float, ...], tuple[Decay, _Reading] | None] = {}
        self.heads = sorted({size for size in sizes if isinstance(size, int)} - {1})

    def read(self) -> Recurrence | Unread | None:
        first = self._trace(_FIRST, seed=0)
        unread: Unread | None = None
        for output in self._outputs():
            o = output.of(first)
            if o is None or not o.numel() or o.shape[1] < 2 or not bool(torch.isfinite(o).all()):
                continue
            for partial in self._partial(first, output, o):
                decays = list(self._decays(first, partial, o))
                for decay in decays:
                    found = self._confirmed(replace(partial, decay=decay))
                    if found is not None:
                        return found
                if not decays and unread is None and partial.value is not None:
                    assert self.output.producer is not None
                    unread = Unread(self.output.producer, "its decay")
        return None

    def _trace(self, length: int, *, seed: int, with_states: bool = False) -> Trace:
        given = self.leaves, self.nodes, length
        return self.runs(*given, seed=seed, with_states=with_states, keep=length == _FIRST)

    def _outputs(self) -> Iterator[Operand]:
        yield from _vectors(self.output, self.tokens)
        for heads in self.heads:
            yield from _merged(self.output, self.tokens, heads)

    def _operands(self, o: torch.Tensor) -> Iterator[Operand]:
        """Every value as rows of one head, or of several; merged heads first, the least likely.

        Of queries and keys there may be fewer than of o (B, T, H, D), each for a group of heads.
        """
        values = [v for v in self.values if v is not self.output and _is_float(v)]
        heads = o.shape[2]
        fewer = [each for each in self.heads if heads % each == 0 and each < heads]
        for value in values:
            for own in (*(fewer if o.shape[3] > 1 else ()), heads):
                yield from _merged(value, self.tokens, own)
        for value in values:
            yield from _vectors(value, self.tokens)

    def _partial(self, trace: Trace, output: Operand, o: torch.Tensor) -> Iterator[Recurrence]:
        """Queries, keys, values and update rates that give the first token's result."""
        heads = o.shape[2]
        traces = [trace]
        if o.shape[0] == 1:  # which any query and key explain that all heads share
            traces += [self._trace(_FIRST, seed=seed) for seed in range(2, 1 + _FEW)]

        def start(each: Operand) -> torch.Tensor | None:
            found = [x for t in traces if (x := each.of(t)) is not None and _fits(x, o)]
            return torch.cat([x[:, 0] for x in found]) if len(found) == len(traces) else None

        first = start(output)
        if first is None:
            return
        size = float(first.abs().max())
        given = [(each, start(each)) for each in self._operands(o)]
        rows = [(each, x) for each, x in given if x is not None]
        few = slice(None, None, -(-heads // _FEW))  # heads that tell most candidates apart
        values: list[tuple[Operand | None, torch.Tensor]] = []
        for each, x in rows:
            v = _to_heads(x, heads)
            if v is None or v.shape != first.shape:
                continue
            along = (first * v).sum(-1) / v.square().sum(-1)
            if bool((first - along[..., None] * v).abs().max() <= _EXACT * size):
                values.append((each, along))
        if first.shape[-1] == 1:  # what is written may be the key alone, the simplest reading
            values.append((None, first[..., 0]))
        if not values:
            return
        wide = [(each, _to_heads(x, heads)) for each, x in rows]
        sized = [(each, x) for each, x in wide if x is not None]
        rates = [(e, x[..., 0]) for e, x in sized if x.shape[-1] == 1 and _is_rate(e.of(trace))]
        widths = {x.shape[-1] for _, x in sized if x.shape[-1] > 1}
        for width in widths:
            group = [(each, x) for each, x in sized if x.shape[-1] == width][-_MANY:]
            table = torch.stack([x[:, few] for _, x in group])
            dots = torch.einsum("ibhd,jbhd->ijbh", table, table)
            for value, along in reversed(values[-_NAMED:]):
                for rate, b0 in [(None, torch.ones_like(along)), *rates]:
                    near = _one_number(along[:, few], dots * b0[:, few]).isfinite()
                    for i, j in near.nonzero().flip(0).tolist():
                        (query, q), (key, k) = group[i], group[j]
                        scale = float(_one_number(along, (q * k).sum(-1) * b0))
                        if i != j and math.isfinite(scale):
                            yield Recurrence(output, query, key, value, rate, None, scale)

    def _decays(self, trace: Trace, found: Recurrence, o: torch.Tensor) -> Iterator[Decay | None]:
        """What the second token's result says of the decay, and the values that are it."""
        heads = o.shape[2]

        def two(part: Operand | None) -> torch.Tensor | None:
            x = None if part is None else part.of(trace)
            return None if x is None else _to_heads(x[:, :2], heads)

        q, k = two(found.query), two(found.key)
        v = torch.ones_like(o[:, :2]) if found.value is None else two(found.value)
        b = two(found.beta)
        if q is None or k is None or v is None:
            return
        rate = torch.ones_like(k[..., :1]) if b is None else b
        s, b1 = found.scale, rate[:, 1]
        state = (rate[:, 0] * k[:, 0])[..., None] * v[:, 0][..., None, :]
        dot = (q[:, 1] * k[:, 1]).sum(-1, keepdim=True)
        offset = s * dot * b1 * v[:, 1]
        seen = (q[:, 1][..., None] * state).sum(-2)
        known = (k[:, 1][..., None] * state).sum(-2)
        slope = s * (seen - (0 if b is None else 1) * b1 * dot * known)
        rest = o[:, 1] - offset
        # Feature maps with zeros, as relu's, may leave rows of which the decay changes nothing.
        told = slope.square().sum(-1) > 0
        a = (rest * slope).sum(-1) / slope.square().sum(-1)
        size = float(o[:, 1].abs().max())
        near = _EXACT

        def is_a(row: torch.Tensor, within: float = near) -> bool:
            return bool((row - a)[told].abs().max() <= within)

        lasting = torch.where(told, a, 0)[..., None] * slope
        if bool(told.any()) and bool((rest - lasting).abs().max() <= near * size):
            if is_a(torch.ones_like(a), _NO_DECAY):
                yield None
            for each in self._operands(o):
                row = self._row(each, trace, heads)
                if row is not None and row.shape == a.shape:
                    if is_a(row.exp()):
                        yield Decay(each, True)
                    elif is_a(row) and self._has_log(each):
                        yield Decay(each, False)
            is_known = all(x.data is not None for x in self.leaves if x.is_constant)
            constant = torch.where(told, a, 0).sum(0) / told.sum(0)
            if is_known and bool((constant > 0).all()) and is_a(constant.expand_as(a)):
                yield Decay(constant=constant)
        yield from self._featured(trace, found, o)

    def _has_log(self, each: Operand) -> bool:
        """Whether none of its numbers is below 0, drawn or not: the operator takes logarithms."""
        return self.intervals.of(each.value)[0] >= 0

    def _row(self, each: Operand, trace: Trace, heads: int) -> torch.Tensor | None:
        """The second token's numbers of an operand that has one for each head."""
        x = each.of(trace)
        row = None if x is None or x.shape[-1] != 1 else _to_heads(x[:, 1], heads)
        return None if row is None else row[..., 0]

    def _featured(self, trace: Trace, found: Recurrence, o: torch.Tensor) -> Iterator[Decay]:
        """Decays of each feature of a key, which the confirmation tells apart."""
        width = found.key.features()
        for each in reversed(list(self._operands(o))):
            if each.features() == width and each.value not in _own_values(found):
                x = each.of(trace)
                if x is not None and bool((x <= 0).all()):
                    yield Decay(each, True)
                elif x is not None and bool(((x > 0) & (x <= 1)).all()) and self._has_log(each):
                    yield Decay(each, False)

    def _confirmed(self, found: Recurrence) -> Recurrence | None:
        """The recurrence, with its state, if all tokens agree at every length, of decays that were
        rounded in tables too."""
        constant = None if found.decay is None else found.decay.constant
        if constant is None:
            return self._compared(found)
        key = tuple(constant.tolist())
        if key not in self.exact:
            self.exact[key] = self._with_exact_tables(constant)
        exact = self.exact[key]
        return None if exact is None else exact[1]._compared(replace(found, decay=exact[0]))

    def _with_exact_tables(self, constant: torch.Tensor) -> tuple[Decay, _Reading] | None:
        """A constant decay as its tables have it, and the reading of these as they were."""
        leaves = [leaf for leaf in self.leaves if leaf.is_constant]
        bodies = [x for node in self.nodes for x in node.attrs.values() if isinstance(x, Graph)]
        inside = [value for body in bodies for value in body.constants.values()]
        found = exact_tables(leaves, inside, constant.log())
        if found is None:
            return None
        g, tables = found
        if not tables:
            return Decay(constant=constant), self
        reading = copy(self)
        reading.runs = Runs(self.graph, self.tokens, tables)
        return Decay(constant=g.exp(), tables=tables), reading

    def _compared(self, found: Recurrence) -> Recurrence | None:
        states = list(self._pasts())
        stateless = self._agrees(found, self._trace(_FIRST, seed=0))
        if not stateless:
            return None
        trace = self._trace(_FIRST, seed=1, with_states=True)
        for past in (None, *states):
            each = replace(found, past=past)
            if self._agrees(each, trace) and all(self._agrees(each, t) for t in self._others()):
                return each if is_of_own(each, self.runs, trace) else None
        return None

    def _pasts(self) -> Iterator[State]:
        for leaf in self.leaves:
            is_input = leaf.producer is None and not leaf.is_constant and _is_float(leaf)
            if is_input and len(leaf.shape) in (3, 4) and not self.tokens.is_in(leaf):
                yield from (State(leaf, turned) for turned in (False, True))

    def _others(self) -> Iterator[Trace]:
        """Runs at lengths on both sides of each chunk's, as far as the range allows."""
        dims: list[object] = []
        for node in self.nodes:
            dims += [dim for value in node.outputs for dim in getattr(value.type, "shape", ())]
            dims += _numbers(node.attrs.values())
        low, high = bounds(self.tokens.dim, self.graph.dims)
        lengths = {low, low + 1, 3, 12, *sizes_around(dims)}
        for length in sorted(lengths):
            if low <= length <= min(high or MOST, MOST):
                yield self._trace(length, seed=length + 2, with_states=True)

    def _agrees(self, found: Recurrence, trace: Trace) -> bool:
        o, made = found.output.of(trace), found.run(trace)
        if o is None or made is None or made[0].shape != o.shape:
            return False
        return is_near(made[0], o)


def presents(
    graph: Graph, tokens: Tokens, found: Recurrence, candidates: Iterable[Value]
) -> State | None:
    """Which of the values is the last state."""
    runs = Runs(graph, tokens, found.tables)
    for value in candidates:
        if len(value.shape) not in (3, 4) or tokens.axis(value) is not None:
            continue
        leaves, nodes = leaves_of([found.output.value, value], ())
        for turned in (False, True):
            agree = True
            for length in (_FIRST, 12):
                trace = runs(leaves, nodes, length, seed=length, with_states=True)
                made = found.run(trace)
                if made is None:
                    return None
                shape = made[1].shape
                state = as_state(trace[value], turned, shape[0], shape[1])
                agree = agree and state is not None and is_near(state, made[1])
            if agree:
                return State(value, turned)
    return None


def _vectors(value: Value, tokens: Tokens) -> Iterator[Operand]:
    """The ways to read a value as (B, T, H, D): what axes it has beside that of tokens, in order.

    Axes of size 1 at the end may be features or a place for them.
    """
    at = tokens.axis(value)
    if at is None:
        return
    rest = [axis for axis in range(len(value.shape)) if axis != at]
    if len(rest) == 3:
        yield Operand(value, (rest[0], at, rest[1], rest[2]))
    elif len(rest) == 2:
        yield Operand(value, (rest[0], at, None, rest[1]))
        yield Operand(value, (rest[0], at, rest[1], None))
    elif len(rest) == 1:
        yield Operand(value, (rest[0], at, None, None))


def _merged(value: Value, tokens: Tokens, heads: int) -> Iterator[Operand]:
    """A value (B, T, H·D), or (T, B, H·D), as (B, T, H, D), of a number of heads."""
    at = tokens.axis(value)
    if at not in (0, 1) or len(value.shape) != 3 or heads == 1:
        return
    width = value.shape[2]
    if isinstance(width, int) and width % heads == 0 and width > heads:
        yield Operand(value, (1 - at, at, None, 2), heads)


def _is_float(value: Value) -> bool:
    return isinstance(value.type, TensorType) and value.dtype.is_floating_point


def _numbers(values: Iterable[object]) -> list[object]:
    found: list[object] = []
    for value in values:
        found += _numbers(value) if isinstance(value, (list, tuple)) else [value]
    return found


def _fits(x: torch.Tensor, o: torch.Tensor) -> bool:
    is_there = x.numel() > 0 and x.shape[:2] == o.shape[:2]
    return is_there and bool(torch.isfinite(x).all()) and bool(x[:, 0].abs().max() > 0)


def _to_heads(x: torch.Tensor, heads: int) -> torch.Tensor | None:
    """(…, H, D) with as many heads, each repeated; None where they don't divide."""
    own = x.shape[-2]
    if own == heads:
        return x
    if own == 1:
        return x.expand(*x.shape[:-2], heads, x.shape[-1])
    return x.repeat_interleave(heads // own, -2) if heads % own == 0 else None


def _is_rate(x: torch.Tensor | None) -> bool:
    """Whether numbers vary from token to token, as those of a rate do."""
    return x is not None and bool((x - x[:, :1]).abs().max() > 0)


def _one_number(found: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """c (I, J), where `found` (B, H) is c times `of` (I, J, B, H); NaN where there is none."""
    c = (found * of).sum((-1, -2)) / of.square().sum((-1, -2))
    near = (found - c[..., None, None] * of).abs().amax((-1, -2)) <= _EXACT * found.abs().max()
    return torch.where(near & (c != 0), c, torch.nan)


def _own_values(found: Recurrence) -> set[Value]:
    return {part.value for part in (found.query, found.key, found.value) if part is not None}
