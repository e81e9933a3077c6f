"""Puts one masking of an attention in the place of another, if both give the same probabilities.

What is compared is `attn.masked_softmax` of the same random scores, under either masking: two nodes
that no graph holds, which evidence evaluates as it does any other pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from attngraph.analysis.masks.masking import Masking, Scores
from attngraph.analysis.masks.row_policy import ABSORBING_FILL
from attngraph.ir import Dim, Graph, Node, TensorType, Value
from attngraph.ir.dims import least
from attngraph.ir.loc import UNKNOWN
from attngraph.ir.ops import attribute, inputs_of, op_def
from attngraph.ir.slices import backward_slice
from attngraph.passes.rewriting.evidence import Evidence
from attngraph.passes.rewriting.findings import tally_of
from attngraph.passes.rewriting.outcomes import Equal, Outcome, Unreached

_ROWS = 48  # queries whose probabilities are compared, evenly spread
_TOLERANCE = 1e-9  # softmax in float64 of equal logits, in another order at most


@dataclass
class Remasking:
    """Changes what masks the attentions of one graph."""

    graph: Graph

    def __post_init__(self) -> None:
        self._evidence = Evidence(self.graph)

    def proved(
        self,
        scores: Scores,
        after: Masking,
        is_leaf: Callable[[Value], bool],
        *,
        every_row: bool = True,
    ) -> str:
        """Why another masking can't take the place of that of some scores; "" where it can.

        Beside the caller's proof for all sizes, trials must agree wherever they reach. Values that
        `is_leaf` accepts are drawn. Without `every_row`, rows whose every key is masked before
        count as rows that give zero, whatever fills them.
        """
        outcome = self._compared(scores.masking, after, scores.shape, is_leaf, every_row)
        tally_of(self.graph).count(outcome, proved=isinstance(outcome, Unreached))
        return "" if isinstance(outcome, Equal | Unreached) else outcome.reason

    def _compared(
        self,
        before: Masking,
        after: Masking,
        shape: Sequence[Dim],
        is_leaf: Callable[[Value], bool],
        every_row: bool,
    ) -> Outcome:
        # Both have one shape: they differ along the axes that a tensor of either has.
        wide = [value.shape for value in (*before.values, *after.values)]
        lead = [
            dim if any(len(own) > 3 - axis and own[axis - 4] != 1 for own in wide) else 1
            for axis, dim in enumerate(shape[:2])
        ]
        if before.lengths is not None or after.lengths is not None:
            lead[0] = shape[0]
        scores = TensorType(torch.float64, (*lead, least(shape[2], _ROWS), shape[3]))
        logits = Value("scores", scores)
        hidden = -math.inf
        if not every_row:
            before, hidden = replace(before, masked_rows="zero"), ABSORBING_FILL
        old, new = (_weights(one, logits, shape[2], hidden) for one in (before, after))
        leaves, _ = backward_slice((*before.values, *after.values), is_leaf)
        return self._evidence.compare(
            [(old, new)], [logits, *leaves], tolerance=_TOLERANCE, as_typed=True
        )

    def apply(self, site: Node, after: Masking) -> None:
        """Makes it what masks an `attn.attention`."""
        rest = inputs_of(site, "sinks", "past_key", "past_value")
        inputs: list[Value | None] = [*site.inputs[:3], after.bias, after.mask, *rest]
        inputs.append(after.lengths)
        while inputs[-1] is None:
            inputs.pop()
        self.graph.set_inputs(site, inputs)
        changed = {
            "causal": after.causal,
            "masked_rows": after.masked_rows,
            "window": after.window,
        }
        if all(attribute(site, name) == value for name, value in changed.items()):
            return
        kept = site.attrs | changed
        args = op_def(site.op).args
        site.attrs = {
            a.name: kept[a.name] for a in args if kept.get(a.name, a.default) != a.default
        }
        self.graph.epoch += 1


def _weights(masking: Masking, logits: Value, queries: Dim, hidden: float) -> Value:
    """What logits of some of the queries become: (B|1, H|1, R, T)."""
    given = (logits, masking.bias, masking.mask, masking.lengths)
    attrs = {
        "queries": queries,
        "past": masking.past,
        "causal": masking.causal,
        "window": masking.window,
        "masked_rows": masking.masked_rows,
        "hidden": hidden,
    }
    node = Node("attn.masked_softmax", given, attrs, UNKNOWN)
    node.outputs = (Value("weights", logits.type, producer=node),)
    return node.output
