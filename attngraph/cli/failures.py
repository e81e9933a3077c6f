"""Errors as one sentence on stderr and an exit code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text

from attngraph.cli.exit_codes import BROKEN_PIPE, INTERNAL, INTERRUPTED, USAGE
from attngraph.errors import AttngraphError


@contextmanager
def reported(debug: bool) -> Iterator[None]:
    """Ends the command with a sentence and an exit code where the block raises.

    `debug` adds the traceback.
    """
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt as error:
        raise typer.Exit(INTERRUPTED) from error
    except Exception as error:
        raise typer.Exit(fail(error, debug=debug)) from error


def fail(error: Exception, *, debug: bool) -> int:
    """Prints the error on stderr; returns the exit code."""
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, AttngraphError):
        _say("error", str(error))
        return error.exit_code
    # Typer's own errors format themselves; their class has moved between its versions.
    if format_message := getattr(error, "format_message", None):
        told = format_message().replace("Value error, ", "")  # pydantic's, by way of typer
        end = "" if told.endswith((".", "?")) else "."
        command = getattr(getattr(error, "ctx", None), "command_path", "attngraph")
        _say("error", f"{told}{end} See {command} --help.")
        return USAGE
    what = f"{type(error).__name__}: {error}".rstrip(": ")
    hint = "please report it" if debug else "please report it; --debug shows the traceback"
    _say("internal error", f"{what} ({hint})")
    return INTERNAL


def _say(kind: str, message: str) -> None:
    line = Text.assemble("attngraph: ", (f"{kind}:", "bold red"), " ", " ".join(message.split()))
    Console(file=sys.stderr, highlight=False).print(line, soft_wrap=True)
