"""What `attngraph bench` found, as a table."""

from __future__ import annotations

from rich.text import Text

from attngraph.cli.text import Page
from attngraph.measuring.contest import Contest, Row

_WIDTH = 56


def print_contest(contest: Contest) -> None:
    """One line for each engine: milliseconds per call and the ratio, or why there are none."""
    page = Page()
    shapes = ", ".join(str(tuple(shape)) for shape in contest.inputs)
    page.line(Text(f"  inputs {shapes}; {contest.threads} threads", "dim"))
    for row in contest.rows:
        page.field(Text(f"  {row.title}"), _figures(row, contest), _WIDTH)
    page.line(Text(f"  {contest.load}", "dim" if contest.load.is_trusted else "yellow"))


def _figures(row: Row, contest: Contest) -> Text:
    if row.median_ms is None:
        return Text(f"{row.status}: {row.reason}" if row.reason else row.status, "yellow")
    text = Text(f"{row.median_ms:10.3f} ms ({min(row.ms):.3f} to {max(row.ms):.3f})")
    if row.ratio is not None and row is not contest.ours:
        style = "green" if row.ratio >= 1 else "yellow"
        text.append(f"  {row.ratio:.2f} × attngraph's", style)
        if row.spread is not None:
            text.append(f" ({row.spread[0]:.2f} to {row.spread[1]:.2f})", "dim")
    if row.error is not None:
        text.append(f", error {row.error:.2%} rms", "yellow")
    return text
