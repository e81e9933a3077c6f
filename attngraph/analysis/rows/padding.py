"""Which tokens are padding: those whose rows influence no other row.

`ignore_padded_rows` says that the tokens a mask hides don't matter. Where a model has several
masks, or reads tokens without one, a token is padding only if every attention that could read it
hides it as a key, and no other op mixes its row into another one.
"""

from __future__ import annotations

from collections.abc import Sequence

from attngraph.analysis.masks.key_masks import attentions
from attngraph.analysis.masks.propositions import any_of
from attngraph.analysis.rows.padded_reads import Tokens, follow
from attngraph.analysis.rows.row_wise import Rows, has_rows, linked, row_operands
from attngraph.ir import Graph, Value
from attngraph.ir.dims import same_shape
from attngraph.ir.ops import inputs_of


def find_tokens(graph: Graph) -> list[Tokens]:
    """Each group of tokens some of which an attention hides, in the order of these attentions."""
    sites = attentions(graph)
    found: list[Tokens] = []
    known: list[Rows] = []
    for first in sites:
        if not first.hides or any(same_shape(rows, first.rows) for rows in known):
            continue
        known.append(first.rows)
        for values in _linked(graph, first.rows):
            readers = [site for site in sites if not values.isdisjoint(site.node.inputs[1:3])]
            if not any(site.hides for site in readers):
                continue
            tokens = Tokens(
                first.rows, frozenset(values), readers, any_of([s.shown for s in readers])
            )
            follow(graph, tokens)
            found.append(tokens)
    order = {site.node: place for place, site in enumerate(sites)}
    return sorted(found, key=lambda tokens: order[tokens.first.node])


def _linked(graph: Graph, rows: Rows) -> list[set[Value]]:
    """Values that have the same rows: by row-wise ops, query and context, and key and value."""
    groups: list[Sequence[Value]] = []
    for node in graph:
        if node.op == "attn.attention":
            query, key, value = inputs_of(node, "query", "key", "value")
            if has_rows(query, rows):
                groups.append([query, node.outputs[0]])
            if has_rows(key, rows):
                groups.append([key, value])
        elif operands := row_operands(node, rows):
            groups.append([*operands, *node.outputs])
    return linked(groups)
