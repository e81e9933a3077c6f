"""Where a traced node comes from: one line of the user's model, and the path of its module."""

from __future__ import annotations

import functools
import itertools
import linecache
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch
from torch import fx

from attngraph.ir.loc import UNKNOWN, Loc

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')
_ADDED = re.compile(r"@\d+|\b_orig_mod\.|\._orig_mod$")
"""What torch puts into a path: the number of a repeated call, and torch.compile's wrapper."""
_TORCH = str(Path(torch.__file__).parent) + os.sep
_TORCH_NN = f"{_TORCH}nn{os.sep}"
_OURS = str(Path(__file__).parents[2]) + os.sep
_STANDARD_LIBRARY = str(Path(os.__file__).parent) + os.sep
_PACKAGES = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")

_NO_MODULE = "_empty_nn_module_stack"
"""torch's mark on nodes that it made itself."""

_WRAPPERS = ("attngraph.frontend.families.causal_lm.", "attngraph.frontend.families.seq2seq.")
"""Modules of ours around the user's, which is their part `model`."""

Modules = tuple[tuple[str, str], ...]


def short_path(path: str) -> str:
    """Relative to site-packages or to the working directory, where it lies in one of them."""
    return _short_path(path, os.getcwd())


@functools.lru_cache(maxsize=1024)
def _short_path(path: str, here: str) -> str:
    if match := _PACKAGES.match(path):
        return path[match.end() :]
    return path.removeprefix(here + os.sep)


def portable_path(path: str) -> str:
    """As `short_path`, and elsewhere as it is imported: a file tells nothing of this machine."""
    short = short_path(path)
    if not os.path.isabs(short):
        return short
    roots = [root.rstrip(os.sep) + os.sep for root in sys.path if os.path.isabs(root)]
    found = max((root for root in roots if short.startswith(root)), key=len, default=os.sep)
    return short[len(found) :] if found != os.sep else os.path.basename(short)


def user_frame(frames: Iterable[tuple[FrameType, int]]) -> tuple[str, int] | None:
    """File and line of the last of `frames` that is neither torch's, Python's nor ours.

    Nor that of another package which a module of the model calls: there is nothing to change there.
    A layer of another package that has no weights, as those of einops, is such a call.
    """
    found = package = None
    for frame, line in frames:
        file = frame.f_code.co_filename
        if is_plumbing(file):
            continue
        name = str(frame.f_globals.get("__name__", "")).split(".")[0]
        module = _owner(frame)
        if isinstance(module, torch.nn.Module) and (package is None or _has_weights(module)):
            package = name
        if package in (None, name):
            found = file, line
    return found


def _owner(frame: FrameType) -> object:
    """The object whose method this is: its first argument, whatever that is called."""
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def _has_weights(module: torch.nn.Module) -> bool:
    return any(True for _ in itertools.chain(module.parameters(), module.buffers()))


def quote(file: str, line: int) -> str:
    """`model.py:12 (y.reshape(3, -1))` for a message; of a longer statement its first line."""
    text = linecache.getline(file, line).strip()
    text += "…)" * (text.count("(") > text.count(")") and text.endswith("("))
    place = f"{short_path(file)}:{line}"
    return f"{place} ({text})" if text else place


def is_plumbing(file: str) -> bool:
    """Whether the file is torch's, Python's own, or ours."""
    if file.startswith(("<", _TORCH, _OURS)):
        return True
    return file.startswith(_STANDARD_LIBRARY) and not _PACKAGES.match(file)


class Locator:
    """Locations of a graph's nodes. Many nodes share a stack, so each is read once."""

    def __init__(self) -> None:
        self._cache: dict[tuple[str, Modules], Loc] = {}
        self._last = UNKNOWN

    def of(self, node: fx.Node) -> Loc:
        """The innermost line in the file of the innermost module that is not torch's own.

        The module path is that of the innermost module, torch's own included: a line such as
        `self.encoder(x)` runs many. A node without a trace of its own (torch adds some when it
        decomposes) is where its first input comes from, else where the node before it does. One of
        a class without a file is in its module, at no line, and so is one of a forward of another
        name, of which torch keeps no lines, where its input comes from another module.
        """
        loc = self._read(node)
        if loc is None:
            return self._last
        self._last = loc
        return loc

    def _read(self, node: fx.Node) -> Loc | None:
        modules = tuple(
            (_ADDED.sub("", path), cls if isinstance(cls, str) else _qualified(cls))
            for path, cls in (node.meta.get("nn_module_stack") or {}).values()
            if not path.startswith(_NO_MODULE)
        )
        key = (node.meta.get("stack_trace") or "", modules)
        if key not in self._cache:
            self._cache[key] = _locate(*key)
        if self._cache[key] != UNKNOWN:
            return self._cache[key]
        if not _has_a_file(modules):
            return Loc(module=_path(modules))
        sources = [source for source in node.all_input_nodes if source.op != "placeholder"]
        found = self._read(sources[0]) if sources else None
        if found is not None and modules and found.module != _path(modules):
            return Loc(module=_path(modules))  # another module's line isn't this one's
        return found


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _locate(trace: str, modules: Modules) -> Loc:
    frames = [(match[1], int(match[2])) for match in _FRAME.finditer(trace)]
    found = _own_frame(frames, modules)
    if found is None:
        return UNKNOWN
    return Loc(portable_path(found[0]), found[1], _path(modules))


def _path(modules: Modules) -> str:
    """The path of the innermost module, as the user's code has it."""
    path = modules[-1][0] if modules else ""
    is_wrapped = bool(modules) and modules[0][1].startswith(_WRAPPERS)
    return path.partition(".")[2] if is_wrapped else path


def _has_a_file(modules: Modules) -> bool:
    """Whether the innermost class was read from one: not by `exec`, `python -c` or torch.fx.

    Of such code torch tells no lines. False only where that is known.
    """
    cls = next((cls for _, cls in reversed(modules) if not cls.startswith("torch.nn.")), None)
    if cls is None:
        return True
    parts = cls.split(".")
    names = (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
    module = next((sys.modules[name] for name in names if name in sys.modules), None)
    return getattr(module, "__file__", None) is not None and not cls.startswith("torch.")


def _own_frame(frames: list[tuple[str, int]], modules: Modules) -> tuple[str, int] | None:
    for _, cls in reversed(modules):
        if cls.startswith("torch.nn."):
            continue
        for frame in reversed(frames):
            if _defines(frame[0], cls):
                return frame
    users = [frame for frame in frames if not is_plumbing(frame[0])]
    torch_nn = [frame for frame in frames if frame[0].startswith(_TORCH_NN)]
    return next(reversed([*torch_nn, *users]), None)


@functools.lru_cache(maxsize=4096)
def _defines(file: str, cls: str) -> bool:
    """Whether class `cls` (`package.module.Class`) lives in `file`, going by their names."""
    if cls.startswith("__main__."):
        return file == getattr(sys.modules["__main__"], "__file__", None)
    module = re.sub(r"[/\\]", ".", file.removesuffix(".py")).removesuffix(".__init__")
    parts = cls.split(".")
    return any(f".{module}".endswith("." + ".".join(parts[:end])) for end in range(1, len(parts)))
