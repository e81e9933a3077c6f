"""A trial in a process of its own, so that a crash or a hang costs no other."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

Record = dict[str, Any]
_PROCESSES = multiprocessing.get_context("forkserver")


def preload(*modules: str) -> None:
    """Has these imported once, by the server that the trials' processes are forked from."""
    _PROCESSES.set_forkserver_preload(list(modules))


def isolated(
    attempt: Callable[..., Record], arguments: tuple[Any, ...], lost: Record, timeout: float
) -> Record:
    """What `attempt` returns; if its process ends or takes too long, `lost` with that as error."""
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


def _send(sender: Connection, attempt: Callable[..., Record], arguments: tuple[Any, ...]) -> None:
    sender.send(attempt(*arguments))
