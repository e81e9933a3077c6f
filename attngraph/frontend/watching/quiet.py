"""Calls of torch.export without its messages and our frames, recording the sizes that it fixes."""

from __future__ import annotations

import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from itertools import takewhile
from types import FrameType
from typing import Any, TextIO, cast

from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, uninteresting_files

from attngraph.frontend.watching.locations import user_frame

_LOGGERS = (
    "torch.fx.experimental.symbolic_shapes",
    "torch.export._trace",
    "torch._dynamo",
    "torch._guards",
    "torch._subclasses.fake_tensor",
)


class _WithoutGraphs:
    """stderr without the partial graph that torch prints when an export fails."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._skips_newline = False

    def write(self, text: str) -> int:
        skip = "def forward(self" in text or (self._skips_newline and text == "\n")
        self._skips_newline = skip and text != "\n"
        return len(text) if skip else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses torch's own warnings and logs: what matters of them is in the error."""

    def silence(record: logging.LogRecord) -> bool:
        return False

    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(silence)
    try:
        with warnings.catch_warnings(), redirect_stderr(cast(TextIO, _WithoutGraphs(sys.stderr))):
            for module in ("torch", "typing_extensions", "copyreg"):
                warnings.filterwarnings("ignore", module=rf"{module}(\.|$)")
            warnings.filterwarnings("ignore", "The tensor attribute")  # they are as they were
            # an array is a tensor to Dynamo, and torch.tensor(array) a copy of one
            warnings.filterwarnings("ignore", "To copy construct from a tensor")
            warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_")
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(silence)


@contextmanager
def passed_over(file: str) -> Iterator[None]:
    """Has torch look past the frames of a file for the model's own.

    It reads the bytecode of the frame that asked: an `assert` on data becomes a check at run time.
    """
    files = uninteresting_files()
    is_new = file not in files
    files.add(file)
    try:
        yield
    finally:
        if is_new:
            files.discard(file)


@contextmanager
def watched_specialisations(
    found: dict[str, tuple[str, int] | None], caller: FrameType
) -> Iterator[None]:
    """Records the user's line where a size becomes a constant; torch keeps only its own line.

    Keys are torch's names of sizes (`L['x'].size()[0]`), the first one to become a constant first.
    A size that is compared with such a constant is one by the same line. The model's frames are
    those within `caller`, which exports: those around it are of what called the compiler.
    """
    original: Callable[..., Any] | None = getattr(ShapeEnv, "_set_replacement", None)
    if original is None:
        with nullcontext():
            yield
        return
    call = original
    numbers: dict[int, tuple[str, int] | None] = {}

    def recording(self: ShapeEnv, symbol: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(target, "is_number", False):
            own = takewhile(lambda at: at[0] is not caller, traceback.walk_stack(sys._getframe(1)))
            frames = list(own)
            frame = user_frame(reversed(frames))
            if not any(each.f_code is SymNode.guard_int.__code__ for each, _ in frames):
                frame = numbers.get(int(target), frame)
            numbers.setdefault(int(target), frame)
            for source in self.var_to_sources.get(symbol, ()):
                name = source.name if isinstance(source.name, str) else source.name()
                found.setdefault(name, frame)
        return call(self, symbol, target, *args, **kwargs)

    setattr(ShapeEnv, "_set_replacement", recording)  # noqa: B010
    try:
        yield
    finally:
        setattr(ShapeEnv, "_set_replacement", call)  # noqa: B010
