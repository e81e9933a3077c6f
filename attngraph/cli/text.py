"""Lines of a label and a text, wrapped on a terminal and whole in a pipe."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text


class Page:
    """Prints to stdout as it is when the page is made."""

    def __init__(self) -> None:
        self.console = Console(file=sys.stdout, highlight=False)

    @property
    def on_terminal(self) -> bool:
        return self.console.is_terminal

    def line(self, text: Text | str = "") -> None:
        """One line, wrapped at the width of the terminal."""
        self.console.print(text, soft_wrap=True, markup=False)

    def field(self, label: Text | str, value: Text, indent: int, *, wrap: bool = True) -> None:
        """A label, then the value from column `indent` on, also where it is wrapped."""
        label = Text(label) if isinstance(label, str) else label.copy()
        label.pad_right(max(indent - len(label), 1 if len(label) else 0))
        lines = [value]
        if wrap and self.on_terminal:
            lines = list(value.wrap(self.console, max(self.console.width - indent, 20)))
        for line in lines:
            line.rstrip()
            self.line(Text.assemble(label, line))
            label = Text(" " * indent)

    def items(self, label: Text | str, parts: Sequence[Text], indent: int) -> None:
        """As `field`, for a list that is broken between its parts only."""
        width = self.console.width - indent if self.on_terminal else math.inf
        line, separator = Text(), Text(", ", "dim")
        for part in parts:
            if len(line) and len(line) + len(separator) + len(part) + 1 > width:
                self.field(label, Text.assemble(line, ","), indent, wrap=False)
                label, line = "", Text()
            line = Text.assemble(line, separator, part) if len(line) else part
        self.field(label, line, indent, wrap=False)


def human_bytes(count: int) -> str:
    """`14.9 MiB`."""
    size, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
