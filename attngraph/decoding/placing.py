"""The part of a decoder's graph that depends on positions, masks and sizes alone."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import sympy
import torch

from attngraph.analysis.walks import behind
from attngraph.frontend.families.cache import Layout
from attngraph.ir import Graph, Node, ScalarType, Value
from attngraph.ir.dims import substitute, symbols_of
from attngraph.ir.ops import evaluate
from attngraph.ir.traits import (
    CLAMP,
    COMPARISON,
    EMBEDDING,
    FILL,
    INDEX,
    MAXIMUM,
    MINIMUM,
    QUOTIENT,
    ROUNDED_DIVISION,
)

LONGEST = 1 << 17
"""No length beyond is tried: a causal mask of a few rows still fits there."""
POWERS = tuple(2**power for power in range(1, 17))
WINDOW = 4  # tokens that are compared in sequences of two lengths
_FEW = 64  # elements of a constant whose numbers may be limits
_STEPPED = COMPARISON | CLAMP | MINIMUM | MAXIMUM | QUOTIENT | ROUNDED_DIVISION


def around(lengths: Iterable[int], longest: int) -> list[int]:
    """Lengths, their next multiples and what is near, of which T + 1 is allowed as well."""
    near = {n * times + d for n in lengths for times in (1, 2, 3) for d in (-2, -1, 0, 1, 2)}
    return sorted(length for length in near if 1 <= length < longest)


def cut(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    for axis, size in enumerate(shape):
        tensor = tensor.narrow(axis, 0, min(size, tensor.shape[axis]))
    return tensor


class Placing:
    """The values of a decoder's graph that depend on positions, masks and sizes alone."""

    def __init__(self, graph: Graph, layout: Layout) -> None:
        self.graph, self.layout = graph, layout
        ids = next(value for value in graph.inputs if value.name == layout.ids)
        self.seq = str(ids.shape[1])
        self.given = {v for v in graph.inputs if v.name in (layout.mask, layout.positions)}
        self.values: set[Value] = {*self.given, *graph.constants.values()}
        self.moving: set[Value] = {*self.given}
        self.nodes: list[Node] = []
        for node in graph:
            if self._is_part(node):
                self.nodes.append(node)
                self.values.update(node.outputs)
                if self._moves(node):
                    self.moving.update(node.outputs)
        mine = set(self.nodes)
        outputs = set(graph.outputs)
        self.frontier = [
            value
            for node in self.nodes
            for value in node.outputs
            if value in self.moving
            and (value in outputs or any(user not in mine for user in value.users))
        ]
        self._constant: dict[Value, Any] = {}

    def _is_part(self, node: Node) -> bool:
        taken = node.operands
        return _reads_shape_alone(node) or all(value in self.values for value in taken)

    def _moves(self, node: Node) -> bool:
        sizes = {self.seq, self.layout.past}
        attributes = symbols_of(list(node.attrs.values()))
        shapes = [v.type.shape for v in node.outputs if not isinstance(v.type, ScalarType)]
        return (
            bool((attributes | frozenset().union(*map(symbols_of, shapes))) & sizes)
            or any(value in self.moving for value in node.inputs)
            or any(isinstance(value.type, ScalarType) for value in node.outputs)
        )

    def input(self, value: Value, seq: int, past: int) -> torch.Tensor:
        """An input of the graph for one row of text without padding; a past is that of its length,
        and the same tokens of longer rows have the same embeddings."""
        layout, shape = self.layout, self._shape(value, seq, past)
        if value.name == layout.mask:
            return torch.ones(shape, dtype=value.dtype)
        if value.name == layout.positions:
            return torch.arange(past, past + seq).to(value.dtype).expand(shape)
        if value.name in (layout.kinds, layout.added):
            return torch.zeros(shape, dtype=value.dtype)
        if value.name == layout.ids and not layout.embeds:
            return (torch.arange(past, past + seq) % 2).to(value.dtype)[None]
        if value.name in layout.memory and not value.dtype.is_floating_point:  # a mask
            return torch.ones(shape, dtype=value.dtype)
        random = torch.Generator().manual_seed(past)
        return torch.randn(shape, generator=random).to(value.dtype)

    def _shape(self, value: Value, seq: int, past: int) -> list[int]:
        sizes = self._sizes(seq, past)
        return [int(substitute(dim, sizes)) for dim in value.shape]

    def _sizes(self, seq: int, past: int) -> dict[str, int]:
        """The sizes for one row; a memory has the length that it was traced with."""
        hints = {name: info.hint for name, info in self.graph.dims.items()}
        return {**hints, self.layout.batch: 1, self.seq: seq, self.layout.past: past}

    def run(self, seq: int, past: int, wanted: Collection[Value]) -> dict[Value, Any]:
        """The wanted values that can be computed, for one row without padding."""
        needed = self._ancestors(wanted)
        sizes = self._sizes(seq, past)
        memory: dict[Value, Any] = {value: self.input(value, seq, past) for value in self.given}
        for node in self.nodes:
            if node not in needed or all(value in self._constant for value in node.outputs):
                continue
            results = self._evaluated(node, memory, sizes, seq, past)
            is_constant = not any(value in self.moving for value in node.outputs)
            for value, result in zip(node.outputs, results, strict=False):
                (self._constant if is_constant else memory)[value] = result
                if isinstance(value.type, ScalarType) and value.type.name:
                    sizes[value.type.name] = int(result)
        return {value: memory[value] for value in wanted if value in memory}

    def _evaluated(
        self, node: Node, memory: Mapping[Value, Any], sizes: Mapping[str, int], seq: int, past: int
    ) -> tuple[Any, ...]:
        arguments: list[Any] = []
        for value in node.inputs:
            if value is None:
                arguments.append(None)
            elif value in memory or value in self._constant:
                arguments.append(memory.get(value, self._constant.get(value)))
            elif value.data is not None:
                arguments.append(value.data)
            elif _reads_shape_alone(node):
                shape = self._shape(value, seq, past)
                arguments.append(torch.zeros((), dtype=value.dtype).expand(shape))
            else:
                return ()
        try:
            with torch.no_grad():
                return evaluate(node, arguments, sizes)
        except Exception:  # an index beyond a table, a size that only a run can tell
            return ()

    def _ancestors(self, wanted: Iterable[Value]) -> set[Node]:
        found = behind(wanted, lambda node: not _reads_shape_alone(node), limit=None)
        return {value.producer for value in found if value.producer is not None}

    def differing(self, length: int) -> set[Value]:
        """Values that the rest of the graph reads and that differ for the same tokens."""
        past = max(length - WINDOW, 0)
        short = self.run(length - past, past, self.frontier)
        long = self.run(length + 1 - past, past, self.frontier)
        return {value for value in short if value in long and not _same(short[value], long[value])}

    def numbers(self, longest: int, *, only_limits: bool = False) -> set[int]:
        """The whole numbers that are written in this part: in attributes, sizes and constants."""
        found: set[int] = set()
        for node in self.nodes:
            if not any(value in self.moving for value in node.outputs):
                continue
            is_limit = node.op in _STEPPED or node.op.startswith("aten.bucketize.")
            if only_limits and not is_limit:
                continue
            found.update(_written(list(node.attrs.values())))
            for value in node.inputs:
                if value is not None and value not in self.moving and _is_small(value):
                    data = value.data
                    if data is None:
                        data = self._constant.get(value)
                    if data is not None:
                        found.update(_written(data.flatten().tolist()))
        return {number for number in found if 2 <= number <= longest}

    def flips(self, longest: int) -> set[int]:
        """The lengths up to which a predicate of all tokens, or of one, has one value."""
        bools = [v for v in self.moving if v.producer is not None and v.dtype is torch.bool]
        of_all = [value for value in bools if not self._counts_tokens(value)]
        found: set[int] = set()
        if of_all:
            near = around(self.numbers(longest), longest)
            marks = sorted({1, *near, *(power for power in POWERS if power < longest), longest})
            states = [self._state(of_all, mark) for mark in marks]
            for (low, before), (high, after) in itertools.pairwise(zip(marks, states, strict=True)):
                if before != after:
                    lengths = range(low, high)
                    found.add(
                        low
                        + bisect.bisect_left(
                            lengths, True, key=lambda n: self._state(of_all, n + 1) != before
                        )
                    )
        of_keys = [value for value in bools if self._counts_keys(value)]
        for value, row in self.run(1, longest - 1, of_keys).items():
            if row.shape[-1] == longest and self._counts_keys(value):  # how far back one sees
                seen = row.reshape(-1, longest)[0].flip(0)
                found.update((seen[1:] != seen[:-1]).nonzero().flatten()[:2].add(1).tolist())
        of_one = [v for v in bools if self._counts_tokens(v) and not self._counts_keys(v)]
        for values in self.run(min(longest, 1 << 14), 0, of_one).values():
            rows = values.flatten()
            found.update((rows[1:] != rows[:-1]).nonzero().flatten()[:2].add(1).tolist())
        return found

    def _state(self, values: Collection[Value], length: int) -> list[Any]:
        """Their values at the last of so many tokens."""
        found = self.run(1, length - 1, values)
        return [found[value].tolist() if value in found else None for value in values]

    def _counts_tokens(self, value: Value) -> bool:
        return bool(symbols_of(list(value.shape)) & {self.seq, self.layout.past})

    def _counts_keys(self, value: Value) -> bool:
        return self.layout.past in symbols_of(list(value.shape))

    def tables(self) -> Iterator[tuple[int, bool]]:
        """(how many tokens there are rows for, whether positions count them) of each lookup."""
        for node in self.nodes:
            if node.op not in INDEX | EMBEDDING:
                continue
            table, index = node.inputs[:2]
            if table is None or index is None or table in self.moving or index not in self.moving:
                continue
            rows = table.shape[0]
            if not isinstance(rows, int) or index.dtype is torch.bool or rows > LONGEST:
                continue
            found = self.run(2 * rows + _FEW, 0, [index]).get(index)
            if found is None or self._counts_keys(index):
                continue
            least = -rows if node.op == "aten.index.Tensor" else 0
            outside = ((found < least) | (found >= rows)).flatten().nonzero()
            if len(outside):
                producers = self._ancestors([index])
                read = {value for each in producers for value in each.inputs} | {index}
                yield int(outside[0]), bool(read & self.given)


def _reads_shape_alone(node: Node) -> bool:
    """Whether a node takes no more than the shape and dtype of its inputs."""
    return node.op in FILL


def _is_small(value: Value) -> bool:
    size = math.prod(dim if isinstance(dim, int) else _FEW + 1 for dim in value.shape)
    return size <= _FEW


def _written(values: Any) -> Iterator[int]:
    """Whole numbers among attributes; those of an expression are its own."""
    if isinstance(values, (list, tuple)):
        for value in values:
            yield from _written(value)
    elif isinstance(values, sympy.Basic):
        yield from (abs(int(number)) for number in values.atoms(sympy.Integer))
    elif isinstance(values, Real) and not isinstance(values, bool) and math.isfinite(values):
        number = abs(float(values))
        yield from {math.floor(number), math.ceil(number)}


def _same(short: torch.Tensor, long: torch.Tensor) -> bool:
    """Equal in every place that both have, tokens being counted from the first."""
    if not isinstance(short, torch.Tensor):
        return bool(short == long)
    if short.dim() != long.dim() or any(
        a > b for a, b in zip(short.shape, long.shape, strict=True)
    ):
        return False
    return torch.equal(short.nan_to_num(), cut(long, short.shape).nan_to_num())
