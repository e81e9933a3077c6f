"""A recurrence that reads its state by another key than it writes, in products of matrices.

S_t = diag(w_t) S_{t−1} + b_t ⊗ S_{t−1}ᵀ a_t + k_t ⊗ v_t, o_t = q_tᵀ S_t, w = e^g. onnxruntime has
no operator of it. In a chunk of C tokens behind a state S, with W_i = w_1 ⋯ w_i, what the tokens
read by a is U = Â S + N U + M V, in which Â has the rows a_i W_{i−1}, and N and M the numbers
Σ a_i b_j W_{i−1} / W_j and Σ a_i k_j W_{i−1} / W_j for j < i, and 0 elsewhere. So

    U = P (Â S + M V), P = (I − N)⁻¹
    O = R̂ S + B U + K V = (R̂ + B P Â) S + (B P M + K) V

where R̂ has the rows q_i W_i, and B and K are like N and M, of q and W_i for j ≤ i. The state
becomes W_C (S + Σ (b_j ⊗ U_j + k_j ⊗ v_j) / W_j). All but S is computed for all chunks at once.

P is built up from the inverses of the blocks on the diagonal, of 1, 2, 4 and 8 tokens: the inverse
of [X 0; −Y Z] is [X⁻¹ 0; Z⁻¹ Y X⁻¹ Z⁻¹]. The product (I + N)(I + N²)(I + N⁴)(I + N⁸) takes as many
multiplications, but the powers of N may be 10⁴ times as large as P: of 16 tokens with one key, a =
−b = k, N has −1 below its diagonal, N⁴ has 165, and P is of 0 and ±1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir
import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from attngraph.analysis.recurrence.chunks import CHUNK, is_in_chunks, is_of_heads
from attngraph.analysis.values.intervals import Intervals
from attngraph.analysis.values.matching import producer
from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.export.lowering.emission.registry import register_lowering
from attngraph.ir import Builder, Dim, Graph, Node, TensorType, Value
from attngraph.ir.dims import as_dim, bounds
from attngraph.ir.ops import attribute, input_of

_FEW = 8
"""Tokens up to which a Scan over tokens takes less time than a chunk."""
_NOTHING = -800.0
"""The logarithm of a number that is 0 in float64."""


@register_lowering("attn.generalized_delta_rule")
def lower_generalized_delta_rule(ctx: LoweringContext, node: Node) -> Sequence[ir.Value]:
    """In chunks, or token by token where there are few, or where decays can't be multiplied; one
    token is a step, without a loop."""
    rule = _Rule.of(ctx, node)
    low, high = bounds(rule.length, ctx.graph.dims)
    if rule.length == 1:
        return rule.one()
    by_tokens: Callable[[], Sequence[ir.Value]] = rule.by_tokens
    if low <= 1:
        is_one = ctx.op("Equal", ctx.dim(rule.length), ctx.constant(1))

        def by_tokens() -> Sequence[ir.Value]:
            return ctx.branches(is_one, rule.one, rule.by_tokens)

    if not is_in_chunks(node) or (high is not None and high <= _FEW):
        return by_tokens()
    if low > _FEW:
        return rule.in_chunks()
    few = ctx.op("LessOrEqual", ctx.dim(rule.length), ctx.constant(_FEW))
    return ctx.branches(few, by_tokens, rule.in_chunks)


@dataclass(frozen=True)
class _Operand:
    """(B, T, H·D), in the shape in which the graph has it before it is reshaped to that."""

    value: ir.Value
    shape: Sequence[Dim]

    @classmethod
    def of(cls, ctx: LoweringContext, x: Value, dtype: torch.dtype) -> _Operand:
        while (source := producer(x, "aten.reshape")) and source.inputs[0] is not None:
            x = source.inputs[0]
        return cls(ctx.cast(ctx.value(x), dtype), x.shape)


@dataclass(frozen=True)
class _Rule:
    """The operands in the dtype that is computed in; `state` (B, H, dk, dv) is what stands before
    the first token.
    """

    ctx: LoweringContext
    node: Node
    dtype: torch.dtype
    query: _Operand
    key: _Operand
    value: _Operand
    a: _Operand
    b: _Operand
    state: ir.Value

    @classmethod
    def of(cls, ctx: LoweringContext, node: Node) -> _Rule:
        """Half precision is computed in float32, as torch sums it up."""
        given = input_of(node, "value").dtype
        dtype = torch.float64 if given == torch.float64 else torch.float32

        names = "query", "key", "value", "a", "b"
        query, key, value, a, b = (_Operand.of(ctx, input_of(node, name), dtype) for name in names)
        if (scale := float(attribute(node, "scale"))) != 1:
            scaled = ctx.op("Mul", query.value, ctx.constant(scale, dtype))
            query = replace(query, value=scaled)
        past, state = input_of(node, "past"), node.outputs[1].shape
        if past is None:
            first = ctx.expand(ctx.constant(0.0, dtype), [], state)
        else:
            first = ctx.cast(ctx.value(past), dtype)
        return cls(ctx, node, dtype, query, key, value, a, b, first)

    @property
    def rows(self) -> Dim:
        return input_of(self.node, "value").shape[0]

    @property
    def length(self) -> Dim:
        return input_of(self.node, "value").shape[1]

    @property
    def heads(self) -> int:
        return int(attribute(self.node, "heads"))

    @property
    def keys(self) -> int:
        return int(input_of(self.node, "key").shape[2]) // self.heads

    @property
    def features(self) -> int:
        return int(input_of(self.node, "value").shape[2]) // self.heads

    @property
    def decay(self) -> Value | None:
        decay: Value | None = input_of(self.node, "decay")
        return decay

    @property
    def decays(self) -> int:
        """How many decays a head has."""
        return 1 if is_of_heads(self.node) else self.keys

    def kept(self, decay: Value) -> _Operand:
        """e^g, as the graph has it where it takes the logarithm of that."""
        source = producer(decay, "aten.log")
        given = None if source is None else input_of(source, "self")
        if given is not None and Intervals().of(given)[0] >= 0:  # below 0 the logarithm is NaN
            return _Operand.of(self.ctx, given, self.dtype)
        log = _Operand.of(self.ctx, decay, self.dtype)
        return replace(log, value=self.ctx.op("Exp", log.value))

    def one(self) -> list[ir.Value]:
        """A step."""
        ctx, (rows, heads) = self.ctx, (self.rows, self.heads)

        def split(x: _Operand, *shape: int) -> ir.Value:
            return ctx.reshape(x.value, x.shape, [rows, heads, *shape])

        read = ctx.op("MatMul", split(self.a, 1, self.keys), self.state)
        pair = [split(x, self.keys, 1) for x in (self.b, self.key)]
        written = [read, split(self.value, 1, self.features)]
        added = ctx.op(
            "MatMul", ctx.op("Concat", *pair, axis=-1), ctx.op("Concat", *written, axis=-2)
        )
        left = self.state
        if self.decay is not None:
            left = ctx.op("Mul", left, split(self.kept(self.decay), self.decays, 1))
        after = ctx.op("Add", left, added)
        seen = ctx.op("MatMul", split(self.query, 1, self.keys), after)
        shape = [rows, heads, 1, self.features]
        return [ctx.reshape(seen, shape, [rows, self.length, heads * self.features]), after]

    def by_tokens(self) -> list[ir.Value]:
        """A Scan over tokens, of products of matrices."""
        ctx, (keys, features) = self.ctx, (self.keys, self.features)
        q, a = (self._token(x, keys, row=True) for x in (self.query, self.a))
        pair = [self._token(x, keys, row=False) for x in (self.b, self.key)]
        given = [
            a,
            ctx.op("Concat", *pair, axis=-1),
            self._token(self.value, features, row=True),
            q,
        ]
        shapes = [(1, keys), (keys, 2), (1, features), (1, keys)]
        if self.decay is not None:
            given.append(self._token(self.kept(self.decay), self.decays, row=False))
            shapes.append((self.decays, 1))
        last, seen = self._scan(given, shapes, self._step)
        seen = ctx.op("Transpose", seen, perm=[1, 0, 2, 3, 4])
        shape = [self.rows, self.length, self.heads, 1, features]
        return [ctx.reshape(seen, shape, [*shape[:2], self.heads * features]), last]

    def _token(self, x: _Operand, features: int, *, row: bool) -> ir.Value:
        """(T, B, H, 1, D) of (B, T, H·D), or (T, B, H, D, 1)."""
        ctx, tokens = self.ctx, [self.rows, self.length]
        shape = [self.heads, *((1, features) if row else (features, 1))]
        shaped = ctx.reshape(x.value, x.shape, [*tokens, *shape])
        return ctx.op("Transpose", shaped, perm=[1, 0, 2, 3, 4])

    @staticmethod
    def _step(build: Builder, state: Value, given: Sequence[Value]) -> tuple[Value, Value]:
        a, pair, v, q, *decay = given
        written = build("aten.cat", build("aten.matmul", a, state), v, dim=-2)
        left = build("aten.mul.Tensor", state, decay[0]) if decay else state
        after = build("aten.add.Tensor", left, build("aten.matmul", pair, written))
        return after, build("aten.matmul", q, after)

    def in_chunks(self) -> list[ir.Value]:
        """A Scan over chunks, of what is computed for all of them before it."""
        ctx, (keys, features) = self.ctx, (self.keys, self.features)
        op = ctx.op
        reads = op("Concat", *(self._chunked(x, keys) for x in (self.a, self.query)), axis=-2)
        writes = op("Concat", *(self._chunked(x, keys) for x in (self.b, self.key)), axis=-2)
        v = self._chunked(self.value, features)
        lower, strict = _ones().tril(), _ones().tril(-1)
        g = None if self.decay is None else self._logarithms(self.decay)
        own, ends = reads, writes
        if g is not None:
            own = op("Mul", reads, self._product(torch.cat([strict, lower]), g))
            ends = op("Mul", writes, self._product(torch.cat([strict.T, strict.T]), g))
        left, right = own, writes
        table = self._constant(torch.cat([strict, lower]).repeat(1, 2))
        if g is not None and self.decays == 1:
            left, between = reads, op("Mul", g, self._constant(strict))
            each = self._product(torch.cat([strict, lower]), between)
            table = op("Mul", op("Concat", each, each, axis=-1), table)
        elif g is not None:
            right = op("Mul", writes, self._product(-torch.cat([lower, lower]), g))
        numbers = op("Mul", op("MatMul", left, self._turned(right)), table)
        pairs = self._half(numbers, 0, -1)
        known = op("MatMul", self._half(numbers, 1, -1), v)
        inverse = self._inverse(self._half(pairs, 0, -2))
        solved = op("Concat", inverse, op("MatMul", self._half(pairs, 1, -2), inverse), axis=-2)
        seen = self._constant(torch.cat([torch.zeros(CHUNK, 1), torch.ones(CHUNK, 1)]))
        of_state, of_tokens = (
            op("Add", op("MatMul", solved, self._half(x, 0, -2)), op("Mul", x, seen))
            for x in (own, known)
        )
        given = [of_state, of_tokens, self._turned(ends), v]
        both = 2 * CHUNK
        shapes = [(both, keys), (both, features), (keys, both), (CHUNK, features)]
        if g is not None:
            given.append(self._turned(self._product(torch.ones(1, CHUNK), g)))
            shapes.append((self.decays, 1))
        last, seen = self._scan(given, shapes, self._chunk)
        tokens = [self.rows, as_dim(self._chunks * CHUNK), self.heads * features]
        seen = op("Transpose", seen, perm=[1, 0, 3, 2, 4])
        shape = [self.rows, self._chunks, CHUNK, self.heads, features]
        seen = ctx.reshape(seen, shape, tokens)
        if self._rest != 0:
            ends = ctx.shape([self.length])
            seen = op("Slice", seen, ctx.constant([0]), ends, ctx.constant([1]))
        return [seen, last]

    @staticmethod
    def _chunk(build: Builder, state: Value, given: Sequence[Value]) -> tuple[Value, Value]:
        of_state, of_tokens, ends, v, *decay = given
        made = build("aten.add.Tensor", build("aten.matmul", of_state, state), of_tokens)
        sizes = [CHUNK, CHUNK]
        read, seen = build.node("aten.split_with_sizes", made, split_sizes=sizes, dim=-2).outputs
        left = build("aten.mul.Tensor", state, decay[0]) if decay else state
        written = build("aten.matmul", ends, build("aten.cat", read, v, dim=-2))
        return build("aten.add.Tensor", left, written), seen

    @property
    def _chunks(self) -> Dim:
        length = self.length
        return -(-length // CHUNK) if isinstance(length, int) else _quotient(length)

    @property
    def _rest(self) -> Dim:
        """Tokens that the last chunk lacks."""
        return as_dim(self._chunks * CHUNK - self.length)

    def _chunked(self, x: _Operand, features: int) -> ir.Value:
        """(n, B, H, C, D) of (B, T, H·D): tokens of zeros behind the last one change nothing."""
        ctx, rows, width = self.ctx, self.rows, self.heads * features
        found, old = x.value, list(x.shape)
        if self._rest != 0:
            found = ctx.reshape(found, old, [rows, self.length, width])
            amounts = ctx.shape([0, 0, 0, 0, self._rest, 0])
            found = ctx.op("Pad", found, amounts, mode="constant")
            old = [rows, as_dim(self._chunks * CHUNK), width]
        shape = [rows, self._chunks, CHUNK, self.heads, features]
        shaped = ctx.reshape(found, old, shape)
        return ctx.op("Transpose", shaped, perm=[1, 0, 3, 2, 4])

    def _logarithms(self, decay: Value) -> ir.Value:
        """g (n, B, H, C, D), none of it −∞: sums of these are NaN times 0."""
        ctx = self.ctx
        g = self._chunked(_Operand.of(ctx, decay, self.dtype), self.decays)
        if self.decays > 1:
            return g
        least = ctx.constant(_NOTHING, self.dtype)
        return ctx.op("Where", ctx.op("Less", g, least), least, g)

    def _product(self, of: torch.Tensor, g: ir.Value) -> ir.Value:
        """Each row's product of decays: those of the tokens where `of` is 1, or their inverse."""
        return self.ctx.op("Exp", self.ctx.op("MatMul", self._constant(of), g))

    def _inverse(self, pairs: ir.Value) -> ir.Value:
        """(I − N)⁻¹ of N (…, C, C), which is read below its diagonal only."""
        op, place = self.ctx.op, torch.arange(CHUNK)
        found, size = None, 1
        while size < CHUNK:
            block, row = place // (2 * size), place // size
            corner = (block[:, None] == block) & (row[:, None] > row)
            below = op("Mul", pairs, self._constant(corner))
            if found is None:
                found = op("Add", below, self._constant(torch.eye(CHUNK)))
            else:
                found = op("Add", found, op("MatMul", op("MatMul", found, below), found))
            size *= 2
        assert found is not None
        return found

    def _half(self, x: ir.Value, which: int, axis: int) -> ir.Value:
        start, end, along = (
            self.ctx.constant([at]) for at in (which * CHUNK, (which + 1) * CHUNK, axis)
        )
        return self.ctx.op("Slice", x, start, end, along)

    def _turned(self, x: ir.Value) -> ir.Value:
        return self.ctx.op("Transpose", x, perm=[0, 1, 2, 4, 3])

    def _constant(self, x: torch.Tensor) -> ir.Value:
        return self.ctx.constant(x, self.dtype)

    def _scan(
        self,
        given: Sequence[ir.Value],
        shapes: Sequence[Sequence[int]],
        step: Callable[[Builder, Value, Sequence[Value]], tuple[Value, Value]],
    ) -> tuple[ir.Value, ...]:
        """The last state and what each step gives, of items (n, B, H, …) of these shapes."""
        body = Graph("tokens")
        body.dims = self.ctx.graph.dims
        batch = self.node.outputs[1].shape[:2]
        sizes = [(self.keys, self.features), *shapes]
        state, *items = (
            body.add_input("given", TensorType(self.dtype, (*batch, *size))) for size in sizes
        )
        body.set_outputs(list(step(Builder(body), state, items)))
        return self.ctx.ops(
            "Scan",
            *(self.state, *given),
            outputs=2,
            body=self.ctx.loop_body(body, {}),
            num_scan_inputs=len(given),
        )


def _ones() -> torch.Tensor:
    return torch.ones(CHUNK, CHUNK)


def _quotient(length: sympy.Expr) -> Dim:
    """Chunks of as many tokens, the last one with a rest."""
    quotient: Any = FloorDiv
    return as_dim(quotient(length + CHUNK - 1, CHUNK))
