"""Isomorphic branches as one: each op runs once, on values that have the branches as an axis.

plans.py says what such values are, rules.py and attention.py how each
kind of op runs on them; which rule is whose stands here.
"""

from __future__ import annotations

from attngraph.analysis.branches import ATTENTION, is_projection
from attngraph.ir import Value
from attngraph.passes.attention.stacking import attention as heads
from attngraph.passes.attention.stacking import rules as rules
from attngraph.passes.attention.stacking.parts import consecutive_parts
from attngraph.passes.attention.stacking.plans import FEATURES, Plan, Stack, inserted, laid_out

_NORMS = frozenset(["aten.layer_norm", "aten.rms_norm"])


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
        if node.op == "aten.split_with_sizes":
            return rules.split(self, node, value, trailing)
        if len(node.outputs) > 1:
            return None
        if node.op in rules.ELEMENTWISE:
            return rules.elementwise(self, node, trailing)
        if node.op in rules.REDUCTIONS or node.op == "aten.slice.Tensor":
            return rules.along_trailing(self, node, trailing)
        if node.op in _NORMS:
            return rules.norm(self, node) if trailing == FEATURES else None
        match node.op:
            case "attn.rotary":
                return rules.rotary(self, node) if trailing == FEATURES else None
            case "aten.reshape":
                return rules.reshape(self, node, trailing)
            case "aten.permute":
                return rules.permute(self, node, trailing)
            case "aten.expand":
                return rules.expand(self, node, trailing)
            case "aten.cat":
                return rules.cat(self, node, trailing)
        return None
