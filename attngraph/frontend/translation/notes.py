"""Sentences about a captured model: what its file keeps of it, and what it leaves out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.export import ExportedProgram

from attngraph.errors import listed
from attngraph.frontend.interface.state import named_state


def unread_note(text: str) -> str:
    return f"The program relies on {text}, which isn't checked when the file runs."


def taken_apart_note(name: str) -> str:
    hint = "; use_cache=False among the inputs leaves it out" if "Cache" in name else ""
    return f"The model returns a {name}, whose tensors are outputs of the file as well{hint}."


def replayed_note(function: str) -> str:
    return (
        f"Calls of {function}, which makes numbers of sizes, were traced as what they ran at four "
        "sizes: that they run the same at every other one is assumed, and checked where the "
        "outputs are."
    )


def wrapped_notes(wrapped: Sequence[tuple[str, type]]) -> Iterator[str]:
    for kind in dict.fromkeys(kind for _, kind in wrapped):
        names = [name for name, other in wrapped if other is kind]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield (
            f"{names[0]}{more} of type {kind.__module__}.{kind.__qualname__}: the file holds the "
            "numbers that they stand for, in full."
        )


def mutation_notes(program: ExportedProgram, module: torch.nn.Module | None) -> list[str]:
    signature = program.graph_signature
    names = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
    if module is not None:
        names = named_state(module, names, program.constants)
    if not names:
        return []
    values = "its present value" if len(names) == 1 else "their present values"
    return [f"The model updates {listed(names)} as it runs; the graph reads {values} and doesn't."]
