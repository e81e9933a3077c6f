"""Shows on a terminal which stage of the work is running, and keeps libraries quiet."""

from __future__ import annotations

import logging
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import TextIO, cast

from rich.console import Console, RenderableType
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from attngraph.stages import telling

_PATIENCE = 1.0
"""Seconds before anything is shown."""


class Stages:
    """Call it with the name of each stage as it begins. Renders as a list of them with times."""

    def __init__(self) -> None:
        self._done: list[tuple[str, float]] = []
        self._running: tuple[str, float] | None = None
        self._spinner = Spinner("dots", style="cyan")

    def __call__(self, name: str) -> None:
        now = time.perf_counter()
        if self._running is not None:
            previous, start = self._running
            self._done.append((previous, now - start))
        self._running = (name, now)

    def seconds(self, name: str) -> float:
        """How long a stage took that is over."""
        return sum(seconds for done, seconds in self._done if done == name)

    def __rich__(self) -> RenderableType:
        table = Table.grid(padding=(0, 1))
        for name, seconds in self._done:
            table.add_row(Text("✓", "green"), name, Text(f"{seconds:.1f} s", "dim"))
        if self._running is not None:
            name, start = self._running
            elapsed = f"{time.perf_counter() - start:.0f} s"
            table.add_row(self._spinner, Text(name, "bold"), Text(elapsed, "dim"))
        return table


@contextmanager
def working(debug: bool) -> Iterator[Stages]:
    """Work in progress: on a terminal the stages are shown on stderr, from the first second on.

    Whatever is printed inside the block goes to stderr, so that stdout holds the result alone.
    Warnings and logs of libraries are dropped unless `debug`.
    """
    console, stages = Console(file=sys.stderr), Stages()
    with ExitStack() as stack:
        if not debug:
            stack.enter_context(_quiet())
        if not console.is_terminal or console.is_dumb_terminal:
            stack.enter_context(redirect_stdout(sys.stderr))
        else:
            above = cast(TextIO, FileProxy(console, sys.stderr))
            stack.enter_context(redirect_stdout(above))
            stack.enter_context(redirect_stderr(above))
            stack.enter_context(_shown(stages, console))
        stack.enter_context(telling(stages))
        yield stages


@contextmanager
def _shown(stages: Stages, console: Console) -> Iterator[None]:
    # The block redirects the streams itself: Live would do it from the timer's thread.
    live = Live(
        stages,
        console=console,
        transient=True,
        refresh_per_second=10,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    timer = threading.Timer(_PATIENCE, live.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        live.stop()


@contextmanager
def _quiet() -> Iterator[None]:
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
