"""How attentions hide keys: what their masks say of a key alone, whatever the query."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attngraph.analysis.masks.masking import Scores, masking_of, scores_shape
from attngraph.analysis.masks.predicates import (
    BATCH,
    KEY,
    QUERY,
    TRUE,
    And,
    Dense,
    Linear,
    Not,
    Or,
    Predicate,
    conjunction,
    conjuncts,
    elements,
    substitute,
    variables,
)
from attngraph.analysis.masks.propositions import implies
from attngraph.analysis.masks.reading import Reader
from attngraph.analysis.rows.row_wise import Rows
from attngraph.analysis.values.weights import is_weight
from attngraph.analysis.walks import made_of
from attngraph.ir import Graph, Node, Value
from attngraph.ir.dims import same_shape
from attngraph.ir.ops import input_of


@dataclass(frozen=True)
class Masked:
    """An attention, and which keys (b, k) it may attend to.

    `rows` are its keys' (B, T) and `parts` all that its mask requires of a score. `shown` is what
    they require of the key alone, by what is given: true where the attention hides no key. `own` is
    what a query needs to attend to the key of its own row; None where rows of queries are no rows
    of keys.
    """

    node: Node
    rows: Rows
    parts: frozenset[Predicate]
    shown: Predicate
    own: Predicate | None
    reader: Reader

    @property
    def hides(self) -> bool:
        return self.shown != TRUE

    def has_own_key(self, token: Predicate) -> bool:
        """Whether each query for which `token` holds is proved to attend to its own key."""
        return self.own is not None and implies(substitute(token, KEY, QUERY), self.own)

    @property
    def sees_alike(self) -> bool:
        """Whether all queries of an element have the same keys."""
        masking = masking_of(self.node)
        moving = masking.causal or masking.window > 0
        return not moving and not any(QUERY in variables(part) for part in self.parts)


def attentions(graph: Graph) -> list[Masked]:
    """All attentions. One with a past, whose keys are no rows of one tensor, hides none."""
    return [_read(graph, node) for node in graph if node.op == "attn.attention"]


def _read(graph: Graph, node: Node) -> Masked:
    masking, shape = masking_of(node), scores_shape(node)
    scores = Scores(masking, shape, graph.dims)
    rows: Rows = (input_of(node, "key").shape[0], input_of(node, "key").shape[1])
    if input_of(node, "past_key") is not None:
        return Masked(node, rows, frozenset(), TRUE, None, scores.reader)
    parts = conjuncts(scores.mask)
    shown = conjunction(*(part for part in parts if _is_padding(part, scores.reader)))
    own = None
    if same_shape((shape[0], shape[2]), rows) and masking.lengths is None:
        own = scores.domain.simplify(substitute(scores.visible, KEY, QUERY))
    return Masked(node, rows, frozenset(parts), shown, own, scores.reader)


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
    read = list(made_of(value))
    is_input = any(one.producer is None and not one.is_constant for one in read)
    return is_input and not any(map(is_weight, read))
