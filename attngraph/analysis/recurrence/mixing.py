"""Where tokens meet: which values have one axis of tokens, and which of them were mixed."""

from __future__ import annotations

import string
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from attngraph.analysis.layout.contraction import einsum_terms
from attngraph.analysis.layout.moves import (
    Broadcast,
    Copied,
    Cut,
    Interleaved,
    Move,
    Permuted,
    Regrouped,
    move_of,
)
from attngraph.analysis.values.running import run_nodes
from attngraph.analysis.values.widening import widened
from attngraph.errors import IRError
from attngraph.ir import Dim, Graph, Node, ScalarType, TensorType, Value
from attngraph.ir.dims import DIVIDING, product, same, substitute, symbols_of
from attngraph.ir.ops import attribute
from attngraph.ir.slices import backward_slice
from attngraph.ir.traits import (
    ADDMM,
    ANY_CONVOLUTION,
    ATTENTION,
    CAST,
    CAUSAL_CONVOLUTION,
    COMPARISON,
    CUMULATIVE,
    EMBEDDING,
    FEATURE_NORM,
    JOIN,
    LAYOUT,
    LINEAR,
    MATMUL,
    OPAQUE,
    PAD,
    PART,
    POINTWISE,
    RANDOM,
    RECURRENCE,
    SCATTER,
    SOFTMAX,
    TRIANGLE,
)

_OWN = LINEAR | ADDMM | ANY_CONVOLUTION | CAUSAL_CONVOLUTION | EMBEDDING | ATTENTION
_LOOP = "attn.scan"
_NAMESPACES = ("aten", "attn")
_LEAST = 2  # tokens: what is mixed shows from the second on
_LONGEST = 16
MOST = 700  # tokens of a confirming run


class Tokens:
    """The axis of a dim, in the values of a graph."""

    def __init__(self, dim: Dim) -> None:
        self.dim = dim
        self._known: dict[Value, list[int]] = {}

    def axis(self, value: Value) -> int | None:
        """The one axis of tokens; None where there is none, or several.

        A static size may be that of other axes too: it is the one that comes from above.
        """
        found = self._axes(value)
        single = found[0] if len(found) == 1 else None
        return single if single is not None and self._is(value.shape[single]) else None

    def _axes(self, value: Value) -> list[int]:
        """All axes of tokens: two of a table of pairs."""
        if value not in self._known:
            found = [at for at, size in enumerate(_shape(value)) if self._has(size)]
            if isinstance(self.dim, int):
                found = self._from_above(value, found)
            self._known[value] = found
        return self._known[value]

    def _has_axis(self, value: Value) -> bool:
        return self.axis(value) is not None

    def counted(self, size: Dim) -> Dim:
        """A size with the number of tokens for its dim, where these are so many whole chunks: of
        `4 * chunks` tokens, `chunks` is a fourth.
        """
        times = _times(self.dim)
        if times in (None, 1) or isinstance(size, int) or isinstance(self.dim, int):
            return size
        return size.xreplace({name: name / times for name in self.dim.free_symbols})

    def is_in(self, value: Value) -> bool:
        """Whether the number of tokens is in a value's shape at all."""
        if isinstance(self.dim, int) and value.producer is None and not value.is_constant:
            return self.axis(value) is not None
        return any(map(self._has, _shape(value)))

    def _is(self, size: Dim) -> bool:
        return bool(size == self.dim)

    def _has(self, size: Dim) -> bool:
        if isinstance(self.dim, int):
            return size == self.dim
        return not isinstance(size, int) and bool(size.free_symbols & self.dim.free_symbols)

    def _from_sides(self, node: Node) -> set[int]:
        """Where the axes of tokens of a product's operands are in its result."""
        terms, output = _letters(node)
        sides = zip(terms, filter(None, node.inputs), strict=True)
        letters = {term[at] for term, x in sides if (at := self.axis(x)) is not None}
        return {output.index(letter) for letter in letters if letter in output}

    def _from_above(self, value: Value, found: list[int]) -> list[int]:
        """Which axes of that size are of tokens, as far as what made the value says."""
        node, rank = value.producer, len(_shape(value))
        if node is None or not found:
            return found if value.is_constant else [at for at in found if at in _places_of(rank)]
        move = move_of(value)
        if move is not None:
            above = self.axis(move.source)
            kept = {i: at for at in range(len(move.source.shape)) for i in _places(move, at, value)}
            if above is not None:
                return [i for i in found if kept.get(i) == above]
            return [i for i in found if i not in kept]
        inputs = [each for each in node.inputs if each is not None and not each.is_constant]
        inputs = [each for each in inputs if isinstance(each.type, TensorType)]
        if node.op in POINTWISE | CAST | LINEAR | FEATURE_NORM | EMBEDDING:
            aligned = node.op in POINTWISE | CAST  # at the right; pairs of tokens stay such
            if aligned:
                lies = {rank - len(x.shape) + at for x in inputs for at in self._axes(x)}
            else:
                lies = {at for x in inputs if (at := self.axis(x)) is not None}
            return [at for at in found if at in lies]
        if node.op in PAD:
            padded = node.source  # which may be a constant
            changed = [i for i in found if not same(padded.shape[i], value.shape[i])]
            above = self.axis(padded)
            return changed if above is None else [at for at in found if at == above]
        joins = node.op in JOIN | SCATTER and "dim" in node.attrs
        has_tokens = any(map(self._has_axis, inputs))
        if joins and not (has_tokens and len(found) == 1):  # where steps are brought together
            along = attribute(node, "dim") % rank
            return [along] if along in found else found if has_tokens else []
        if not has_tokens and node.op not in JOIN | SCATTER:
            return []
        if len(found) > 1 and node.op in MATMUL:
            pairs = self._from_sides(node)
            if len(pairs) > 1:
                return [at for at in found if at in pairs]
            return [at for at in found if at == rank - 2] or found
        return found


def _places(move: Move, at: int, value: Value) -> list[int]:
    """Where an axis of a layout op's source is in its result."""
    rank = len(value.shape)
    match move:
        case Permuted():
            return [move.inverse[at]]
        case Regrouped():
            source = move.source.shape
            before = product(source[:at])
            each = [i for i in range(rank) if same(value.shape[i], source[at])]
            return [i for i in each if same(product(value.shape[:i]), before)]
        case Cut():
            if move.dim == at:
                return []
            return [at - 1 if move.single and move.dim < at else at]
        case Copied() | Broadcast() | Interleaved():
            return [at + rank - len(move.source.shape)]
    return []


def _letters(node: Node) -> tuple[list[str], str]:
    """A product's operands and result as an einsum's letters, the last axes of each named apart."""
    if node.op == "aten.einsum":
        return einsum_terms(node)
    left, right = (len(value.shape) for value in node.inputs if value is not None)
    rank = len(node.outputs[0].shape)
    before = string.ascii_lowercase[: rank - (left > 1) - (right > 1)]
    row, column = "R" if left > 1 else "", "C" if right > 1 else ""
    kept = (before[len(before) - size :] if size > 0 else "" for size in (left - 2, right - 2))
    first, second = kept
    return [f"{first}{row}S", f"{second}S{column}"], f"{before}{row}{column}"


def _places_of(rank: int) -> tuple[int, ...]:
    """Where an input of static shape may have its tokens: behind the batch, or behind the heads."""
    return (1, 2) if rank == 4 else (1,)


def is_own(node: Node) -> bool:
    """Whether what a node gives is a reading's own ground: a product with weights, an attention.

    No recurrence reaches beyond it, and what it gives may be any number.
    """
    if node.op in MATMUL:  # a third factor may be a table
        computed = [value for value in node.inputs if value is not None and not value.is_constant]
        return len(computed) < min(2, len(node.inputs))
    return node.op in _OWN or (node.op in RECURRENCE and node.op != _LOOP)


def mixed(graph: Graph, tokens: Tokens) -> list[Value]:
    """The values with one axis of tokens in which tokens have met, in the graph's order.

    Not those that a softmax has weighed, and of each row's own functions the first.
    """
    met: set[Value] = set()
    weighed: set[Value] = set()
    found: list[Value] = []

    def is_row(value: Value) -> bool:
        return tokens.axis(value) is not None and len(value.shape) in (3, 4)

    for node in graph:
        inputs = [value for value in node.inputs if value is not None]
        if not inputs or is_own(node):
            continue
        if _weighs(node, inputs[0], tokens) or any(value in weighed for value in inputs):
            weighed.update(node.outputs)
        elif any(value in met for value in inputs) or _mixes(node, inputs, tokens):
            before = [value for value in inputs if value in met]
            met.update(node.outputs)
            follows = node.op in POINTWISE | LAYOUT | CAST and len(before) == 1
            if not (follows and is_row(before[0])):
                found += filter(is_row, node.outputs)
    return found


def _weighs(node: Node, scores: Value, tokens: Tokens) -> bool:
    """Whether a softmax goes over tokens, or over what may be some: one over features does not."""
    if node.op not in SOFTMAX:
        return node.op in ATTENTION
    at = attribute(node, "dim") % len(scores.shape)
    return tokens.axis(scores) in (None, at)


def _mixes(node: Node, inputs: Sequence[Value], tokens: Tokens) -> bool:
    """Whether a node reads rows of several tokens, or makes what isn't one row for each."""
    if node.op in CUMULATIVE or node.op == _LOOP:
        return any(tokens.axis(value) is not None for value in inputs)
    one = [value for value in inputs if tokens.axis(value) is not None]
    several = [v for v in inputs if tokens.is_in(v) and tokens.axis(v) is None]
    leaves = any(tokens.axis(value) is None for value in node.outputs)
    enters = any(tokens.axis(value) is not None for value in node.outputs)
    return bool(one and leaves) or bool(several and (one or enters))


def has_order(leaves: Iterable[Value], nodes: Iterable[Node], tokens: Tokens) -> bool:
    """Whether anything in a region tells earlier tokens from later ones, as a recurrence must: a
    running sum, a triangle, a comparison, one token after the other, or a table of pairs.

    False also where it holds ops that no reading sees through, such as products grouped by expert.
    """
    nodes = list(nodes)
    if any(node.op in OPAQUE or node.op.partition(".")[0] not in _NAMESPACES for node in nodes):
        return False
    for node in nodes:
        if node.op in CUMULATIVE | TRIANGLE | COMPARISON or node.op == _LOOP:
            return True
        source = node.inputs[0] if node.op in PART and node.inputs else None
        if source is not None and tokens.axis(source) == attribute(node, "dim") % len(source.shape):
            return True
    tables = {leaf for leaf in leaves if leaf.is_constant}
    for node in nodes:  # which may be cut to the length
        if node.op in LAYOUT and node.inputs and node.inputs[0] in tables:
            tables.update(node.outputs)
    return any(sum(size == tokens.dim for size in _shape(table)) > 1 for table in tables)


def dims_of_tokens(graph: Graph) -> list[Dim]:
    """The dims that may count tokens: named ones, multiples of one as `4 * chunks`, and static ones
    where inputs have tokens."""
    found: dict[Dim, None] = {}
    for value in graph.inputs:
        shape = _shape(value)
        for at, size in enumerate(shape):
            is_static = at in _places_of(len(shape)) and isinstance(size, int) and size >= _LEAST
            if is_static or _times(size) is not None:
                found.setdefault(size)
    return list(found)


def _times(size: Dim) -> int | None:
    """The k of a size k · n, None of another."""
    if isinstance(size, int) or len(size.free_symbols) != 1:
        return None
    (name,) = size.free_symbols
    times = size / name
    return int(times) if times.is_Integer and times > 0 else None


def sizes_around(dims: Iterable[Any]) -> list[int]:
    """Lengths on both sides of what expressions divide by: of one chunk, and of two."""
    chunks: set[int] = set()
    for value in dims:
        for part in sympy.preorder_traversal(value) if isinstance(value, sympy.Basic) else ():
            if part.func.__name__ in DIVIDING:
                chunks.update(int(arg) for arg in part.args[1:] if arg.is_Integer and arg > 1)
            if part.is_Rational and not part.is_Integer:
                chunks.add(int(part.q))
    return sorted({n for chunk in chunks for n in (chunk - 1, chunk, chunk + 1, 2 * chunk + 1)})


@dataclass(frozen=True)
class Trace:
    """What a slice of a graph computes of drawn leaves, in float64."""

    sizes: Mapping[str, int]
    memory: Mapping[Value, Any]

    def __getitem__(self, value: Value) -> torch.Tensor | None:
        found = self.memory.get(value)
        return found if isinstance(found, torch.Tensor) else None


def leaves_of(roots: Iterable[Value], found: Collection[Value]) -> tuple[list[Value], list[Node]]:
    """What the roots are computed from, down to a reading's own ground and what was found."""

    def is_leaf(value: Value) -> bool:
        return value in found or (value.producer is not None and is_own(value.producer))

    return backward_slice(roots, is_leaf)


@dataclass
class Runs:
    """Evaluates nodes on drawn leaves, and keeps what it computed for the next result of a region.
    `given` are numbers of leaves that aren't drawn.

    Weights have their values where they are known. Integers are ones, so that no token is padding,
    or with states ones and zeros, and counts of tokens where they have no axis of these: under a
    count of 1, what all tokens are summed to is a running sum. Nodes that fail leave no value, and
    neither do leaves that a model has for longer inputs alone, as a convolution's n // 10 - 1 rows.
    """

    graph: Graph
    tokens: Tokens
    given: Mapping[Value, torch.Tensor] = field(default_factory=dict)
    _kept: dict[tuple[int, int, bool], dict[Value, Any]] = field(default_factory=dict)

    def __call__(
        self,
        leaves: Sequence[Value],
        nodes: Sequence[Node],
        length: int,
        *,
        seed: int,
        with_states: bool = False,
        keep: bool = False,
    ) -> Trace:
        """So many tokens, as far as their range allows. `with_states`: leaves without tokens, as
        states are, are drawn as well; else they are zero."""
        sizes = sizes_for(self.graph, self.tokens, length)
        key = length, seed, with_states
        memory = self._kept.get(key, {}) if keep else {}
        if not any(value in memory for node in nodes for value in node.outputs):
            memory = {}  # another region
        if keep:
            self._kept[key] = memory
        for value in leaves:
            if value not in memory and _exists(value, sizes):
                known = self.given.get(value)
                drawn = _drawn(value, sizes, self.tokens, seed, with_states)
                memory[value] = drawn if known is None else known
        _evaluate(nodes, memory, sizes)
        return Trace(sizes, memory)

    def again(
        self, nodes: Sequence[Node], trace: Trace, given: Mapping[Value, torch.Tensor]
    ) -> Trace:
        """The nodes once more, with other numbers of some values in front of them."""
        made = {value for node in nodes for value in node.outputs}
        memory = {value: x for value, x in trace.memory.items() if value not in made}
        memory.update(given)
        _evaluate(nodes, memory, trace.sizes)
        return Trace(trace.sizes, memory)


def _evaluate(nodes: Sequence[Node], memory: dict[Value, Any], sizes: Mapping[str, int]) -> None:
    """Adds what the nodes give that aren't known; those that fail leave no value."""
    for node in nodes:
        if node.op not in RANDOM and not all(value in memory for value in node.outputs):
            run_nodes([node], memory, sizes)


def _exists(value: Value, sizes: Mapping[str, int]) -> bool:
    """Whether a tensor has a shape at these sizes."""
    try:
        return all(size >= 0 for size in substitute(list(_shape(value)), sizes))
    except IRError:
        return False


def _drawn(
    value: Value,
    sizes: Mapping[str, int],
    tokens: Tokens,
    seed: int,
    with_states: bool,
) -> Any:
    if isinstance(value.type, ScalarType):
        return sizes.get(value.type.name or "", 1)
    if value.data is not None and not value.data.is_meta:
        return widened(value.data.detach())
    shape = substitute(list(value.shape), sizes)
    random = torch.Generator().manual_seed(zlib.crc32(f"{value.name} {seed}".encode()))
    if not value.dtype.is_floating_point:
        above = 2 if tokens.is_in(value) or value.dtype == torch.bool else _LONGEST
        some = torch.randint(0, above, shape, generator=random)
        return (some if with_states else torch.ones(shape)).to(value.dtype)
    is_state = value.producer is None and not value.is_constant and not tokens.is_in(value)
    drawn = torch.randn(shape, generator=random, dtype=torch.float64)
    return drawn * 0 if is_state and not with_states else drawn


def _shape(value: Value) -> tuple[Dim, ...]:
    return value.shape if isinstance(value.type, TensorType) else ()


def sizes_for(graph: Graph, tokens: Tokens, length: int) -> dict[str, int]:
    """Small and distinct sizes of the dims, with so many tokens, or some more where these are whole
    chunks, as far as their range allows."""
    sizes = {}
    name = next(iter(symbols_of(tokens.dim)), None)
    length = -(-length // (_times(tokens.dim) or 1))
    for place, (each, info) in enumerate(graph.dims.items()):
        size = max(length if each == name else 2 + place, info.low)
        sizes[each] = size if info.high is None else min(size, info.high)
    return sizes
