"""Parity where padded rows are ignored: only what valid tokens give is compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from attngraph.errors import UsageError
from attngraph.export.parity.budget import Parity
from attngraph.export.parity.reference import ReferenceOutputs
from attngraph.ir import interpret
from attngraph.passes.rewriting.findings import Packed
from attngraph.passes.rewriting.manager import PassResult


def packed_tokens(results: Iterable[PassResult]) -> list[Packed]:
    """What the passes packed, one entry for each padding mask."""
    return [packed for result in results for packed in result.findings.packed]


def notes_of(results: Iterable[PassResult]) -> list[str]:
    """A sentence on what was packed, and one on each node that keeps linears padded."""
    return [
        f"{remark.reason}."
        for result in results
        for remark in result.remarks
        if remark.code in ("packed", "kept-padded")
    ]


def require_packed(results: Sequence[PassResult], source: str) -> None:
    """Raises UsageError where no row could be left out, saying why."""
    if packed_tokens(results):
        return
    reasons = notes_of(results)
    why = (
        " ".join(reasons)
        if reasons
        else ("No attention hides keys by a mask that is an input and is the same for each query.")
    )
    raise UsageError(
        f"{source} has no padded rows that could be ignored. {why} Leave out --ignore-padded-rows."
    )


class Padding:
    """Which elements of the outputs depend on padded rows, for any inputs."""

    def __init__(self, packed: Sequence[Packed]) -> None:
        self.packed = packed

    def rows(self, inputs: Sequence[Any]) -> Mapping[int, torch.Tensor]:
        """Which rows are valid: a bool tensor over each output's first dims, by its position."""
        found: dict[int, torch.Tensor] = {}
        for packed in self.packed:
            (valid,) = interpret(packed.valid, inputs)
            for output, places in packed.outputs.items():
                rows = valid
                if places is not None:
                    rows = valid.any(1) & valid[:, list(places)].all(1)
                if output in found and found[output].shape == rows.shape:
                    rows = rows & found[output]
                found[output] = rows.cpu()
        return found

    def require_rows(self, cases: Iterable[Sequence[Any]], names: Sequence[str]) -> None:
        """Raises UsageError where an output has no valid row in any case: nothing is compared."""
        counts: dict[int, int] = {}
        for inputs in cases:
            for at, rows in self.rows(inputs).items():
                counts[at] = counts.get(at, 0) + int(rows.sum())
        for at, count in counts.items():
            if not count:
                raise UsageError(
                    f"With these inputs all of {names[at]} is padding, so nothing is compared: "
                    "give sample inputs whose mask shows tokens, or leave out --ignore-padded-rows."
                )

    def cut(
        self, reference: ReferenceOutputs, outputs: Sequence[torch.Tensor], inputs: Sequence[Any]
    ) -> tuple[ReferenceOutputs, list[torch.Tensor], dict[str, str]]:
        """Reference and outputs without unspecified rows, and a note on each output that lost some.

        An output of another shape than the reference's stays whole, which parity then says.
        """
        kept, told = list(outputs), {}
        notes: dict[str, str] = {}
        for at, rows in self.rows(inputs).items():
            shape = reference.eager[at].shape
            if outputs[at].shape != shape or shape[: rows.dim()] != rows.shape:
                continue
            kept[at], told[at] = outputs[at][rows], rows
            notes[reference.names[at]] = (
                f"compared in {int(rows.sum())} of {rows.numel()} rows: the others are padding"
            )

        def part(run: Sequence[Any]) -> tuple[Any, ...]:
            found = list(run)
            for at, rows in told.items():
                found[at] = None if found[at] is None else found[at][rows]
            return tuple(found)

        cut = reference.cut(part) if told else reference
        return cut, kept, notes


def annotated(parity: Parity, notes: Mapping[str, str], whole: Sequence[torch.Tensor]) -> Parity:
    """The figures with a note on outputs, by name, and with the shapes of the `whole` outputs."""
    outputs = [
        dataclasses.replace(
            output,
            note="; ".join(n for n in (output.note, notes.get(output.name, "")) if n),
            shape=tuple(eager.shape),
        )
        for output, eager in zip(parity.outputs, whole, strict=True)
    ]
    return dataclasses.replace(parity, outputs=tuple(outputs))
