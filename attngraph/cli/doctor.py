"""`attngraph doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer
from rich.text import Text

from attngraph.cli.failures import reported
from attngraph.cli.flags import DebugOption, JsonOption
from attngraph.cli.stages import working
from attngraph.cli.text import Page

_MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "problem": ("✗", "red")}


def doctor(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """Say what is installed, which targets can be used here, and how to repair the rest.

    The exit code is 1 where something is broken.
    """
    with reported(debug):
        with working(debug) as stages:
            stages("import torch")
            from attngraph.export.runtime.doctor import diagnose

            findings = diagnose()
        if as_json:
            print(json.dumps([asdict(finding) for finding in findings], indent=2))
        else:
            page = Page()
            width = max(len(finding.subject) for finding in findings) + 2
            for finding in findings:
                mark, style = _MARKS[finding.level]
                label = Text.assemble((mark, style), f" {finding.subject}")
                page.field(label, Text(finding.message), width + 2)
                if finding.fix:
                    page.field("", Text(finding.fix, "cyan"), width + 2, wrap=False)
        if any(finding.level == "problem" for finding in findings):
            raise typer.Exit(1)
