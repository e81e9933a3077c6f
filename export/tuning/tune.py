"""The forms that this machine runs fastest: measured once for each site, remembered on disk."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnxruntime
import torch

from attngraph.export.kernels import Choice, Facts, facts_of
from attngraph.export.kernels.choice import Candidate, candidates, pick, version_of
from attngraph.export.kernels.crossovers import Times
from attngraph.export.kernels.facts import ATTENTION, PACKED, PACKED_ATTENTION, PAST
from attngraph.export.target import Target
from attngraph.export.tuning.timing import measure
from attngraph.ir import Graph, Node
from attngraph.scratch import whole_file

LENGTHS = (1, 16, 64, 128, 256, 512, 1024, 2048)
"""Numbers of queries at which a dynamic length is tried."""

Note = Callable[[str], None]
_VERSION = 1  # of the file's layout


def tuned(
    graph: Graph,
    target: Target,
    note: Note,
    *,
    seconds: float = 0.2,
    threads: int | None = None,
    static: bool = False,
) -> dict[Node, Choice]:
    """The measured choice for each attention of a graph; the table's for packed ones.

    Each distinct site is measured once, about `seconds` for each form and length, and read from
    the cache from then on. What goes wrong with the cache is told to `note`. `threads` are those of
    the sessions, by default torch's number. `static` as in `facts_of`; sites with a past are not
    measured.
    """
    made: dict[Facts, Choice] = {}
    choices = {}
    for node in graph:
        if node.op in (ATTENTION, PACKED_ATTENTION):
            facts = facts_of(node, graph.dims, static=static)
            if facts not in made:
                made[facts] = _tuned(facts, target, note, seconds, threads)
            choices[node] = made[facts]
    return choices


def _tuned(facts: Facts, target: Target, note: Note, seconds: float, threads: int | None) -> Choice:
    found = candidates(facts, target, version_of(onnxruntime.__version__))
    legal = sorted((c for c in found if not c.refused), key=lambda c: c.rank)
    refused = [c for c in found if c.refused]
    if len(legal) < 2 or facts.features & {PAST, PACKED}:
        return pick(legal, refused, {}, facts)
    files = f"{target}, {target.operators}" if target.operators else f"{target}"
    machine = f"{files} | {_device(target, threads)} | onnxruntime {onnxruntime.__version__}"
    key = f"{facts.signature} | {machine}"
    times = _read(key, note)
    if times is None:
        forms = [candidate.form for candidate in legal]
        times = measure(facts, forms, target, lengths_of(facts), seconds, threads=threads)
        _write(key, times, note)
    equal = [_timed(candidate, times) for candidate in legal]
    return pick(equal, refused, times, facts, tuned=True)


def _timed(candidate: Candidate, times: Times) -> Candidate:
    return replace(candidate, rank=0 if candidate.form.name in times else 1)


def lengths_of(facts: Facts) -> list[int]:
    """The lengths to measure: the number of queries, or some of its range."""
    low, high = facts.queries
    if low == high:
        return [low]
    top = LENGTHS[-1] if high is None else min(high, max(LENGTHS[-1], low))
    return sorted({max(low, 1), *(n for n in LENGTHS if low <= n <= top), top})


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/attngraph/kernels, or the same under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "attngraph" / "kernels"


def _device(target: Target, threads: int | None) -> str:
    if target.provider == "cuda":
        return torch.cuda.get_device_name() if torch.cuda.is_available() else "cuda"
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        pass
    return f"{model}, {threads or torch.get_num_threads()} threads"


def _path(key: str) -> Path:
    return cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _read(key: str, note: Note) -> dict[str, dict[int, float]] | None:
    path = _path(key)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if (content["version"], content["site"]) != (_VERSION, key):
            raise ValueError("it is about something else")
        return {
            str(form): {int(length): float(ms) for length, ms in row.items()}
            for form, row in content["milliseconds"].items()
        }
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        note(f"The tuning cache {path} can't be used and is measured anew: {error!r:.120}.")
        return None


def _write(key: str, times: Times, note: Note) -> None:
    path = _path(key)
    content = {"version": _VERSION, "site": key, "milliseconds": times}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
    except OSError as error:
        note(f"What was measured can't be kept in {path.parent}: {error.strerror or error}.")
