"""Rewrites row-wise nodes over packed rows: (B, T, …) becomes (1, N, …) with N of the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch

from attngraph.analysis.rows.batching import resized
from attngraph.analysis.rows.padded_reads import Tokens
from attngraph.analysis.rows.row_wise import broadcasts, lead, row_operands
from attngraph.ir import Dim, Graph, Node, Remark, TensorType, Value
from attngraph.ir.dead import eliminate_dead_code
from attngraph.ir.dims import as_dim, same
from attngraph.passes.attention.mask_building import EarlyBuilder
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.trials import ATTENTION


class RowPacker:
    """Packs nodes one by one; each result is compared with that of the node it replaces.

    `valid` (B, T) is true where there is a token. Kept are the valid rows, row 0 of every element,
    so that each has one, and the rows that are read one by one. With `only_valid`, which packing an
    attention takes, an element keeps row 0 only where it has no other, and what is read of a single
    row at padding is a copy of another row.
    """

    def __init__(
        self,
        graph: Graph,
        tokens: Tokens,
        make: EarlyBuilder,
        held: Value,
        pass_name: str,
        *,
        only_valid: bool = False,
    ) -> None:
        self.graph, self.tokens = graph, tokens
        self.batch, self.length = tokens.rows
        self.loc = tokens.first.node.loc
        self._make = make
        self.valid = self._made("aten.reshape", held, shape=[held.shape[0], self.length])
        if not same(held.shape[0], self.batch):
            self.valid = self._made("aten.expand", self.valid, size=list(tokens.rows))
        self.kept = self._rows_with_one() if only_valid else self._rows_kept()
        flat = self._made("aten.reshape", self.kept, shape=[self._count])
        found = self._made("aten.nonzero", flat)
        self.number: Dim = found.shape[0]
        self.places = self._made("aten.reshape", found, shape=[1, -1])
        whole = self._made("aten._to_copy", flat, dtype=torch.int64)
        total = self._made("aten.cumsum", whole, dim=0)
        before = self._made("aten.sub.Scalar", total, other=1)
        self.inverse = self._made("aten.reshape", before, shape=list(tokens.rows))
        if only_valid:
            self.inverse = self._made("aten.maximum", self.inverse, self._firsts())
        self._rows = Checked(graph, pass_name)
        self._attentions = Checked(graph, pass_name, kinds=ATTENTION, depth=None)
        self._failed = False
        self._gathered: dict[tuple[Value, str, int], Value] = {}
        self._packed: dict[Value, Value] = {}  # by what it is spread to

    @property
    def remarks(self) -> list[Remark]:
        """What was taken back because it was not equal."""
        return [*self._rows.remarks, *self._attentions.remarks]

    @property
    def _count(self) -> Dim:
        return as_dim(sympy.sympify(self.batch) * sympy.sympify(self.length))

    def _made(self, op: str, *inputs: Value, **attrs: Any) -> Value:
        return self._make(self.loc, op, *inputs, **attrs)

    def _rows_kept(self) -> Value:
        """(B, T): the rows that are packed."""
        kept = self.valid
        for place in sorted({0, *self.tokens.singles.values()}):
            if place >= 0:
                along = self._made("aten.arange", end=self.length)
            else:
                first = as_dim(-sympy.sympify(self.length))
                along = self._made("aten.arange.start", start=first, end=0)
            there = self._made("aten.eq.Scalar", along, other=place)
            kept = self._made("aten.logical_or", kept, there)
        return kept

    def _rows_with_one(self) -> Value:
        """(B, T): the valid rows, and row 0 of elements without any."""
        valid = self._made("aten._to_copy", self.valid, dtype=torch.int64)
        number = self._made("aten.sum.dim_IntList", valid, dim=[1], keepdim=True)
        empty = self._made("aten.eq.Scalar", number, other=0)
        first = self._made("aten.eq.Scalar", self._made("aten.arange", end=self.length), other=0)
        return self._made(
            "aten.logical_or", self.valid, self._made("aten.logical_and", empty, first)
        )

    def _firsts(self) -> Value:
        """(B, 1): the place among the packed rows of the first of each element."""
        number = self._made("aten._to_copy", self.kept, dtype=torch.int64)
        each = self._made("aten.sum.dim_IntList", number, dim=[1], keepdim=True)
        return self._made("aten.sub.Tensor", self._made("aten.cumsum", each, dim=0), each)

    def pack_attention(self, node: Node) -> bool:
        """Replaces an attention whose mask hides just the padding by one over packed rows."""
        if self._failed:
            return False
        operands = [value for value in node.inputs[:3] if value is not None]
        inputs = [self._gather(value, self.places, "row", node) for value in operands]
        attrs = {name: node.attrs[name] for name in ("heads", "kv_heads", "scale")}
        new = self._create(
            "attn.packed_attention", [*inputs, self.kept], attrs, self._type(node.outputs[0]), node
        )
        # the mask and what is valid come from the same inputs
        leaves = [*operands, *self.graph.inputs]
        hidden = self._made("aten.logical_not", self.valid)
        return self._replace(node, [new], self._attentions, leaves, hidden)

    def pack(self, node: Node) -> bool:
        """Replaces a node by one over packed rows, between a gather and a spread."""
        rows = row_operands(node, self.tokens.rows)
        if rows is None or self._failed:
            return False
        inputs = [self._operand(node, value, rows) for value in node.inputs]
        op, attrs = resized(node, [1, -1])
        types = [self._type(value) for value in node.outputs]
        new = self.graph.create(op, inputs, attrs, types=types, loc=node.loc, before=node)
        leaves = [value for value in (*node.inputs, self.valid) if value is not None]
        hidden = self._made("aten.logical_not", self.kept)
        return self._replace(node, new.outputs, self._rows, leaves, hidden)

    def _replace(
        self,
        node: Node,
        outputs: Sequence[Value],
        checked: Checked,
        leaves: Sequence[Value],
        hidden: Value,
    ) -> bool:
        """Puts packed outputs in the place of a node's; compared but for the hidden rows."""
        returned = set(self.graph.outputs)
        pairs, compared = [], []
        for value, packed in zip(node.outputs, outputs, strict=True):
            if value.uses or value in returned:
                spread = self._spread(packed, node)
                pairs.append((value, spread))
                shown = self._shown(value, hidden, node), self._shown(spread, hidden, node)
                compared.append(shown)
                self._packed[spread] = packed
        if not pairs:
            return False
        self._failed = not checked.replace(pairs, leaves=leaves, compared=compared)
        return not self._failed

    def settle(self) -> None:
        """Hands packed rows on from node to node, and drops what is no longer read."""
        for (value, *_), gathered in self._gathered.items():
            if value in self._packed and gathered.uses:
                self.graph.replace_uses(gathered, self._packed[value])
        for node, place in self.tokens.singles.items():
            source = node.inputs[0]
            if source in self._packed:
                self._select(node, self._packed[source], place)
        self.graph.sort()
        eliminate_dead_code(self.graph)

    def _select(self, node: Node, packed: Value, place: int) -> None:
        """One row of each element, taken from the packed ones."""
        at = TensorType(torch.int64, (self.batch,))
        attrs = {"dim": 1, "index": place}
        where = self._create("aten.select.int", [self.inverse], attrs, at, node)
        flat = self._flat(packed, node)
        row = self._create("aten.index.Tensor", [flat, where], {}, node.output.tensor_type, node)
        self.graph.replace_uses(node.output, row)

    def _operand(self, node: Node, value: Value | None, rows: list[Value]) -> Value | None:
        if value is None or value in rows:
            return value and self._gather(value, self.places, "row", node)
        place = lead(value, len(node.outputs[0].shape)) if broadcasts(node) else None
        if place is None or all(same(dim, 1) for dim in place):
            return value
        along, other = ("column", 1) if same(place[0], 1) else ("batch", 0)
        return self._gather(value, self._index(other), along, node)

    def _index(self, axis: int) -> Value:
        """(1, N): the place of each packed row along B or along T."""
        op = "aten.remainder.Scalar" if axis == 1 else "aten.floor_divide.Scalar"
        return self._made(op, self.places, other=self.length)

    def _gather(self, value: Value, index: Value, kind: str, before: Node) -> Value:
        """(1, N, …): the row, or the entry of a table, of each packed row."""
        features = len(value.shape) - 2
        if kind != "row":
            features = len(before.outputs[0].shape) - 2
        key = value, kind, features
        if key not in self._gathered:
            count = {"row": self._count, "column": self.length, "batch": self.batch}[kind]
            rest = value.shape[len(value.shape) - features :]
            flat = TensorType(value.dtype, (count, *rest))
            attrs = {"shape": list(flat.shape)}
            source = value
            if value.type != flat:
                source = self._create("aten.reshape", [value], attrs, flat, before)
            packed = TensorType(value.dtype, (1, self.number, *rest))
            made = self._create("aten.index.Tensor", [source, index], {}, packed, before)
            self._gathered[key] = made
        return self._gathered[key]

    def _spread(self, packed: Value, before: Node) -> Value:
        """(B, T, …): every kept row in its place, others copies of the one before them."""
        whole = TensorType(packed.dtype, (*self.tokens.rows, *packed.shape[2:]))
        flat = self._flat(packed, before)
        return self._create("aten.index.Tensor", [flat, self.inverse], {}, whole, before)

    def _shown(self, value: Value, hidden: Value, before: Node) -> Value:
        """The value with 0 in rows that are hidden."""
        rest = [1] * (len(value.shape) - 2)
        hidden = self._made("aten.reshape", hidden, shape=[*self.tokens.rows, *rest])
        zero = self._made("aten.full", size=[], fill_value=0, dtype=value.dtype)
        kind = value.tensor_type
        return self._create("aten.where.self", [hidden, zero, value], {}, kind, before)

    def _flat(self, packed: Value, before: Node) -> Value:
        rest = packed.shape[2:]
        kind = TensorType(packed.dtype, (self.number, *rest))
        return self._create("aten.reshape", [packed], {"shape": [-1, *rest]}, kind, before)

    def _type(self, value: Value) -> TensorType:
        return TensorType(value.dtype, (1, self.number, *value.shape[2:]))

    def _create(
        self,
        op: str,
        inputs: list[Value | None] | list[Value],
        attrs: Mapping[str, Any],
        kind: TensorType,
        before: Node,
    ) -> Value:
        node = self.graph.create(op, inputs, attrs, types=[kind], loc=before.loc, before=before)
        return node.output
