"""Logits whose softmax equals a formula even in rows in which masks hide every key."""

from __future__ import annotations

from dataclasses import dataclass, field

from attngraph.analysis.masks.fills import Fills
from attngraph.analysis.masks.masking import NO_MASKED_ROWS
from attngraph.analysis.masks.row_policy import SOFTMAX, Formula
from attngraph.ir import Builder, Node, Remark, Value, remark_on
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.findings import findings_of


@dataclass
class Settler:
    """Settles softmaxes of one graph; `remarks` say why some stay.

    With `assume`, each row has a key. `has_key`: those of the last are proved to have one.
    """

    checked: Checked
    build: Builder
    assume: bool = False
    remarks: list[Remark] = field(default_factory=list)
    has_key: bool = False

    @property
    def checks(self) -> bool:
        """Whether rows without a key are compared too: not where there are none, by the user's word
        or as is proved of the last softmax.
        """
        return not (self.assume or self.has_key)

    def replace(self, node: Node, value: Value, what: str) -> bool:
        """As `Checked.replace`, for what is made of the softmax that was settled last."""
        pair = node.output, value
        return self.checked.replace([pair], proved=True, hidden_rows=self.checks, reassociates=what)

    def settle(
        self,
        node: Node,
        x: Value,
        dims: tuple[int, ...],
        formula: Formula,
        kept: Value | None = None,
        keep: bool = True,
    ) -> Value | None:
        """The logits to take the softmax of, over `dims`, in the place of a formula of x.

        That is x itself, or x with -inf in the place of its fills. `kept` masks the exponentials:
        they are zero where it isn't `keep`. None where neither gives the formula's result in every
        row: then a remark says so, and what was built for `node` since is to be left unread.
        """
        self.has_key = False
        if formula == SOFTMAX and kept is None:
            return x
        fills = Fills(x, dims, self.checked.graph.dims)
        found = fills.settle(self.build, formula, kept, keep, assume=self.assume)
        if found is None:
            self.remarks.append(_stays(node))
            return None
        if found.assumed and fills.has_unknown:
            self.remarks.append(_assumed(node))
            findings_of(self.checked.graph).assumed.append(NO_MASKED_ROWS)
        self.has_key = found.proved
        return found.logits


def _stays(node: Node) -> Remark:
    reason = (
        "This softmax stays as it is written: where masks hide every key of a row, it gives "
        "something else there than a softmax does."
    )
    hint = "Use torch.softmax; or, if each row has a key, --assume no-fully-masked-rows."
    return remark_on(node, "note", "hidden-rows", reason, hint)


def _assumed(node: Node) -> Remark:
    said = "What a caller adds to these logits hides some keys of a row, and not all: assumed."
    return remark_on(node, "note", "mask", said)
