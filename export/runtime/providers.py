"""Why a provider can't be loaded, which onnxruntime only writes to the console."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import onnxruntime

# Standard output and file descriptor 2 belong to the whole process.
_console = threading.Lock()

_ORT_LINE = re.compile(r"\[[WEF]:onnxruntime:")
_NOISE = re.compile(r"\x1b\[[0-9;]*m")
_NOT_LOADED = re.compile(r"^Failed to load [^:\n]+: (?P<what>.+)$", re.MULTILINE)
_LOADER_ERROR = re.compile(r"with error: (?P<why>.+)")


def preload_cuda() -> list[str]:
    """Load CUDA and cuDNN from pip's nvidia packages; returns the loader's errors."""
    printed = io.StringIO()
    with _console, contextlib.redirect_stdout(printed):
        onnxruntime.preload_dlls()
    return [found["what"].strip() for found in _NOT_LOADED.finditer(printed.getvalue())]


@contextlib.contextmanager
def onnxruntime_messages() -> Iterator[list[str]]:
    """Collect what onnxruntime logs to stderr inside the block; other lines still reach stderr.

    onnxruntime answers a provider that can't be created with a log line and a CPU session, and the
    line is the only place where the reason is.
    """
    messages: list[str] = []
    with _console, contextlib.ExitStack() as undo:
        try:
            saved = os.dup(2)
        except OSError:  # no stderr at all: nothing is printed, nothing can be collected
            yield messages
            return
        undo.callback(os.close, saved)
        captured = undo.enter_context(tempfile.TemporaryFile())
        sys.stderr.flush()
        os.dup2(captured.fileno(), 2)
        try:
            yield messages
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            captured.seek(0)
            for line in captured.read().decode(errors="replace").splitlines(keepends=True):
                if _ORT_LINE.search(line):
                    messages.append(_readable(line))
                elif _NOISE.sub("", line).strip():
                    os.write(saved, line.encode())


def _readable(line: str) -> str:
    line = _NOISE.sub("", line).strip()
    if why := _LOADER_ERROR.search(line):
        return why["why"]
    return line.rsplit("] ", 1)[-1]


def installed(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def cuda_install_command() -> str:
    """The pip command that gives this onnxruntime its CUDA provider and the libraries it needs."""
    found = installed("onnxruntime-gpu")
    pin = f"=={found}" if found else ""
    return f'pip install "onnxruntime-gpu[cuda,cudnn]{pin}"'
