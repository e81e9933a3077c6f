"""Sizes that are written into a text, `"mask_%d" % n`, as messages and the keys of tables are.

C asks for a number there, so a trace would take the sample's for that of all sizes. What is written
instead is a number that no size has, and the same one for the same size: a table of an earlier call
isn't found under it, and one that this call makes is.
"""

from __future__ import annotations

import ast
import itertools
import linecache
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch

_FIRST = 10**12


@contextmanager
def written_sizes(met: Callable[[], None]) -> Iterator[None]:
    """Within it, text that is formatted by `%` in the model's code leaves a size open.

    `met` is called for each: what the model makes of the text is to be checked.
    """
    own: Callable[[Any], int] = torch.SymInt.__int__
    numbers: dict[Any, int] = {}

    def as_number(self: Any) -> int:
        if not self.node.expr.free_symbols or not _formats(sys._getframe(1)):
            return own(self)
        met()
        return numbers.setdefault(self.node.expr, _FIRST + len(numbers))

    with patch.object(torch.SymInt, "__int__", as_number):
        yield


def _formats(frame: FrameType) -> bool:
    """Whether what a frame is at is `"…" % …`."""
    first, last, start, end = next(
        itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    )
    if first is None or last is None or start is None or end is None:
        return False
    lines = [linecache.getline(frame.f_code.co_filename, line) for line in range(first, last + 1)]
    text = [line.encode() for line in lines]
    if not text or not text[-1]:
        return False
    text[-1] = text[-1][:end]
    text[0] = text[0][start:]
    try:
        read = ast.parse(f"({textwrap.dedent(b''.join(text).decode())})", mode="eval").body
    except (SyntaxError, ValueError):
        return False
    return (
        isinstance(read, ast.BinOp)
        and isinstance(read.op, ast.Mod)
        and (isinstance(read.left, ast.JoinedStr) or _is_text(read.left))
    )


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
