"""A trial in a process of its own, so that a crash or a hang costs no other."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from typing import Any

Record = dict[str, Any]
"""What came of a trial, as JSON has it."""
Attempt = Callable[..., Record]
_PROCESSES = multiprocessing.get_context("forkserver")


def preload(*modules: str) -> None:
    """Has these imported once, by the server that the trials' processes are forked from."""
    _PROCESSES.set_forkserver_preload(list(modules))


def isolated(
    attempt: Attempt, arguments: tuple[Any, ...], lost: Record, timeout: float | None
) -> Record:
    """What `attempt` returns; if its process ends or takes over `timeout` seconds, `lost` with
    that as its error.
    """
    receiver, sender = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=_send, args=(sender, attempt, arguments))
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout):
            process.kill()
            return {**lost, "error": f"it took over {timeout:g} seconds"}
        found: Record = receiver.recv()
        return found
    except EOFError:
        process.join()
        return {**lost, "error": f"its process ended with code {process.exitcode}"}
    finally:
        process.join()
        receiver.close()


def isolated_each(
    attempt: Attempt,
    trials: Iterable[tuple[tuple[Any, ...], Record]],
    *,
    jobs: int,
    timeout: float | None,
) -> Iterator[Record]:
    """As `isolated` for each pair of arguments and `lost`, `jobs` at a time, as they finish.

    Those that haven't begun are left out where the caller stops, or is interrupted.
    """
    pool = ThreadPoolExecutor(jobs)
    try:
        running = [pool.submit(isolated, attempt, *trial, timeout) for trial in trials]
        for finished in as_completed(running):
            yield finished.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _send(sender: Connection, attempt: Attempt, arguments: tuple[Any, ...]) -> None:
    sender.send(attempt(*arguments))
