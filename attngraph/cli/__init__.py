"""The command line. Nothing here imports torch before a command needs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from attngraph.cli.exit_codes import INTERRUPTED

__all__ = ["main", "run"]


def main() -> None:
    """The entry point: one command line, then the exit code."""
    try:
        # typer and rich take a moment to import, in which the command may be interrupted
        from attngraph.cli import app

        app.main()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code; what went wrong is on stderr."""
    # as in main
    from attngraph.cli import app

    return app.run(arguments)
