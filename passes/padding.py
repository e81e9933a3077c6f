"""Which tokens are padding, and which values are read at padding.

A token whose key is masked in an attention is padding if the user says so (`ignore_padded_rows`).
Then what is computed at its row matters only where an op reads it for a row that is none: that is
followed backwards from the graph's outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from attngraph.ir import Graph, Node, Value
from attngraph.ir.dims import same_shape
from attngraph.ir.ops import attribute, input_of
from attngraph.passes.choices import Choice
from attngraph.passes.index_maps import Index, aligned, settled, source_index
from attngraph.passes.mask_reading import Reader
from attngraph.passes.predicates import (
    BATCH,
    KEY,
    QUERY,
    VARIABLES,
    And,
    Dense,
    Domain,
    Linear,
    Not,
    Or,
    Predicate,
    conjunction,
    conjuncts,
    elements,
    negation,
    substitute,
    variables,
)
from attngraph.passes.row_wise import Rows, has_rows, row_operands
from attngraph.passes.scalars import is_cast


@dataclass(frozen=True)
class Masked:
    """An attention, and what its mask requires of a key: all of `parts`.

    `own_key`: a query whose own key fulfils `padding` is proved to attend to it.
    """

    node: Node
    rows: Rows
    parts: frozenset[Predicate]
    padding: Predicate
    own_key: bool
    reader: Reader


def masked_attentions(graph: Graph) -> list[Masked]:
    """The attentions without a past whose mask hides keys by a (B, T) tensor made from inputs."""
    found = []
    for node in graph:
        if node.op != "attn.attention" or input_of(node, "past_key") is not None:
            continue
        mask, query, key = (input_of(node, name) for name in ("mask", "query", "key"))
        if mask is None:
            continue
        rows: Rows = (key.shape[0], key.shape[1])
        sizes = query.shape[0], attribute(node, "heads"), query.shape[1], key.shape[1]
        domain = Domain(sizes, graph.dims)
        reader = Reader(domain)
        index = tuple(map(domain.index, VARIABLES))
        read = domain.simplify(reader.predicate(mask, aligned(mask, index)))
        parts = frozenset(conjuncts(read))
        padding = [part for part in conjuncts(read) if _is_padding(part, reader)]
        if not padding:
            continue
        hides = conjunction(*padding)
        own = read
        if attribute(node, "causal"):
            own = conjunction(own, Linear(index[3] - index[2]))
        own = domain.simplify(substitute(own, KEY, QUERY))
        wanted = conjuncts(substitute(hides, KEY, QUERY))
        has_own = same_shape(query.shape[:2], rows) and set(conjuncts(own)) <= set(wanted)
        found.append(Masked(node, rows, parts, hides, has_own, reader))
    return found


def _is_padding(part: Predicate, reader: Reader) -> bool:
    """Whether it depends on the key and its element of the batch alone, and on what is given."""
    used = variables(part)
    if KEY not in used or not used <= {BATCH, KEY}:
        return False
    read = list(_tensors(part, reader))
    return bool(read) and all(map(_is_given, read))


def _tensors(part: Predicate, reader: Reader) -> Iterator[Value]:
    """What it reads besides positions and constants."""
    match part:
        case Dense(value) if value.data is None:
            yield value
        case Linear(expr):
            yield from (reader.integers[e.func.__name__] for e in elements(expr))
        case Not(operand):
            yield from _tensors(operand, reader)
        case And(operands) | Or(operands):
            for one in operands:
                yield from _tensors(one, reader)


def _is_given(value: Value) -> bool:
    """Whether no weights are in it: what a model finds out by itself is no padding."""
    queue, seen = [value], {value}
    for above in queue:
        if above.is_constant and above.shape and above.dtype.is_floating_point:
            return False
        for source in above.producer.inputs if above.producer is not None else ():
            if source is not None and source not in seen:
                seen.add(source)
                queue.append(source)
    return any(above.producer is None and not above.is_constant for above in queue)


@dataclass
class Tokens:
    """The rows of one padding mask: how its tokens' values are read.

    `rows` is (B, T) and `sites` are the attentions that hide its padding as keys. `full` maps each
    value that is read at padding too to the node that reads it so (None: the graph returns it);
    `singles` are the places along T that are read one by one. `linked` are the values that have
    these tokens as rows.
    """

    padding: Predicate
    rows: Rows
    sites: Sequence[Masked]
    linked: frozenset[Value] = frozenset()
    full: dict[Value, Node | None] = field(default_factory=dict)
    singles: dict[Node, int] = field(default_factory=dict)


def find_tokens(graph: Graph) -> list[Tokens]:
    """One entry for each distinct padding mask, in the order of the attentions."""
    masked = masked_attentions(graph)
    found: list[Tokens] = []
    for first in masked:
        if any(t.padding == first.padding and same_shape(t.rows, first.rows) for t in found):
            continue
        wanted = frozenset(conjuncts(first.padding))
        sites = [s for s in masked if wanted <= s.parts and same_shape(s.rows, first.rows)]
        tokens = Tokens(first.padding, first.rows, sites)
        tokens.linked = _linked(graph, tokens)
        _Backwards(graph, tokens).read()
        found.append(tokens)
    return found


def _linked(graph: Graph, tokens: Tokens) -> frozenset[Value]:
    """Values whose rows are those of a key or value: by row-wise ops, and query to context."""
    leader: dict[Value, Value] = {}

    def root(value: Value) -> Value:
        leader.setdefault(value, value)
        while leader[value] is not value:
            leader[value] = leader[leader[value]]
            value = leader[value]
        return value

    def join(values: Iterable[Value]) -> None:
        first, *others = values
        for other in others:
            leader[root(other)] = root(first)

    for node in graph:
        if node.op == "attn.attention":
            query, key, value = node.inputs[:3]
            assert query is not None
            assert key is not None
            assert value is not None
            if has_rows(query, tokens.rows):
                join([query, node.outputs[0]])
            if has_rows(key, tokens.rows):
                join([key, value])
            continue
        operands = row_operands(node, tokens.rows)
        if operands is not None:
            join([*operands, *node.outputs])
    ours = {root(value) for site in tokens.sites for value in site.node.inputs[1:3] if value}
    return frozenset(value for value in list(leader) if root(value) in ours)


class _Backwards:
    """Fills `full` and `singles` of some tokens."""

    def __init__(self, graph: Graph, tokens: Tokens) -> None:
        self.graph, self.tokens = graph, tokens

    def read(self) -> None:
        tokens = self.tokens
        sites = {site.node: site for site in tokens.sites}
        self._demand((v for v in self.graph.outputs if v not in tokens.linked), None)
        for node in reversed(self.graph):
            if node in sites:
                self._attention(sites[node])
            elif (place := self._single(node)) is not None:
                tokens.singles[node] = place
            else:
                self._other(node)

    def _demand(self, values: Iterable[Value | None], by: Node | None) -> None:
        for value in values:
            if value is not None:
                self.tokens.full.setdefault(value, by)

    def _attention(self, site: Masked) -> None:
        """Keys and values at padding have no weight; but a row without keys may give the mean of
        all values, so every query that counts must have one.
        """
        node, tokens = site.node, self.tokens
        query, _, value, *others = node.inputs
        context, *weights = node.outputs
        self._demand(others, node)
        returned = set(self.graph.outputs)
        by = tokens.full.get(context, node)
        is_full = query not in tokens.linked or context in tokens.full
        if is_full or any(weight.uses or weight in returned for weight in weights):
            self._demand([query], by)
        averages = attribute(node, "masked_rows") == "mean" and input_of(node, "sinks") is None
        if averages and (is_full or not site.own_key):
            self._demand([value], node)

    def _single(self, node: Node) -> int | None:
        """The place along T that a node reads alone."""
        if not node.inputs or node.inputs[0] not in self.tokens.linked:
            return None
        if node.op != "aten.select.int" or attribute(node, "dim") != 1:
            return None
        index = attribute(node, "index")
        return index if isinstance(index, int) else None

    def _other(self, node: Node) -> None:
        tokens = self.tokens
        operands = row_operands(node, tokens.rows)
        if operands is None:
            self._demand(node.inputs, node)
            return
        self._demand((value for value in node.inputs if value not in operands), node)
        blame = [tokens.full[value] for value in node.outputs if value in tokens.full]
        if blame:
            self._demand((v for v in operands if not self._erases(node, v)), blame[0] or node)

    def _erases(self, node: Node, operand: Value) -> bool:
        """Whether a node's result at padding doesn't depend on an operand there."""
        if node.inputs.count(operand) != 1 or len(node.outputs[0].shape) > 3:
            return False
        match node.op:
            case "aten.mul.Tensor":
                factor = next(value for value in node.inputs if value is not operand)
                return factor is not None and self._is_zero(factor, node)
            case "aten.where.self":
                condition, chosen, _ = node.inputs
                assert condition is not None
                if operand is condition:
                    return False
                return self._implied(condition, node, holds=operand is chosen)
            case "aten.masked_fill.Scalar":
                mask = node.inputs[1]
                return mask is not None and mask is not operand and self._implied(mask, node, False)
        return False

    def _read(self, value: Value, node: Node) -> tuple[Reader, Index]:
        """How to read an operand at (b, k, q): its rows, and any feature."""
        batch, length = self.tokens.rows
        features = node.outputs[0].shape[2:] or (1,)
        domain = Domain((batch, 1, features[0], length), self.graph.dims)
        index = tuple(map(domain.index, (BATCH, KEY, QUERY)))[: len(node.outputs[0].shape)]
        return Reader(domain), aligned(value, index)

    def _implied(self, condition: Value, node: Node, holds: bool) -> bool:
        """Whether a bool that is true (or false) says that the token is no padding."""
        reader, index = self._read(condition, node)
        read = reader.predicate(condition, index)
        return self._says(read if holds else negation(read))

    def _says(self, predicate: Predicate) -> bool:
        return set(conjuncts(self.tokens.padding)) <= set(conjuncts(predicate))

    def _is_zero(self, factor: Value, node: Node) -> bool:
        """Whether a factor is 0 at padding."""
        reader, index = self._read(factor, node)
        found = reader.read(factor, index)
        if isinstance(found, Choice):
            by_no = found.no == 0 and self._says(found.predicate)
            return by_no or (found.yes == 0 and self._says(negation(found.predicate)))
        leaf = self.tokens.padding
        if not isinstance(leaf, Dense):
            return False
        here, there = (factor, index), (leaf.value, leaf.index)
        return _source(*here, reader.domain) == _source(*there, reader.domain, only_tests=True)


def _source(
    value: Value, index: Index, domain: Domain, *, only_tests: bool = False
) -> tuple[Value, Index]:
    """The element that is 0 where this one is, through layouts and casts.

    `only_tests`: no cast but to bool, so that this one is 0 only where that is.
    """
    while (node := value.producer) is not None:
        is_test = node.op == "aten.ne.Scalar" and attribute(node, "other") == 0
        if is_test or (is_cast(node) and (value.dtype == torch.bool or not only_tests)):
            assert node.inputs[0] is not None
            value = node.inputs[0]
        elif (source := source_index(node, value, index, domain)) is not None:
            value, index = source
        else:
            break
    return value, settled(value, index)
