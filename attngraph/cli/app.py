"""The `attngraph` program: its commands and exit codes."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from attngraph.cli.attend import attend
from attngraph.cli.bench import bench
from attngraph.cli.doctor import doctor
from attngraph.cli.exit_codes import INTERRUPTED, TERMINATED
from attngraph.cli.explain import explain
from attngraph.cli.failures import fail
from attngraph.cli.flags import switch
from attngraph.cli.optimize import optimize
from attngraph.cli.package import package
from attngraph.cli.passes import passes
from attngraph.cli.sweep import sweep
from attngraph.cli.verify import verify
from attngraph.versions import versions

app = typer.Typer(
    name="attngraph",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (optimize, explain, verify, sweep, package, attend, bench, doctor, passes):
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    parts = [f"{name} {number}" for name, number in versions().items()]
    print(f"{parts[0]} ({', '.join(parts[1:])})")
    raise typer.Exit


@app.callback()
def attngraph(
    version: Annotated[
        bool,
        switch(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version, and those of torch and onnxruntime.",
        ),
    ] = False,
) -> None:
    """An optimizing compiler from PyTorch attention models to ONNX Runtime.

    The result is compared with the eager model before anything is written.
    """


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code; what went wrong is on stderr."""
    try:
        code = app(list(arguments) or ["--help"], prog_name="attngraph", standalone_mode=False)
    except typer.Abort:
        return INTERRUPTED
    except Exception as error:
        return fail(error, debug="--debug" in arguments)
    return code if isinstance(code, int) else 0


def _terminated(*_: object) -> None:
    sys.exit(TERMINATED)


def main() -> None:
    """The entry point: one command line, then the exit code."""
    signal.signal(signal.SIGTERM, _terminated)  # as an exception: nothing is left half written
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more as it ends, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
