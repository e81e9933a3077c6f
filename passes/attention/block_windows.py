"""block-windows: a softmax over a window of keys around each query is one over blocks of keys.

Sliding windows (Longformer, Beltagy et al., 2020) keep the scores of query i with the keys i − w to
i + w in 2w + 1 columns, which they make of products of overlapping blocks by pads, reshapes and
writes into a part of a tensor. Here a block of queries meets the blocks of keys that its windows
reach, and a mask hides the others of those: scores, softmax and sum are an attention as any.

Proof: windows.py reads which query and key each score is of, which scores are -inf because they are
of no key, and that the product with the values meets each weight once, at the value of its key. The
blocks that are written hold the same pairs: key minus query is one of the window's offsets, and
the key is one of the sequence. All others are -inf, so their weights are 0.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import sympy
import torch

from attngraph.analysis.attention.site import Site, understand
from attngraph.analysis.attention.window_reading import may_be_windows, read_windows
from attngraph.analysis.attention.windows import FEATURE, Scores, Windows
from attngraph.analysis.layout.axes import Atom, Axes, Operand, size_of
from attngraph.analysis.layout.digits import Placed
from attngraph.analysis.values.scalars import is_cast
from attngraph.ir import Builder, Dim, Graph, Node, Remark, Value
from attngraph.ir.conditions import at_sizes
from attngraph.ir.dead import erase_dead
from attngraph.ir.dims import as_dim, bounds, ceiling, divide, substitute, symbol, symbols_of
from attngraph.ir.loc import fuse_locs
from attngraph.ir.ops import attribute
from attngraph.ir.settling import settled
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import GraphPass
from attngraph.passes.rewriting.materialize import materialize
from attngraph.passes.rewriting.trials import LOGITS

_BLOCKED = "The scores of a window, and the sums of its values, are products of whole blocks."
_LEAST = 32  # queries of a block, where windows are narrower
_FEW = 6  # of the least sizes, where both ends of a sequence meet
_END = (1 << 63) - 1
_LONG = 4  # windows that one sequence has at least, whose ends don't


class BlockWindows(GraphPass, name="block-windows", exact=False):
    """Writes windows of keys as blocks of keys under a mask, where an attention is then read."""

    def run(self, graph: Graph) -> list[Remark]:
        checked = Checked(graph, self.name, kinds=LOGITS, depth=None)
        known: set[Hashable] = set()
        for softmax in list(graph):
            if softmax.graph is None or not may_be_windows(softmax):
                continue
            found = read_windows(softmax, _sizes(graph, softmax), known)
            if found is not None:
                _write(graph, checked, found, _block(graph, found))
        return checked.remarks


def _sizes(graph: Graph, softmax: Node) -> list[dict[str, int]]:
    """Sizes at which a layout is read: one of many windows first, and then the least ones."""
    shape = softmax.output.shape
    base = {name: info.hint or max(info.low, 2) for name, info in graph.dims.items()}
    count = int(shape[attribute(softmax, "dim")])
    long, few = dict(base), []
    for name in graph.dims:
        low, high = max(graph.dims[name].low, 1), graph.dims[name].high or math.inf
        if name not in symbols_of(shape):  # on which a layout may depend all the same
            sizes = [low, base[name] + 1, 2 * base[name] + 1]
        else:
            size = low
            while 2 * size <= high and _size_of(shape, {**base, name: size}, name) < _LONG * count:
                size *= 2
            long[name] = max(size, 2)
            sizes = [*range(low, low + _FEW), *(size + more for more in (0, 1, count // 3))]
        few += [{**base, name: size} for size in sizes if size <= high]
    return [sizes for sizes in (long, base, *few) if _are_allowed(graph, sizes)]


def _size_of(shape: Sequence[Dim], sizes: dict[str, int], name: str) -> int:
    """The largest size that a dim makes."""
    return max(int(substitute(dim, sizes)) for dim in shape if name in symbols_of(dim))


def _are_allowed(graph: Graph, sizes: dict[str, int]) -> bool:
    known = {symbol(name): sympy.Integer(size) for name, size in sizes.items()}
    return all(at_sizes(condition, known) == sympy.true for condition in graph.conditions)


@dataclass(frozen=True)
class _Blocks:
    """`count` blocks of `size` queries, each of which meets `before` blocks of keys before its own,
    and `after` behind.
    """

    size: Dim
    before: int
    after: int
    count: Dim

    @property
    def keys(self) -> Dim:
        return as_dim(self.size * (self.before + 1 + self.after))


def _block(graph: Graph, found: Windows) -> _Blocks:
    """Blocks that divide the sequence, or of which the last is filled up; one for a short one."""
    length = found.softmax.output.shape[found.position]
    low, high = min(found.offsets), max(found.offsets)
    reach, most = max(-low, high, 1), bounds(length, graph.dims)[1]
    if most is not None and most <= max(3 * reach, _LEAST):
        return _Blocks(length, 0, 0, 1)
    least = max(reach, _LEAST)
    whole = (size for size in range(least, 2 * least) if divide(length, size) is not None)
    size = next(whole, least)
    before, after = (math.ceil(max(end, 0) / size) for end in (-low, high))
    return _Blocks(size, before, after, settled(ceiling(length, size), graph.dims))


def _write(graph: Graph, checked: Checked, found: Windows, block: _Blocks) -> None:
    mark = graph.created
    loc = fuse_locs([*found.chain, found.root], found.root)
    made = _Written(Builder(graph, found.root, loc), found, block)
    softmax, result = made.attention()
    if not isinstance(understand(softmax), Site):
        erase_dead(graph, [result.producer], since=mark)
        return
    ends = [found.value, *(p for s in found.scores for p in (s.query, s.key) if p is not None)]
    leaves = [*(end.value for end in ends), *found.cleared]
    checked.replace(
        [(found.root.output, result)], leaves=leaves, proved=True, reassociates=_BLOCKED
    )


class _Written:
    """The nodes of one attention over blocks."""

    def __init__(self, build: Builder, found: Windows, block: _Blocks) -> None:
        self.build, self.found, self.block = build, found, block
        shape = found.softmax.output.shape
        self.length, self.count = shape[found.position], block.count
        self.more = as_dim(sympy.expand(block.size * block.count - sympy.sympify(self.length)))
        self.blocks, self.query, self.keys = map(_axis, (block.count, block.size, block.keys))
        self.position = _axis(self.length)
        ends = (found.position, found.window)
        self.rows = {axis: _axis(size) for axis, size in enumerate(shape) if axis not in ends}
        stored = [d.axis for scores in found.scores for dim in scores.key.dims for d in dim]
        order = list(dict.fromkeys(axis for axis in stored if axis not in (None, FEATURE)))
        order = [*(axis for axis in self.rows if axis not in order), *order]
        axes = {**self.rows, found.position: self.blocks}
        self.lead: Axes = tuple(axes[axis] for axis in order if axis is not None and axes[axis])

    def attention(self) -> tuple[Node, Value]:
        """The softmax, and what takes the place of the result."""
        build, found = self.build, self.found
        scores = [self._scores(each) for each in found.scores]
        total = scores[0]
        for part in scores[1:]:
            total = build("aten.add.Tensor", total, part)
        axes = (*self.lead, self.query, self.keys)
        where = materialize(build, self._keep(), axes, broadcast=False)
        fill = build.constant(torch.tensor(-math.inf, dtype=total.dtype), "masked")
        masked = build("aten.where.self", where, total, fill)
        attrs = {**found.softmax.attrs, "dim": len(self.lead) + 1}
        softmax = build.node(found.softmax.op, masked, **attrs)
        weights = softmax.output
        for node in found.chain[1:]:
            if is_cast(node):
                weights = build.again(node, node.inputs[0], weights)
        features = _axis(found.features)
        value = self._in_blocks(found.value, features)
        values = materialize(build, value, (*self.lead, self.keys, features), broadcast=False)
        context = build("aten.matmul", weights, values)
        if found.gain != 1.0:
            context = build("aten.mul.Scalar", context, other=found.gain)
        result = self._rows_of(Operand(context, (*self.lead, self.query, features)), features)
        of_result = {**self.rows, found.position: self.position, FEATURE: features}
        for predicate in found.cleared:
            result = self._cleared(result, predicate)
        target = tuple(of_result[axis] for axis in found.order)
        laid_out = materialize(build, result, target)
        return softmax, build.reshape(laid_out, found.root.output.shape)

    def _rows_of(self, context: Operand, features: tuple[Atom, ...]) -> Operand:
        """The rows of all blocks one after the other, without those that fill up the last."""
        rows = [atoms for atoms in self.rows.values() if atoms]
        target = (*rows, (*self.blocks, *self.query), features)
        value = materialize(self.build, context, target)
        if self.more != 0:
            at, end = len(rows), self.length
            value = self.build("aten.slice.Tensor", value, dim=at, start=0, end=end)
        return Operand(value, (*rows, self.position, features))

    def _scores(self, scores: Scores) -> Value:
        """A product of queries and keys, or what is the same for all queries."""
        build, features = self.build, _axis(scores.features)
        key = self._in_blocks(scores.key, features)
        if scores.query is None:
            product = materialize(build, key, (*self.lead, (), self.keys), broadcast=False)
        else:
            query = self._queries(scores.query, features)
            rows = materialize(build, query, (*self.lead, self.query, features), broadcast=False)
            columns = materialize(build, key, (*self.lead, features, self.keys), broadcast=False)
            product = build("aten.matmul", rows, columns)
        if scores.factor == 1.0:
            return product
        return build("aten.mul.Scalar", product, other=scores.factor)

    def _queries(self, placed: Placed, features: tuple[Atom, ...]) -> Operand:
        """Queries in blocks, of which the last is filled up with zeros."""
        if self.more == 0:
            position = (*self.blocks, *self.query)
            return self._operand(
                placed, {**self.rows, self.found.position: position, FEATURE: features}
            )
        value, dims, at = self._stored(placed, features)
        value = self._padded(value, at, 0, self.more)
        shape = [*value.shape[:at], self.count, self.block.size, *value.shape[at + 1 :]]
        value = self.build("aten.reshape", value, shape=shape)
        return Operand(value, (*dims[:at], self.blocks, self.query, *dims[at + 1 :]))

    def _stored(
        self, placed: Placed, features: tuple[Atom, ...]
    ) -> tuple[Value, list[tuple[Atom, ...]], int]:
        """A value with a dim for each axis, in the order in which it is stored, these axes, and the
        place of the position among them.
        """
        axes = {**self.rows, self.found.position: self.position, FEATURE: features}
        operand = self._operand(placed, axes)
        dims: list[tuple[Atom, ...]] = [(atom,) for atom in operand.atoms]
        return materialize(self.build, operand, tuple(dims)), dims, dims.index(self.position)

    def _padded(self, value: Value, at: int, before: Dim, after: Dim) -> Value:
        ends = [before, after]
        if ends == [0, 0]:
            return value
        return self.build("aten.pad", value, pad=[0, 0] * (len(value.shape) - 1 - at) + ends)

    def _operand(self, placed: Placed, axes: Mapping[int, tuple[Atom, ...]]) -> Operand:
        """A value as it is indexed, without the places that are not meant."""
        build, value = self.build, placed.value
        digits = [digit for dim in placed.dims for digit in dim]
        if all(digit.size is None for digit in digits):
            found = [[axes[d.axis] for d in dim if d.axis is not None] for dim in placed.dims]
            return Operand(value, tuple(tuple(chain.from_iterable(dim)) for dim in found))
        own = [1 if digit.axis is None else size_of(axes[digit.axis]) for digit in digits]
        sizes = [size if d.size is None else d.size for d, size in zip(digits, own, strict=True)]
        value = build.reshape(value, sizes)
        for dim, (digit, size) in reversed([*enumerate(zip(digits, own, strict=True))]):
            if digit.axis is None:
                value = build("aten.select.int", value, dim=dim, index=digit.start)
            elif digit.size is not None:
                end = as_dim(digit.start + size)
                value = build("aten.slice.Tensor", value, dim=dim, start=digit.start, end=end)
        return Operand(value, tuple(axes[d.axis] for d in digits if d.axis is not None))

    def _in_blocks(self, placed: Placed, features: tuple[Atom, ...]) -> Operand:
        """Keys or values, in the order in which they are stored: for each block of queries the
        blocks of keys that it meets, of which those off the ends are zeros.
        """
        build, block = self.build, self.block
        value, dims, at = self._stored(placed, features)
        more = block.before + block.after
        if self.count == 1 and not more:
            return Operand(value, (*dims[:at], self.keys, *dims[at + 1 :]))
        behind = as_dim(self.more + block.after * block.size)
        value = self._padded(value, at, block.before * block.size, behind)
        blocks = [*value.shape[:at], as_dim(self.count + more), block.size, *value.shape[at + 1 :]]
        value = build.reshape(value, blocks)
        parts = [
            build("aten.slice.Tensor", value, dim=at, start=first, end=first - more or _END)
            for first in range(more + 1)
        ]
        value = build("aten.cat", *parts, dim=at + 1) if more else value
        return Operand(value, (*dims[:at], self.blocks, self.keys, *dims[at + 1 :]))

    def _keep(self) -> Operand:
        """Which key is of a query's window, and of the sequence."""
        build, block = self.build, self.block
        own = build("aten.arange", end=block.keys)
        before = as_dim(block.before * block.size)
        if before != 0:
            own = build("aten.sub.Scalar", own, other=before)
        queries = build("aten.reshape", build("aten.arange", end=block.size), shape=[block.size, 1])
        band = self._offsets(build("aten.sub.Tensor", own, queries))
        if not block.before + block.after:
            return Operand(band, (self.query, self.keys))
        starts = build("aten.mul.Scalar", build("aten.arange", end=self.count), other=block.size)
        column = build("aten.reshape", starts, shape=[self.count, 1, 1])
        keys = build("aten.add.Tensor", column, own)
        begins = build("aten.ge.Scalar", keys, other=0)
        ends = build("aten.lt.Scalar", keys, other=self.length)
        inside = build("aten.logical_and", begins, ends)
        keep = build("aten.logical_and", inside, band)
        return Operand(keep, (self.blocks, self.query, self.keys))

    def _offsets(self, offsets: Value) -> Value:
        """Which differences of a key and a query are those of a window."""
        build, known = self.build, self.found.offsets
        low = build("aten.ge.Scalar", offsets, other=min(known))
        high = build("aten.le.Scalar", offsets, other=max(known))
        band = build("aten.logical_and", low, high)
        if abs(known.step) == 1:
            return band
        steps = build("aten.sub.Scalar", offsets, other=min(known))
        rest = build("aten.remainder.Scalar", steps, other=abs(known.step))
        return build("aten.logical_and", band, build("aten.eq.Scalar", rest, other=0))

    def _cleared(self, context: Operand, predicate: Value) -> Operand:
        """Zero in the rows of which a predicate is true."""
        build = self.build
        axes = {**self.rows, self.found.position: self.position}
        dims = tuple(
            axes.get(axis, ()) if size != 1 else () for axis, size in enumerate(predicate.shape)
        )
        rows = materialize(build, Operand(predicate, dims), context.axes, broadcast=False)
        zero = build.constant(torch.zeros((), dtype=context.value.dtype), "zero")
        return replace(context, value=build("aten.where.self", rows, zero, context.value))


def _axis(size: Dim) -> tuple[Atom, ...]:
    return () if size == 1 else (Atom(size),)
