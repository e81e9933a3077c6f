"""Loads files one by one, each in a forked process with little memory and time.

Reads paths from stdin, one a line, and writes a JSON line for each: the error's type and sentence,
the seconds of CPU time and the peak of resident bytes.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

from attngraph.frontend.files.load import load

SECONDS, ROOM = 20, 1 << 30
"""What stops a load for good: its CPU time, and the address space on top of what torch took."""


def _mapped() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _load(path: str) -> dict[str, str]:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_mapped() + ROOM,) * 2)
    try:
        load(Path(path))
    except BaseException as error:
        return {"type": type(error).__name__, "said": str(error)[:2000]}
    return {"type": "", "said": "loaded"}


def _forked(path: str) -> dict[str, object]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            os.write(writing, json.dumps(_load(path)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    _, status, usage = os.wait4(child, 0)
    found: dict[str, object] = json.loads(answer) if answer else {"type": "killed", "said": status}
    spent = usage.ru_utime + usage.ru_stime
    return {**found, "seconds": spent, "bytes": usage.ru_maxrss * 1024}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(_forked(line.rstrip("\n"))), flush=True)
