"""stdout holds results only, stderr holds sentences only, whatever libraries and users print."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from attngraph.cli.stages import working

pytestmark = pytest.mark.wide

PROGRAM = (sys.executable, "-m", "attngraph")
NOISY = ("optimize", "--factory", "user_models:noisy", "-o", "out.onnx")


def test_help_and_version_do_not_import_torch() -> None:
    code = (
        "import sys; from attngraph.cli import run\n"
        "run(['--help']); run(['optimize', '--help']); run(['--version'])\n"
        "assert 'torch' not in sys.modules and 'onnxruntime' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_json_is_alone_on_stdout(here: Path) -> None:
    ran = subprocess.run([*PROGRAM, *NOISY, "--json"], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout)["output"]["path"] == "out.onnx"
    assert ran.stderr == "building\n"


def test_an_error_is_one_line_and_an_exit_code(here: Path) -> None:
    ran = subprocess.run(
        [*PROGRAM, "optimize", "model.pt2", "-o", "nowhere/out.onnx"],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 9
    assert ran.stdout == ""
    assert ran.stderr.startswith("attngraph: error: ")
    assert ran.stderr.count("\n") == 1


def test_a_closed_pipe_is_quiet() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ran = subprocess.run([*PROGRAM, "--version"], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert ran.stderr == ""


def test_debug_shows_the_traceback(attngraph: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, variable in ((["--debug"], ""), ([], "1")):
        monkeypatch.setenv("ATTNGRAPH_DEBUG", variable or "0")
        ran = attngraph("explain", "missing.pt2", *arguments)
        assert ran.code == 3
        assert "Traceback" in ran.err
        assert ran.err.splitlines()[-1].startswith("attngraph: error: ")


def test_an_unexpected_error_asks_for_a_report(
    attngraph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ArithmeticError("nobody thought of this")

    monkeypatch.setattr("attngraph.frontend.read_source.load", fails)
    ran = attngraph("explain", "--factory", "user_models:alone")
    assert ran.code == 70
    assert ran.out == ""
    assert ran.err == (
        "attngraph: internal error: ArithmeticError: nobody thought of this "
        "(please report it; --debug shows the traceback)\n"
    )


def test_an_interrupt_is_quiet(attngraph: Any, here: Path) -> None:
    ran = attngraph("optimize", "--factory", "user_models:interrupted", "-o", "out.onnx")
    assert (ran.code, ran.out, ran.err) == (130, "", "")
    assert not (here / "out.onnx").exists()


def test_an_interrupt_while_libraries_are_imported_is_quiet() -> None:
    code = """
import sys

class Interrupting:
    def find_spec(self, name, *_):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
from attngraph.cli import main
main()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")


def test_what_a_command_has_begun_is_undone_where_it_is_terminated() -> None:
    code = """
import os, signal
from attngraph.cli import app

def run(arguments):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    finally:
        print("undone")

app.run = run
app.main()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (143, "undone\n", "")


def _read(terminal: int) -> str:
    """All that was written to the other end, which is closed."""
    parts = []
    with contextlib.suppress(OSError):  # Linux's way of saying that nothing more will come
        while part := os.read(terminal, 1 << 16):
            parts.append(part)
    os.close(terminal)
    return b"".join(parts).decode()


def test_stages_are_shown_on_a_terminal_only_and_only_when_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with working(debug=False) as stages:
        stages("capture")
    assert capsys.readouterr() == ("", "")
    main, terminal = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("attngraph.cli.stages._PATIENCE", 0.05)
    with os.fdopen(terminal, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with working(debug=False) as stages:
            stages("capture")
            time.sleep(0.3)
            print("from the user")
    shown = _read(main)
    assert "capture" in shown
    assert "from the user" in shown
    assert capsys.readouterr().out == ""
