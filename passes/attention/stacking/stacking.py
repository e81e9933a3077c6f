"""Isomorphic branches as one: each op runs once, on values that have the branches as an axis.

plans.py says what such values are. Most ops run on them as their batching rules say (rules.py);
attention.py and the rest of rules.py are about those whose weights or numbers differ by branch.
"""

from __future__ import annotations

from collections.abc import Iterable

from attngraph.analysis.branches import ATTENTION, is_projection
from attngraph.ir import Value
from attngraph.ir.traits import FEATURE_NORM
from attngraph.passes.attention.stacking import attention as heads
from attngraph.passes.attention.stacking import rules
from attngraph.passes.attention.stacking.parts import consecutive_parts
from attngraph.passes.attention.stacking.plans import FEATURES, Plan, Stack, inserted, laid_out


class Stacking(Stack):
    """Plans for one family, by the ops that compute its values."""

    def _planned(self, value: Value, trailing: int) -> Plan | None:
        column = self.family.column(value)
        node = value.producer
        if all(item is value for item in column):
            return Plan(lambda build: inserted(build, value, trailing), full=False)
        if all(item.is_constant for item in column):
            return laid_out(column, trailing)
        if value in self.family.first.leaves or node is None:
            make = consecutive_parts(column, trailing)
            return None if make is None else Plan(make)
        if node.op == ATTENTION:
            return heads.attention(self, node) if (value.index, trailing) == (0, FEATURES) else None
        if is_projection(node):
            return heads.projection(self, node) if trailing == FEATURES else None
        if node.op == "attn.rotary":
            return rules.rotary(self, node) if trailing == FEATURES else None
        over_axes = node.op in FEATURE_NORM and "normalized_shape" in node.attrs
        if over_axes and not self._is_shared(node.inputs[1:]):
            return rules.norm(self, node) if trailing == FEATURES else None
        if rules.has_own_numbers(self, node):
            return rules.scaled(self, node, trailing)
        return rules.over_branches(self, node, value, trailing)

    def _is_shared(self, values: Iterable[Value | None]) -> bool:
        """Whether all branches read the same values."""
        return all(v is None or set(self.family.column(v)) == {v} for v in values)
