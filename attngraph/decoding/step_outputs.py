"""What the eager model gives for each step of a decoder, as one output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from attngraph.export.parity.reference import ReferenceOutputs


def last_logits(outputs: ReferenceOutputs, place: int, name: str) -> ReferenceOutputs:
    """The last token's logits (B, 1, V) of the output at a place (B, S, V)."""

    def cut(tensors: Sequence[Any]) -> tuple[Any, ...]:
        return (None if tensors[place] is None else tensors[place][:, -1:],)

    return replace(outputs.cut(cut), names=(name,))


def joined_steps(steps: Sequence[ReferenceOutputs]) -> ReferenceOutputs:
    """One output (B, steps, V) of one for each step; without float64 where a step has none."""
    exact = [step.exact[0] for step in steps if step.exact[0] is not None]
    single = [tensor for step in steps for tensor in step.single]

    def joined(run: Sequence[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor]:
        return (torch.cat([tensor for (tensor,) in run], 1),)

    def sample(*eps: float) -> tuple[tuple[torch.Tensor, ...], ...]:
        runs = zip(*(step.sample(*eps) for step in steps), strict=True)
        return tuple(map(joined, runs))

    def gates() -> tuple[tuple[tuple[torch.Tensor, ...], ...], ...]:
        runs = zip(*(step.gates() for step in steps), strict=False)  # none without float64
        return tuple(tuple(map(joined, zip(*each, strict=True))) for each in runs)

    return ReferenceOutputs(
        steps[0].names,
        (torch.cat([step.eager[0] for step in steps], 1),),
        (torch.cat(exact, 1) if len(exact) == len(steps) else None,),
        next((step.note for step in steps if step.note), ""),
        sample,
        (torch.cat(single, 1),) if len(single) == len(steps) else (),
        gates,
    )
