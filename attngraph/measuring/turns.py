"""Engines that take turns, each in a process of its own.

onnxruntime's threads spin on after a call and slow what runs beside them in the same process by
half; and a machine drifts, which hits all engines alike only where their blocks alternate.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

PAUSE = 0.05
"""Seconds between two blocks, for the threads of the last one to stop spinning."""
_LEAST = 0.1  # seconds that anything has, however late it is


def own_stdout() -> IO[str]:
    """This process's stdout for its answers alone: what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def serve(block: Callable[[], Any], answers: IO[str], ready: Any = None) -> None:
    """Prints `ready`, then runs `block` for each line of standard input and prints its result.

    Results are JSON, one line each.
    """
    print(json.dumps(ready), file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(block()), file=answers, flush=True)


def timed(call: Callable[[], object], seconds: float) -> float:
    """Milliseconds per call, of calls that go on for so many seconds."""
    start, calls = time.perf_counter(), 0
    while True:
        call()
        calls += 1
        passed = time.perf_counter() - start
        if passed >= seconds:
            return passed / calls * 1e3


def left(patience: float, until: float) -> float:
    """Seconds to wait for something: `patience`, but to no later than `until` (time.monotonic)."""
    return max(_LEAST, min(patience, until - time.monotonic()))


class Server:
    """A process that runs `serve`. A context manager, which ends it.

    It has `patience` seconds for each answer, None for any number of them, and gives none after
    `until` (time.monotonic).
    """

    def __init__(
        self,
        command: Sequence[str],
        errors: IO[str] | None = None,
        patience: float | None = None,
        until: float = math.inf,
    ) -> None:
        self._patience = math.inf if patience is None else patience
        self._until = until
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )

    @property
    def process_id(self) -> int:
        return self._process.pid

    def answer(self) -> Any:
        """The next answer. Raises EOFError, saying why, where the process ended instead."""
        assert self._process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            self._process.kill()

        wait = left(self._patience, self._until)
        timer = None if math.isinf(wait) else threading.Timer(wait, end)
        if timer is not None:
            timer.start()
        line = self._process.stdout.readline()
        if timer is not None:
            timer.cancel()
        if not line:
            code = self._process.wait()
            if late.is_set():
                raise EOFError(f"it gave no answer for {wait:.0f} s")
            raise EOFError(died(code))
        return json.loads(line)

    def block(self) -> Any:
        """Asks for a block and waits for its result."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise EOFError(died(self._process.wait())) from error
        return self.answer()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._process.kill()
        self._process.communicate()


def died(code: int) -> str:
    """An exit code in words."""
    return f"its process was ended by signal {-code}" if code < 0 else f"its process ended ({code})"


def take_turns(
    servers: Mapping[str, Server], rounds: int, lost: dict[str, str] | None = None
) -> dict[str, list[Any]]:
    """The results of each server's blocks, one a round.

    The order turns from round to round, so that no engine always follows the same one. A server
    that ends is left out, and `lost` is told why; without `lost` EOFError is raised.
    """
    found: dict[str, list[Any]] = {name: [] for name in servers}
    order = list(servers)
    for _ in range(rounds):
        for name in list(order):
            try:
                found[name].append(servers[name].block())
            except EOFError as error:
                if lost is None:
                    raise
                lost[name] = str(error)
                order.remove(name)
                del found[name]
            time.sleep(PAUSE)
        order = order[1:] + order[:1]
    return found
