"""Draws, trials in processes of their own, and failing draws made small."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

from tests.fuzz.grammar import Draw, Grammar
from tests.fuzz.grammars import GRAMMARS
from tests.fuzz.trial import OUTCOMES, Record, attempt, of_record

_PROCESSES = multiprocessing.get_context("spawn")
_LATE = "it took over"
Attempt = Callable[[Path], Record]
Seed = tuple[str, int]
"""A grammar's name, and the seed of one of its draws."""
_PATIENCE = 180.0
"""Seconds for making one draw small."""


def sweep(seeds: Iterable[Seed], folder: Path, *, jobs: int, timeout: float) -> Iterator[Record]:
    """A record for each seed, in order; what failed is made small, and its source is kept. Seeds
    are taken as they are tried.
    """
    folder.mkdir(parents=True, exist_ok=True)
    workers = threading.local()

    def of(seed: Seed) -> Record:
        if not hasattr(workers, "own"):
            workers.own = Worker(timeout)
        return of_seed(*seed, folder, workers.own)

    with ThreadPoolExecutor(jobs) as pool:
        tried: deque[Future[Record]] = deque()
        for seed in seeds:
            tried.append(pool.submit(of, seed))
            if len(tried) > jobs:
                yield tried.popleft().result()
        yield from (future.result() for future in tried)


def of_seed(name: str, seed: int, folder: Path, attempt: Attempt = attempt) -> Record:
    """The record of a grammar's seed. Its file stays in the folder where it failed, and a small one
    with it: `small` are the choices that are left of a draw that fails in the same way.
    """
    grammar = GRAMMARS[name]
    drawn = grammar.draw(seed)
    record = of_draw(grammar, drawn, folder / f"{name}-{seed}.py", attempt)
    record = {"grammar": name, "seed": seed, "choices": grammar.unusual(drawn), **record}
    if not of_record(record):
        return record
    if record["said"].startswith(_LATE):
        return {**record, "small": grammar.unusual(drawn)}  # each try would take as long
    small = shrunk(grammar, drawn, record, folder / f"{name}-{seed}-small.py", attempt)
    return {**record, "small": grammar.unusual(small)}


def of_draw(grammar: Grammar, drawn: Draw, path: Path, attempt: Attempt = attempt) -> Record:
    """The record of a draw, whose source stays where it failed."""
    path.write_text(grammar.write(drawn))
    record = attempt(path)
    if not of_record(record):
        path.unlink()
    return record


def shrunk(
    grammar: Grammar, drawn: Draw, record: Record, path: Path, attempt: Attempt = attempt
) -> Draw:
    """The draw with choices set back one at a time, as long as it fails with the same outcome. What
    has become of it after `_PATIENCE` is small enough: other draws wait meanwhile.
    """
    again, end = True, time.monotonic() + _PATIENCE
    while again:
        again = False
        for less in grammar.simpler(drawn):
            if time.monotonic() > end:
                break
            if of_draw(grammar, less, path, attempt)["outcome"] == record["outcome"]:
                drawn, again = less, True
                break
    path.write_text(grammar.write(drawn))
    return drawn


class Worker:
    """Trials in a process of their own, which is replaced where one crashes or hangs it."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._start()

    def __call__(self, path: Path) -> Record:
        self.pipe.send(path)
        try:
            if self.pipe.poll(self.timeout):
                found: Record = self.pipe.recv()
                return found
            said = f"{_LATE} {self.timeout:g} seconds"
        except EOFError:
            said = "its process ended"
        self.process.kill()
        self.process.join()
        self._start()
        return {"outcome": "crashed", "said": said}

    def _start(self) -> None:
        self.pipe, end = _PROCESSES.Pipe()
        self.process = _PROCESSES.Process(target=_serve, args=(end,), daemon=True)
        self.process.start()
        end.close()


def _serve(pipe: Connection) -> None:
    with contextlib.suppress(EOFError):  # the sweep has ended
        while True:
            pipe.send(attempt(pipe.recv()))


def table(records: list[Record]) -> str:
    """What came of how many draws, and why sites were declined."""
    outcomes = Counter(record["outcome"] for record in records)
    rows = [(name, outcomes[name], said) for name, said in OUTCOMES.items() if outcomes[name]]
    codes = Counter(code for record in records for code in record.get("declined", {}))
    rows += [(f"  {code}", count, "draws with such a site") for code, count in codes.most_common()]
    kernels = Counter(form for record in records for form in record.get("kernels", ()))
    rows += [(f"  {form}", count, "draws lowered so") for form, count in kernels.most_common()]
    width = max((len(name) for name, _, _ in rows), default=0)
    return "\n".join(f"{name:{width}} {count:5}  {said}" for name, count, said in rows)
