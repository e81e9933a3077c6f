"""fuse-linear-attention: recurrences of outer products, in every form, become one op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attngraph.analysis.recurrence.linear import presents, read_linear
from attngraph.analysis.recurrence.mixing import Tokens, dims_of_tokens, mixed
from attngraph.analysis.recurrence.terms import Operand, Recurrence, State, fused
from attngraph.analysis.recurrence.uniform import switch_in
from attngraph.analysis.recurrence.units import Unit, units_of, unlike
from attngraph.ir import Builder, Dim, Graph, Node, Remark, Value
from attngraph.ir.dead import eliminate_dead_code
from attngraph.ir.dims import as_dim
from attngraph.ir.loc import fuse_locs
from attngraph.passes.attention.early_permutes import permuted
from attngraph.passes.attention.late_normalisers import late_normalisers
from attngraph.passes.attention.padded_sums import cut_padded_sums
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import GraphPass
from attngraph.passes.rewriting.trials import LOGITS

_KERNELS = (torch.float32, torch.float16)
_NORMALISES = "A row's result is normalised after its sum, and not its weights before."
_REASSOCIATES = "A recurrence of outer products is one operator, which goes token by token."


class FuseLinearAttention(GraphPass, name="fuse-linear-attention", exact=False):
    """Reads o_t = scale · q_tᵀ S_t (attngraph/analysis/recurrence/linear.py says how).

    Loops, unrolled or over chunks, products under a mask of decays and cumulative sums become one
    `attn.linear_attention`, with the state before and after it where the graph has them. A decay of
    each value feature, or one that depends on the state, stays. With `exact_only` nothing is done.
    """

    exact_only: bool = False

    def run(self, graph: Graph) -> list[Remark]:
        checked = Checked(graph, self.name, LOGITS, depth=None, exact_only=self.exact_only)
        remarks: list[Remark] = []
        if checked.allows(_REASSOCIATES):
            for dim in dims_of_tokens(graph):
                remarks += _fuse_along(graph, checked, Tokens(dim))
        # One that was read again, along another dim of the same size, is told once.
        kept = {value.name for node in graph for value in node.outputs}
        return [*(each for each in remarks if each.node in kept), *checked.remarks]


def _fuse_along(graph: Graph, checked: Checked, tokens: Tokens) -> list[Remark]:
    cut_padded_sums(graph, tokens.dim)
    remarks = _fuse(graph, checked, tokens, mixed(graph, tokens))
    for numerator, pair in late_normalisers(graph):
        if remark := _fuse(graph, checked, tokens, [numerator]):
            checked.replace([pair], reassociates=_NORMALISES)
            remarks += remark
    eliminate_dead_code(graph)
    return remarks


def _fuse(
    graph: Graph, checked: Checked, tokens: Tokens, candidates: Sequence[Value]
) -> list[Remark]:
    read = list(read_linear(graph, tokens, candidates, {}))  # before the first is written
    found = [each for each in read if isinstance(each, Recurrence)]
    remarks = [_write(graph, checked, tokens, each) for each in found]
    return [remark for remark in remarks if remark is not None]


def _write(graph: Graph, checked: Checked, tokens: Tokens, found: Recurrence) -> Remark | None:
    output, heads = found.output, found.kv_heads
    node = output.value.producer
    operands = [found.query, found.key, found.value, found.beta]
    operands += [found.decay.operand] if found.decay is not None else []
    dtypes = {part.value.dtype for part in operands if part is not None} | {output.value.dtype}
    if node is None or not isinstance(heads, int) or len(dtypes) != 1:
        return None
    (dtype,) = dtypes
    if dtype not in _KERNELS:
        return None
    found_state = presents(graph, tokens, found, dict.fromkeys(graph.outputs))
    ends = [part.value for part in operands if part is not None]
    ends += [] if found.past is None else [found.past.value]
    if switch_in(output.value, ends, tokens, found.tables) is not None:
        return None
    if found_state is not None:  # which queries don't reach, but where one loop gives both
        without = [end for end in ends if end is not found.query.value]
        ways = (
            switch_in(found_state.value, each, tokens, found.tables) for each in (without, ends)
        )
        if all(way is not None for way in ways):
            return None
    outputs = [output.value, *([] if found_state is None else [found_state.value])]
    if unlike(outputs, _units(found)) is not None:
        return None
    build = Builder(graph, node, fuse_locs([node], node))
    write = _Written(build, found, heads, dtype)
    made = write.node()
    pairs = [(output.value, write.unpacked(made.outputs[0]))]
    if found_state is not None:
        pairs.append((found_state.value, write.state(made.outputs[1], found_state)))
    if not checked.replace(pairs, reassociates=_REASSOCIATES, at=node):
        return None
    graph.sort()
    return fused(made, node.loc)


def _units(found: Recurrence) -> dict[Value, Unit]:
    decay = None if found.decay is None else found.decay.operand
    return units_of(
        found.query.value,
        found.key.value,
        None if found.value is None else found.value.value,
        beta=None if found.beta is None else found.beta.value,
        decay=None if decay is None else decay.value,
        state=None if found.past is None else found.past.value,
    )


@dataclass
class _Written:
    """The nodes of one recurrence: operands as (B, T, H·D), and the result as it was."""

    build: Builder
    found: Recurrence
    heads: int
    dtype: torch.dtype

    def node(self) -> Node:
        found = self.found
        queries = found.query.heads()
        assert isinstance(queries, int)
        value = self._ones() if found.value is None else self._packed(found.value, self.heads)
        return self.build.node(
            "attn.linear_attention",
            self._packed(found.query, queries),
            self._packed(found.key, self.heads),
            value,
            None if found.past is None else self._past(found.past),
            self._decay(),
            None if found.beta is None else self._packed(found.beta, self.heads),
            heads=queries,
            kv_heads=self.heads,
            scale=found.scale,
        )

    @property
    def _rows(self) -> list[Dim]:
        key = self.found.key
        return [key.value.shape[key.order[0] or 0], key.value.shape[key.order[1]]]

    def _packed(self, operand: Operand, heads: int) -> Value:
        """(B, T, H·D), each head as often as it serves."""
        value = operand.value
        kept = [at for at in operand.order if at is not None]
        value = permuted(self.build, value, kept)
        rows = [operand.value.shape[at] for at in kept[:2]]
        own, width = operand.heads(), operand.features()
        if own != heads:
            assert isinstance(own, int)
            value = self.build.reshape(value, [*rows, own, 1, width])
            value = self.build("aten.expand", value, size=[*rows, own, heads // own, width])
        shape = [*rows, as_dim(heads * width)]
        return self.build.reshape(value, shape)

    def _ones(self) -> Value:
        size = [*self._rows, self.heads]
        return self.build("aten.full", size=size, fill_value=1.0, dtype=self.dtype)

    def _decay(self) -> Value | None:
        decay = self.found.decay
        if decay is None:
            return None
        if decay.operand is None:
            assert decay.constant is not None
            data = decay.constant.log().to(self.dtype)[None, None]
            constant = self.build.constant(data, "decay")
            return self.build("aten.expand", constant, size=[*self._rows, self.heads])
        value = self._packed(decay.operand, self.heads)
        return value if decay.is_log else self.build("aten.log", value)

    def _past(self, state: State) -> Value:
        """(B, H, dk, dv)."""
        value = state.value
        if state.turned:
            order = [*range(len(value.shape) - 2), len(value.shape) - 1, len(value.shape) - 2]
            value = permuted(self.build, value, order)
        shape = [self._rows[0], self.heads, *value.shape[-2:]]
        return self.build.reshape(value, shape)

    def state(self, made: Value, like: State) -> Value:
        """The state after the last token as the graph has it."""
        value = permuted(self.build, made, [0, 1, 3, 2]) if like.turned else made
        return self.build.reshape(value, list(like.value.shape))

    def unpacked(self, made: Value) -> Value:
        """The result with the axes that the graph has."""
        order, shape = self.found.output.order, self.found.output.value.shape
        kept = [at for at in order if at is not None]
        value = self.build.reshape(made, [shape[at] for at in kept])
        value = permuted(self.build, value, [kept.index(at) for at in sorted(kept)])
        return self.build.reshape(value, list(shape))
