"""One workload through every engine: files first, then parity, then blocks that alternate."""

from __future__ import annotations

import contextlib
import json
import math
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from attngraph.errors import LoadError, UsageError
from attngraph.measuring.engines import BY_NAME, ENGINES, OURS, Engine
from attngraph.measuring.job import Job
from attngraph.measuring.load import Load, Watch
from attngraph.measuring.turns import Server, died, left, take_turns
from attngraph.measuring.worker import REFERENCE
from attngraph.scratch import scratch_folder
from attngraph.stages import begins

Status = Literal["timed", "skipped", "failed", "out of parity"]

PATIENCE = 900.0
"""Seconds that an engine may take to prepare its file, and for each answer."""
_REASON = 300
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LOG = "log.txt"


@dataclass
class Row:
    """One engine. Only an engine within the error budget is `timed`; else `reason` says why not.

    `ms` are milliseconds per call, one figure a round. `ratio` is the median over the rounds of its
    time over attngraph's in the same round, above 1 where attngraph is faster, and `spread` the
    least and the largest of these. `error` is that of a quantized engine, which has no budget: the
    rms of its outputs' difference from float64 over theirs. `prepare_cpu_s` are
    the CPU seconds that its file took, which hardly depend on what else the machine does; `note`
    says whether it ran as a CUDA graph.
    """

    engine: str
    title: str
    status: Status = "timed"
    reason: str = ""
    ms: list[float] = field(default_factory=list)
    median_ms: float | None = None
    ratio: float | None = None
    parity: dict[str, Any] | None = None
    note: str = ""
    spread: tuple[float, float] | None = None
    error: float | None = None
    prepare_cpu_s: float | None = None
    prepare_peak_bytes: int | None = None

    def told(self, said: dict[str, Any]) -> None:
        """Records a worker's answer."""
        statuses: tuple[Status, ...] = ("skipped", "failed", "out of parity")
        for status in statuses:
            if status in said:
                self.status, self.reason = status, _short(said[status])
        for name in ("parity", "note", "error", "prepare_cpu_s", "prepare_peak_bytes"):
            setattr(self, name, said.get(name, getattr(self, name)))


@dataclass
class Contest:
    """The results of one workload. `inputs` are the shapes of its input tensors, `load` what others
    computed while it was timed.
    """

    rows: list[Row]
    inputs: list[list[int]]
    threads: int
    load: Load

    @property
    def ours(self) -> Row | None:
        return next((row for row in self.rows if row.engine == OURS), None)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def engines_named(names: Sequence[str]) -> list[Engine]:
    """The engines of these names, and those whose files they start from; for none all that keep the
    model's numbers.

    Raises UsageError for a name that doesn't exist.
    """
    if unknown := [name for name in names if name not in BY_NAME]:
        known = ", ".join(BY_NAME)
        raise UsageError(f"There is no engine {unknown[0]!r}: choose among {known}.")
    wanted = set(names) or {engine.name for engine in ENGINES if not engine.quantized}
    wanted |= {BY_NAME[name].base for name in wanted}
    return [engine for engine in ENGINES if engine.name in wanted]


def hold(
    job: Job,
    *,
    engines: Sequence[str] = (),
    rounds: int = 7,
    seconds: float = 0.5,
    folder: Path | None = None,
    at_once: int = 1,
    time_them: bool = True,
    prepared: bool = False,
    patience: float = PATIENCE,
    until: float = math.inf,
    ready: Callable[[], None] = lambda: None,
) -> Contest:
    """Measures a job. `seconds` is the length of a block, of at least one call. `ready` is called
    when all engines are, before the first block.

    With a `folder` the files that engines prepared stay in it, and those of earlier calls are used
    again, but for attngraph's own, unless they are `prepared`: it must be of this very job.
    `at_once` files are prepared at a time. Without `time_them` it ends when they are. An engine
    that takes longer than `patience` seconds over its file or an answer has failed, and so has
    each that isn't done at `until` (time.monotonic).

    Raises UsageError for an unknown engine, LoadError where the model itself doesn't run.
    """
    chosen = engines_named(engines)
    with ExitStack() as stack:
        if folder is None:
            folder = stack.enter_context(scratch_folder())
        folder.mkdir(parents=True, exist_ok=True)
        job.write(folder)
        (folder / _LOG).write_text("")
        begins("eager and float64 outputs")
        known = _reference(folder, left(patience, until))
        rows = {engine.name: Row(engine.name, engine.title) for engine in chosen}
        kept = {name for name in BY_NAME if prepared or not name.startswith(OURS)}

        def prepare(engine: Engine) -> dict[str, Any]:
            return _prepared(engine, folder, left(patience, until), keep=engine.name in kept)

        _prepare_all(chosen, rows, job, prepare, at_once)
        load = Load(None)
        if time_them:
            limits = (patience, until)
            load = _time_all(rows, folder, rounds, seconds, limits, ready)
    asked = [row for row in rows.values() if not engines or row.engine in engines]
    return Contest(asked, known["inputs"], known["threads"], load)


def _reference(folder: Path, patience: float) -> dict[str, Any]:
    kept = folder / "reference.json"
    if not (kept.exists() and (folder / REFERENCE).exists()):
        said = _work(patience, "reference", folder)
        if "failed" in said:
            raise LoadError(f"The model itself doesn't run: {_short(said['failed']).rstrip('.')}.")
        kept.write_text(json.dumps(said))
    found: dict[str, Any] = json.loads(kept.read_text())
    return found


def _prepare_all(
    engines: Sequence[Engine],
    rows: dict[str, Row],
    job: Job,
    prepared: Callable[[Engine], dict[str, Any]],
    at_once: int,
) -> None:
    def lacks_base(engine: Engine) -> bool:
        row = rows[engine.name]
        if not engine.base or rows[engine.base].status == "timed":
            return False
        row.status = "skipped"
        row.reason = f"{rows[engine.base].title} gave no file to start from"
        return True

    def prepare(engine: Engine) -> None:
        if not lacks_base(engine):
            begins(f"prepare {engine.title}")
            rows[engine.name].told(prepared(engine))

    waves = [
        [e for e in engines if e.export and bool(e.base) == late and not _given(e, job)]
        for late in (False, True)
    ]
    with ThreadPoolExecutor(at_once) as pool:
        for wave in waves:
            jobs = [pool.submit(copy_context().run, prepare, engine) for engine in wave]
            for each in jobs:
                each.result()
    for engine in engines:
        if not engine.export:  # it runs another's file as it is
            lacks_base(engine)


def _given(engine: Engine, job: Job) -> bool:
    return engine.name == OURS and job.onnx is not None


def _prepared(engine: Engine, folder: Path, patience: float, *, keep: bool) -> dict[str, Any]:
    kept = folder / f"{engine.name}.prepared.json"
    if keep and kept.exists():
        found: dict[str, Any] = json.loads(kept.read_text())
        return found
    said = _work(patience, "prepare", folder, engine.name)
    if "prepare_cpu_s" in said:  # what failed is tried again
        kept.write_text(json.dumps(said))
    return said


def _time_all(
    rows: dict[str, Row],
    folder: Path,
    rounds: int,
    seconds: float,
    patience: tuple[float, float],
    ready: Callable[[], None],
) -> Load:
    with ExitStack() as stack:
        errors = stack.enter_context(open(folder / _LOG, "a", encoding="utf-8"))
        servers = {}
        for name, row in rows.items():
            if row.status == "timed":
                command = _command("serve", folder, name, str(seconds))
                servers[name] = stack.enter_context(Server(command, errors, *patience))
        for name in list(servers):
            begins(f"parity of {rows[name].title}")
            try:
                said = servers[name].answer()
            except EOFError as error:
                said = {"failed": _last_words(str(error), folder)}
            rows[name].told(said)
            if rows[name].status != "timed":
                del servers[name]
        begins("time")
        lost: dict[str, str] = {}
        ready()
        watch = Watch(server.process_id for server in servers.values())
        figures = take_turns(servers, rounds, lost)
        load = Load(None) if lost else watch.load()
        for name, how in lost.items():
            rows[name].told({"failed": _last_words(how, folder)})
    for name, values in figures.items():
        rows[name].ms, rows[name].median_ms = values, statistics.median(values)
    if ours := figures.get(OURS):
        for name, values in figures.items():
            pairs = zip(values, ours, strict=True)
            ratios = [theirs / own for theirs, own in pairs]
            rows[name].ratio = statistics.median(ratios)
            rows[name].spread = min(ratios), max(ratios)
    return load


def _work(patience: float, what: str, folder: Path, *more: str) -> dict[str, Any]:
    """One worker's only answer; what it logs is added to the folder's log."""
    with open(folder / _LOG, "a", encoding="utf-8") as errors:
        try:
            done = subprocess.run(
                _command(what, folder, *more),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                check=False,
                timeout=patience,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"it was not done after {patience:.0f} s"}
    with contextlib.suppress(IndexError, ValueError):
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return said
    return {"failed": _last_words(died(done.returncode), folder)}


def _last_words(how: str, folder: Path) -> str:
    """How a worker ended, and the last line of its log."""
    lines = (folder / _LOG).read_text("utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{how}: {last}" if last else how


def _command(what: str, folder: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "attngraph.measuring.worker", what, str(folder), *more]


def _short(reason: str) -> str:
    """The beginning of a reason, without the colours of a terminal."""
    plain = _COLOUR.sub("", reason)
    return plain if len(plain) <= _REASON else f"{plain[:_REASON]} …"
