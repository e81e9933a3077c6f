"""A cache of fixed size: the pasts are buffers, and the presents are the same memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from attngraph.errors import UsageError
from attngraph.ir import Graph, Value
from attngraph.ir.ops import input_of

CAPACITY = "max_length"
"""The dim of a buffer that counts the tokens it has room for."""
LENGTH = "past_length"
"""The input that counts the tokens a cache holds, unless that name is taken."""

Run = Callable[[Mapping[str, torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Buffers:
    """How a decoder's graph is lowered for a static cache.

    Input `past` of `presents` becomes (B, G, max_length, D), in which the first tokens are what the
    cache holds: their number is the input `length` (1,) i64, which stands for the dim `dim`. The
    present of a past is that buffer with the new tokens after them, to be written where it lies.
    `ids` is the input (B, S) of token ids.
    """

    presents: Mapping[str, str]
    dim: str
    length: str
    ids: str

    def holds(self, value: Value | None) -> bool:
        """Whether a value is a past that lies in a buffer."""
        return value is not None and value.producer is None and value.name in self.presents

    def evaluate(
        self, run: Run, given: Mapping[str, torch.Tensor], outputs: Sequence[str]
    ) -> tuple[torch.Tensor, ...]:
        """What `run` makes of pasts (B, G, P, D), with presents (B, G, P + S, D): a growing cache.

        What the buffers hold behind the tokens is NaN, so that nothing is right that reads it.
        """
        batch, new = given[self.ids].shape[:2]
        past = given[next(iter(self.presents))].shape[2]
        if by_row(batch, new, past):
            rows = [self.evaluate(run, row_of(given, row), outputs) for row in range(batch)]
            return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))
        room = new + 3
        feeds = {
            name: torch.nn.functional.pad(tensor, (0, 0, 0, room), value=torch.nan)
            if name in self.presents
            else tensor
            for name, tensor in given.items()
        }
        feeds[self.length] = torch.tensor([past])
        grown = {*self.presents.values()}
        return tuple(
            tensor[:, :, : past + new] if name in grown else tensor
            for name, tensor in zip(outputs, run(feeds), strict=True)
        )


def by_row(batch: int, new: int, past: int) -> bool:
    """Whether rows go one by one: GroupQueryAttention takes several tokens behind a past so."""
    return batch > 1 and new > 1 and past > 0


def row_of(tensors: Mapping[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    """One row of a batch; a vector is all rows'."""
    return {name: t[row : row + 1] if t.dim() > 1 else t for name, t in tensors.items()}


def require_in_place(graph: Graph, buffers: Buffers, source: str) -> None:
    """Raises UsageError where a past is more than an attention's, or a present is not its own."""
    outputs = dict(zip(graph.output_names, graph.outputs, strict=True))
    parts = ("past_key", "past_value")
    for value in graph.inputs:
        if value.name not in buffers.presents:
            continue
        present = outputs[buffers.presents[value.name]]
        reader = present.producer
        alone = (
            reader is not None
            and reader.op == "attn.attention"
            and present in reader.outputs[-2:]
            and len(value.uses) == 1
            and value is input_of(reader, parts[present is reader.outputs[-1]])
            and not present.uses
            and graph.outputs.count(present) == 1
        )
        if not alone:
            raise UsageError(
                f"The cache of {source} can't be static: {value.name} is not just the past of one "
                f"attention whose keys or values come out as {buffers.presents[value.name]}, so "
                "there is no one place to write to. Compile it with a growing cache."
            )
