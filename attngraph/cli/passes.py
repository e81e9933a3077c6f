"""`attngraph passes`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from rich.text import Text

from attngraph.cli.failures import reported
from attngraph.cli.flags import DebugOption, JsonOption
from attngraph.cli.stages import working
from attngraph.cli.text import Page


@dataclass(frozen=True)
class _Step:
    """One pass: its name, what it does, and its label."""

    name: str
    does: str
    label: str


def passes(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """List the passes of `attngraph optimize`, in order, with what each does."""
    with reported(debug):
        with working(debug) as stages:
            stages("import torch")
            from attngraph.compiling.pipeline import pipeline
            from attngraph.passes import label_of, purpose_of

            steps = [
                _Step(item.name, purpose_of(item), label_of(item))
                for item in pipeline(part=True, experts=True)
            ]
        if as_json:
            print(json.dumps([asdict(step) for step in steps], indent=2))
            return
        page = Page()
        width = max(len(step.name) for step in steps) + 6
        first: dict[str, int] = {}
        for number, step in enumerate(steps, 1):
            label = Text.assemble((f"{number:2}  ", "dim"), (step.name, "bold"))
            if step.name in first:
                page.field(label, Text(f"as {first[step.name]}", "dim"), width)
                continue
            first[step.name] = number
            told = f" {step.label.capitalize()}."
            page.field(label, Text.assemble(step.does, (told, "dim")), width)
