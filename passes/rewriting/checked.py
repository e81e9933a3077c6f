"""Rewrites that are evaluated before they are made: the one call that every fusion ends with.

A pass makes a `Checked(graph, self.name)`, inserts the nodes of each rewrite, calls
`checked.replace([(old, new)])` instead of `graph.replace_uses(old, new)`, and returns
`checked.remarks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from attngraph.analysis.values.weights import Derivation, keeps_digits
from attngraph.ir import Graph, Node, Remark, TensorType, Value, remark_on
from attngraph.ir.dead import discard, erase_dead
from attngraph.ir.slices import backward_slice
from attngraph.passes.rewriting.evidence import TOLERANCE, Evidence
from attngraph.passes.rewriting.findings import tally_of
from attngraph.passes.rewriting.labels import reassociated
from attngraph.passes.rewriting.outcomes import Different, Equal, NotEvaluated, Outcome
from attngraph.passes.rewriting.trials import ARITHMETIC

_DEPTH = 24  # nodes above a rewrite in which what it relied on is looked for
_CONTEXT = (0, 1, 2, 4, 8)  # levels of nodes above the leaves


@dataclass
class Checked:
    """Makes the rewrites of one pass over one graph, each only if it is equal.

    `kinds` are the trials (trials.py). With `exact` not a bit may differ. With `rounds` the pass
    takes a constant for another that is equal in the value's dtype, so the results may differ by
    that much. With `exact_only` no rewrite is made that reassociates. `depth` bounds how many nodes
    above a rewrite are evaluated; None: as many as lead to what it reads. New weights will be
    `stored_in` a narrower dtype than their own, where one is given.
    """

    graph: Graph
    pass_name: str
    kinds: Sequence[str] = ARITHMETIC
    exact: bool = False
    rounds: bool = False
    depth: int | None = _DEPTH
    exact_only: bool = False
    stored_in: torch.dtype | None = None
    remarks: list[Remark] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._evidence = Evidence(self.graph)
        self._mark = self.graph.created
        self._derived: dict[Value, Derivation] = {}

    def derive(
        self,
        name: str,
        type: TensorType,
        sources: Iterable[Value],
        compute: Callable[[Sequence[torch.Tensor]], torch.Tensor],
    ) -> Value:
        """A new constant that is computed from the data of others.

        Where one of those has no data, it has none either: in trials all of them are drawn.
        """
        made_of = Derivation(tuple(sources), compute)
        value = self.graph.add_constant(name, made_of.data(), type)
        self._derived[value] = made_of
        return value

    def allows(self, reassociates: str) -> bool:
        """Whether `replace` would make a rewrite of which this is to be said."""
        return not (reassociates and self.exact_only)

    def replace(
        self,
        pairs: Iterable[tuple[Value, Value]],
        *,
        leaves: Iterable[Value] | None = None,
        biases: Iterable[Value] = (),
        compared: Sequence[tuple[Value, Value]] | None = None,
        unrounded: Mapping[Value, torch.Tensor] | None = None,
        hidden_rows: bool = False,
        proved: bool = False,
        reassociates: str = "",
        at: Node | None = None,
    ) -> bool:
        """Puts the second value of each pair in the place of the first, if they are equal.

        Both are compared as functions of `leaves`: by default what the nodes read that were made
        since the last call. Where they differ, the rewrite may have relied on how a leaf is made,
        so they are compared again as functions of what lies above. Leaves in `biases` may hold
        -inf. `compared` are the values that are evaluated in the place of the pairs, where only a
        part of each is meant to be equal: they are erased. `unrounded` are new constants before
        they were rounded to their dtype: with these, rounded weights don't count as an error.

        With `hidden_rows`, what masks above make of whole rows is compared too: equal as a function
        of its logits, a rewrite may still have mistaken what the formula gives where all are fills.

        `proved` says that the pass has a proof for all sizes: it stands where nothing can be
        evaluated, and not where they differ.

        New weights that would overflow or lose digits in the dtype that they are stored in are left
        out too, without a remark.

        `reassociates` says what is done to the model's roundings, where something is: that is left
        out under `exact_only`, and otherwise listed, `at` a node or the first old value's.

        Where they differ, or can't be evaluated, the new nodes and the constants that only they
        read are erased, the old ones stay, a remark says why, and the result is False.
        """
        pairs = list(pairs)
        if leaves is None:
            leaves = self._frontier([new for _, new in pairs])
        leaves = list(leaves)
        if not self.allows(reassociates) or not self._keep_digits(unrounded or {}):
            self._take_back(pairs, compared, unrounded)
            return False
        node = at or (pairs[0][0].producer if pairs else None)
        outcome = self._outcome(compared or pairs, leaves, list(biases), unrounded)
        is_made = isinstance(outcome, Equal) or (proved and isinstance(outcome, NotEvaluated))
        if is_made and hidden_rows:
            hidden = self._where_masked(pairs, leaves)
            if isinstance(hidden, Different):
                outcome, is_made = hidden, False
        if not is_made:
            self.remarks.append(self._remark(pairs[0][0], outcome))
        tally_of(self.graph).count(outcome, proved=proved)
        if not is_made:
            self._take_back(pairs, compared, unrounded)
            return False
        self._erase_compared(compared)
        for old, new in pairs:
            self.graph.replace_uses(old, new)
        if reassociates and node is not None:
            self.remarks.append(reassociated(node, reassociates))
        self._settle()
        return True

    def is_equal(
        self,
        pairs: Sequence[tuple[Value, Value]],
        leaves: Iterable[Value],
        biases: Iterable[Value] = (),
    ) -> bool:
        """Whether the pairs are equal as functions of these leaves: a proposal, not yet made."""
        return isinstance(self._compared(pairs, leaves, biases), Equal)

    def abandon(self, pairs: Iterable[tuple[Value, Value]]) -> None:
        """Erases the new nodes of a rewrite that isn't to be made, and says nothing of it."""
        self._take_back(list(pairs), None, None)

    def _keep_digits(self, unrounded: Mapping[Value, torch.Tensor]) -> bool:
        """Whether new weights can be stored: no trial sees what their dtype makes of them."""
        return all(
            keeps_digits(numbers, dtype)
            for value, numbers in unrounded.items()
            for dtype in {value.dtype, self.stored_in or value.dtype}
        )

    def _erase_compared(self, compared: Sequence[tuple[Value, Value]] | None) -> None:
        for value in (value for pair in compared or () for value in pair):
            if value.producer is not None:
                self.graph.erase(value.producer)

    def _take_back(
        self,
        pairs: Sequence[tuple[Value, Value]],
        compared: Sequence[tuple[Value, Value]] | None,
        unrounded: Mapping[Value, torch.Tensor] | None,
    ) -> None:
        self._erase_compared(compared)
        made = [new.producer for _, new in pairs]
        erase_dead(self.graph, made, since=self._mark)
        discard(self.graph, unrounded or ())
        self._settle()

    def _settle(self) -> None:
        self._derived.clear()
        self._mark = self.graph.created

    def _outcome(
        self,
        pairs: Sequence[tuple[Value, Value]],
        leaves: list[Value],
        biases: Sequence[Value],
        unrounded: Mapping[Value, torch.Tensor] | None,
    ) -> Outcome:
        """The first that is equal among the levels of context; otherwise that of the last."""
        outcome: Outcome | None = None
        level = 0
        for context in _CONTEXT:
            while level < context:
                leaves, level = _above(leaves), level + 1
            is_last = context == _CONTEXT[-1] or _above(leaves) == leaves
            outcome = self._compared(pairs, leaves, biases, unrounded=unrounded, final=is_last)
            if is_last or isinstance(outcome, Equal):
                break
        assert outcome is not None
        return outcome

    def _where_masked(self, pairs: Sequence[tuple[Value, Value]], leaves: list[Value]) -> Outcome:
        for _ in range(_CONTEXT[-1]):
            leaves = _above(leaves)
        # Of large queries and keys the exponentials may overflow, which masks don't decide.
        within = [kind for kind in self.kinds if kind not in ("large", "huge")]
        return self._compared(pairs, leaves, kinds=(*within, "holes", "masked", "open"))

    def _compared(
        self,
        pairs: Sequence[tuple[Value, Value]],
        leaves: Iterable[Value],
        biases: Iterable[Value] = (),
        **more: Any,
    ) -> Outcome:
        asked = {"kinds": self.kinds, "depth": self.depth, "derived": self._derived, **more}
        return self._evidence.compare(
            pairs, leaves, biases, tolerance=self._tolerance(pairs), **asked
        )

    def _tolerance(self, pairs: Sequence[tuple[Value, Value]]) -> float:
        if self.exact:
            return 0.0
        dtypes = [old.dtype for old, _ in pairs if self.rounds and old.dtype.is_floating_point]
        return max([TOLERANCE, *(4 * torch.finfo(dtype).eps for dtype in dtypes)])

    def _frontier(self, values: Sequence[Value]) -> list[Value]:
        """What the new nodes under some values read that was there before them."""

        def was_there(value: Value) -> bool:
            return value.producer is None or value.producer.number <= self._mark

        return backward_slice(values, was_there)[0]

    def _remark(self, old: Value, outcome: Outcome) -> Remark:
        assert not isinstance(outcome, Equal)
        if isinstance(outcome, Different):
            return self._defect(old, outcome.reason)
        node = old.producer
        assert node is not None
        reason = (
            f"What {self.pass_name} would make of it was left out, for no trial could tell whether "
            f"it is equal: {outcome.reason}."
        )
        return remark_on(node, "note", "not-evaluated", reason, name=old.name, blamed=node)

    def _defect(self, old: Value, difference: str) -> Remark:
        node, name = old.producer, self.pass_name
        assert node is not None
        reason = f"What {name} made of it is not equal, so it was taken back: {difference}."
        hint = f"This is a defect of {name}: please report it with the model's source line."
        return remark_on(node, "note", "unequal", reason, hint, name=old.name, blamed=node)


def _above(leaves: Sequence[Value]) -> list[Value]:
    """What the nodes read that make the leaves; inputs and constants stay."""
    above: dict[Value, None] = {}
    for value in leaves:
        sources = (value,) if value.producer is None else value.producer.inputs
        above.update((source, None) for source in sources if source is not None)
    return list(above)
