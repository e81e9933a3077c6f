"""What came of a sweep, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from attngraph.cli.text import Page, human_bytes
from attngraph.errors import counted
from attngraph.sweeping.isolation import Record
from attngraph.sweeping.records import RIGHT

_MARKS = {RIGHT: ("✓ ", "green")}
_WIDTH = 200
"""The table's width where stdout is no terminal, in which no cell is broken."""


def print_record(record: Record) -> None:
    """One line, as a task ends."""
    mark = _MARKS.get(record["outcome"], ("✗ ", "bold red"))
    seconds = f" ({record['seconds']:.1f} s)" if "seconds" in record else ""
    Page().line(Text.assemble(mark, (record["task"], "bold"), (seconds, "dim"), said_of(record)))


def said_of(record: Record) -> str:
    """Why it is not right; nothing where it is."""
    return "" if record["outcome"] == RIGHT else f": {record['error']}"


def print_sweep(records: Sequence[Record], *, kept: int) -> None:
    """A row for each task, and how many are right."""
    page = Page()
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("task", "attention", "parity", "nodes", "size", "time"):
        is_number = heading in ("size", "time")
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=True)
    for record in records:
        table.add_row(*_cells(record))
    page.line()
    page.console.print(table, width=None if page.on_terminal else _WIDTH)
    right = sum(record["outcome"] == RIGHT for record in records)
    before = f", {kept} of them from before" if kept else ""
    verdict = Text(f"{right} of {counted(len(records), 'task')} right{before}")
    page.line(Text.assemble("\n", verdict))
    for record in records:
        if said := said_of(record):
            page.line(Text.assemble(("✗ ", "bold red"), (record["task"], "bold"), said))


def _cells(record: Record) -> list[Text]:
    name = Text(record["task"])
    time = Text(f"{record['seconds']:.1f} s" if "seconds" in record else "")
    if record["outcome"] != RIGHT:
        return [name, Text(record["outcome"], "bold red"), Text(), Text(), Text(), time]
    declined = f", {record['declined']} declined" if record["declined"] else ""
    attention = Text(f"{record['fused']} fused{declined}", "yellow" if declined else "")
    share = record["parity"]
    parity = Text("not checked", "yellow")
    if share is not None:
        parity = Text(f"passed, {share:.0%} of the budget", "green")
    nodes = Text(f"{record['nodes']['before']} → {record['nodes']['after']}")
    return [name, attention, parity, nodes, Text(human_bytes(record["bytes"])), time]
