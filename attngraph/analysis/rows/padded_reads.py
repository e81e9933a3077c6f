"""Which values are read at padded tokens: a backward analysis from the graph's outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from attngraph.analysis.layout.index_maps import Index, aligned, settled, source_index
from attngraph.analysis.masks.choices import Choice
from attngraph.analysis.masks.key_masks import Masked
from attngraph.analysis.masks.masking import masking_of
from attngraph.analysis.masks.predicates import (
    BATCH,
    KEY,
    QUERY,
    Dense,
    Domain,
    Predicate,
    negation,
)
from attngraph.analysis.masks.propositions import implies
from attngraph.analysis.masks.reading import Reader
from attngraph.analysis.rows.row_wise import Rows, row_operands
from attngraph.analysis.values.scalars import is_cast
from attngraph.analysis.values.weights import is_weight
from attngraph.ir import Graph, Node, Value
from attngraph.ir.ops import attribute, input_of
from attngraph.ir.slices import forward_slice


@dataclass
class Tokens:
    """Values whose rows (b, t) are the same tokens, and how they are read.

    `rows` is (B, T), `linked` the values with these rows, `sites` all attentions that take them as
    keys or values. `shown` holds where a token is a key of one of them; all other tokens are
    padding. `readers` are other ops that mix computed rows, and so see padding too.

    `full` maps each value that is also read at padding to the node that reads it there (None: the
    graph returns it); `singles` are the positions along T that are selected one by one; `pooling`
    are nodes that ignore an operand at padding although their own result is read there.
    """

    rows: Rows
    linked: frozenset[Value]
    sites: Sequence[Masked]
    shown: Predicate
    readers: list[Node] = field(default_factory=list)
    full: dict[Value, Node | None] = field(default_factory=dict)
    singles: dict[Node, int] = field(default_factory=dict)
    pooling: list[Node] = field(default_factory=list)

    @property
    def first(self) -> Masked:
        """The first attention that hides one of them."""
        return next(site for site in self.sites if site.hides)


def follow(graph: Graph, tokens: Tokens) -> None:
    """Fills `readers`, `full`, `singles` and `pooling`."""
    _Backwards(graph, tokens).read()


class _Backwards:
    def __init__(self, graph: Graph, tokens: Tokens) -> None:
        self.graph, self.tokens = graph, tokens
        self.computed = _computed(graph)
        self.unsure = _from(graph, [site.node for site in tokens.sites if _leaves_nan(site)])

    def read(self) -> None:
        tokens = self.tokens
        self.open = self._open()
        sites = {site.node: site for site in tokens.sites if site.hides}
        self._demand((v for v in self.graph.outputs if v not in tokens.linked), None)
        for node in reversed(self.graph):
            if node in sites:
                self._attention(sites[node])
            elif node.op == "attn.attention" and tokens.linked.isdisjoint(node.inputs[1:]):
                self._queries(node)
            elif (place := self._single(node)) is not None:
                tokens.singles[node] = place
            else:
                self._other(node)

    def _open(self) -> frozenset[Value]:
        """Values whose rows at padding depend on what earlier nodes computed there."""
        found = {value for value in self.tokens.linked if value in self.computed}
        for node in self.graph:
            operands = row_operands(node, self.tokens.rows)
            if operands is None or found.isdisjoint(node.outputs):
                continue
            known = [v for v in operands if v in found or v in self.computed]
            if known and all(v not in found or self._erases(node, v) for v in known):
                found.difference_update(node.outputs)
        return frozenset(found)

    def _demand(self, values: Iterable[Value | None], by: Node | None) -> None:
        for value in values:
            if value is not None:
                self.tokens.full.setdefault(value, by)

    def _attention(self, site: Masked) -> None:
        """Keys and values at padding have no weight. But 0 · NaN is NaN; and a query without keys
        may get the mean of all values, so every one that counts must have a key.
        """
        node, tokens = site.node, self.tokens
        query, key, value, *others = node.inputs
        context, *weights = node.outputs
        self._demand(others, node)
        returned = set(self.graph.outputs)
        by = tokens.full.get(context, node)
        is_full = query not in tokens.linked or context in tokens.full
        if is_full or any(weight.uses or weight in returned for weight in weights):
            self._demand([query], by)
        averages = masking_of(node).masked_rows == "mean" and input_of(node, "sinks") is None
        lacks_key = averages and (is_full or not site.has_own_key(tokens.shown))
        self._demand((read for read in (key, value) if read in self.unsure), node)
        if lacks_key:
            self._demand([value], node)

    def _queries(self, node: Node) -> None:
        """An attention of which the tokens are queries alone computes each row by itself."""
        query, *others = node.inputs
        context, *results = node.outputs
        returned = set(self.graph.outputs)
        self._demand(others, node)
        if context in self.tokens.full or any(r.uses or r in returned for r in results):
            self._demand([query], self.tokens.full.get(context, node))

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
        operands = row_operands(node, tokens.rows) or []
        others = [value for value in node.inputs if value not in operands]
        if any(value in self.open for value in others):
            tokens.readers.append(node)
        self._demand(others, node)
        blame = [tokens.full[value] for value in node.outputs if value in tokens.full]
        if not blame:
            return
        erased = [value for value in operands if self._erases(node, value)]
        if any(value in tokens.linked for value in erased):
            tokens.pooling.append(node)
        self._demand((value for value in operands if value not in erased), blame[0] or node)

    def _erases(self, node: Node, operand: Value) -> bool:
        """Whether a node's result at padding doesn't depend on an operand there."""
        if node.inputs.count(operand) != 1 or len(node.outputs[0].shape) > 3:
            return False
        match node.op:
            case "aten.mul.Tensor":
                factor = next(value for value in node.inputs if value is not operand)
                if operand in self.unsure or factor is None:
                    return False
                return self._is_zero(factor, node)
            case "aten.where.self":
                condition, chosen, _ = node.operands
                if operand is condition:
                    return False
                return self._implied(condition, node, holds=operand is chosen)
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
        return implies(predicate, self.tokens.shown)

    def _is_zero(self, factor: Value, node: Node) -> bool:
        """Whether a factor is 0 at padding."""
        reader, index = self._read(factor, node)
        found = reader.read(factor, index)
        if isinstance(found, Choice):
            by_no = found.no == 0 and self._says(found.predicate)
            return by_no or (found.yes == 0 and self._says(negation(found.predicate)))
        leaf = self.tokens.shown
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
            value = node.source
        elif (source := source_index(value, index, domain)) is not None:
            value, index = source
        else:
            break
    return value, settled(value, index)


def _computed(graph: Graph) -> frozenset[Value]:
    """The values that depend on weights: what is read of others says what the tokens are."""
    found: set[Value] = set()
    for node in graph:
        if any(value in found or is_weight(value) for value in node.operands):
            found.update(node.outputs)
    return frozenset(found)


def _leaves_nan(site: Masked) -> bool:
    """Whether it may give NaN at padding in elements that have tokens.

    Where all queries of an element have the same keys, one without a key has company: every row of
    that element is NaN then, whatever stands at padding.
    """
    node = site.node
    if masking_of(node).masked_rows in ("zero", "mean") or input_of(node, "sinks") is not None:
        return False
    return not site.sees_alike


def _from(graph: Graph, nodes: Sequence[Node]) -> frozenset[Value]:
    """The values that depend on one of the nodes."""
    return frozenset(forward_slice((v for node in nodes for v in node.outputs), graph))
