"""A cache of fixed size: the pasts are buffers, and the presents are the same memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from attngraph.errors import UsageError
from attngraph.ir import Builder, Graph, Value
from attngraph.ir.dims import same
from attngraph.ir.ops import attribute, input_of

CAPACITY = "max_length"
"""The dim of a buffer that counts the tokens it has room for."""
LENGTH = "past_length"
"""The input that counts the tokens a cache holds where no mask does, unless that name is taken."""

Run = Callable[[Mapping[str, torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Buffers:
    """How a decoder's graph is lowered for a static cache.

    Input `past` of `presents` gets room for max_length tokens along its axis of `axes`. The first
    tokens in it are what the cache holds: their number stands for the dim `dim`. It is how much
    longer the input `mask` (B, P + S) is than the token ids `ids` (B, S), so that a caller who
    knows of a mask need know of nothing else; a model without a mask has an input `length` (1,)
    i64 for it. `rows` are the axes of inputs along which rows of the batch lie. The present of a
    past is that buffer with the new tokens after them, to be written where it lies.
    """

    presents: Mapping[str, str]
    dim: str
    ids: str
    axes: Mapping[str, int]
    rows: Mapping[str, int]
    mask: str | None = None
    length: str | None = None

    @property
    def by_name(self) -> dict[str, int]:
        """The axis along which each past, and each present, counts its tokens."""
        return {
            name: axis for past, axis in self.axes.items() for name in (past, self.presents[past])
        }

    def holds(self, value: Value | None) -> bool:
        """Whether a value is a past that lies in a buffer."""
        return value is not None and value.producer is None and value.name in self.presents

    def evaluate(
        self, run: Run, given: Mapping[str, torch.Tensor], outputs: Sequence[str]
    ) -> tuple[torch.Tensor, ...]:
        """What `run` makes of pasts of P tokens, with presents of P + S: a growing cache.

        The buffers hold NaN behind the tokens, so that reading there shows.
        """
        rows = self.alone(given)
        if len(rows) > 1:
            each = [self.evaluate(run, row, outputs) for row in rows]
            return tuple(torch.cat(parts) for parts in zip(*each, strict=True))
        new, past = given[self.ids].shape[1], self._past(given)
        feeds = dict(given)
        for name, axis in self.axes.items():
            room = list(given[name].shape)
            room[axis] = new + 3
            feeds[name] = torch.cat([given[name], given[name].new_full(room, torch.nan)], axis)
        if self.length is not None:
            feeds[self.length] = torch.tensor([past])
        axes = self.by_name
        return tuple(
            tensor.narrow(axes[name], 0, past + new) if name in axes else tensor
            for name, tensor in zip(outputs, run(feeds), strict=True)
        )

    def alone(self, given: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """What runs by itself: each row of a batch, or all of them together."""
        batch, new = given[self.ids].shape[:2]
        if not by_row(batch, new, self._past(given)):
            return [dict(given)]
        return [row_of(given, row, self.rows) for row in range(batch)]

    def _past(self, given: Mapping[str, torch.Tensor]) -> int:
        first = next(iter(self.presents))
        return given[first].shape[self.axes[first]]


def by_row(batch: int, new: int, past: int) -> bool:
    """Whether rows run one by one, as GroupQueryAttention needs for several tokens after a past."""
    return batch > 1 and new > 1 and past > 0


def axes_of_rows(shapes: Mapping[str, Sequence[object]], batch: str) -> dict[str, int]:
    """The axis of each tensor that counts rows: those that have one, by their shapes' dims."""
    dims = {name: [str(dim) for dim in shape] for name, shape in shapes.items()}
    return {name: each.index(batch) for name, each in dims.items() if batch in each}


def row_of(
    tensors: Mapping[str, torch.Tensor], row: int, axes: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """One row of a batch, which some have along these axes; any other tensor is all rows'."""
    return {
        name: tensor.narrow(axes[name], row, 1) if name in axes else tensor
        for name, tensor in tensors.items()
    }


def require_in_place(graph: Graph, buffers: Buffers, source: str) -> None:
    """Raises UsageError where a past is more than what one attention or `cat` begins with, or a
    present is not what comes out of it."""
    outputs = dict(zip(graph.output_names, graph.outputs, strict=True))
    for value in graph.inputs:
        if value.name not in buffers.presents:
            continue
        present = outputs[buffers.presents[value.name]]
        alone = len(value.uses) == 1 and graph.outputs.count(present) == 1
        if not alone or not (_is_attended(value, present) or _is_joined(graph, buffers, value)):
            raise UsageError(
                f"The cache of {source} can't be static: {value.name} is not just the past of one "
                f"attention whose keys or values come out as {buffers.presents[value.name]}, or "
                "joined to what is new there, so there is no one place to write to. Compile it "
                "with a growing cache."
            )


def _is_attended(past: Value, present: Value) -> bool:
    """Whether an attention takes the past, and nothing but the caller its present."""
    reader, parts = present.producer, ("past_key", "past_value")
    return (
        reader is not None
        and reader.op == "attn.attention"
        and present in reader.outputs[-2:]
        and past is input_of(reader, parts[present is reader.outputs[-1]])
        and not present.uses
    )


def _is_joined(graph: Graph, buffers: Buffers, past: Value) -> bool:
    """Whether the present is `cat(past, new)` along the tokens, in rows of the batch."""
    outputs = dict(zip(graph.output_names, graph.outputs, strict=True))
    reader = outputs[buffers.presents[past.name]].producer
    ids = next(value for value in graph.inputs if value.name == buffers.ids)
    return (
        reader is not None
        and reader.op == "aten.cat"
        and len(reader.inputs) == 2
        and reader.inputs[0] is past
        and attribute(reader, "dim") % len(past.shape) == buffers.axes[past.name]
        and same(past.shape[0], ids.shape[0])
    )


def part_joined(graph: Graph, buffers: Buffers) -> None:
    """Gives the readers of a present that is a `cat` a copy: the caller's is a buffer."""
    kept, build = tuple(graph.outputs), Builder(graph)
    for value in graph.inputs:
        if value.name in buffers.presents and _is_joined(graph, buffers, value):
            joined = value.users[0]
            build.at(joined, joined.loc)
            graph.replace_uses(joined.output, build("aten.cat", *joined.inputs, **joined.attrs))
            graph.set_outputs(kept, graph.output_names)
