"""What else the machine computes while something is timed, from Linux' counters of CPU time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TRUSTED = 0.05
"""The share of the machine's CPU time that others may take before figures are in doubt."""
_PROC = Path("/proc")
_IDLE = (3, 4)  # idle, and waiting for a disk


@dataclass(frozen=True)
class Load:
    """The share of all CPU time that others took, from 0 to 1; None where it can't be read."""

    others: float | None

    @property
    def is_trusted(self) -> bool:
        """Whether the machine was quiet enough for times to be compared with another run's."""
        return self.others is not None and self.others <= TRUSTED

    def __str__(self) -> str:
        if self.others is None:
            return "What else the machine did could not be measured, so its times may not compare."
        said = f"Others took {self.others:.0%} of the machine's CPU time meanwhile"
        if self.is_trusted:
            return f"{said}."
        return f"{said}: trust no time of this run, and its ratios only within their spread."


class Watch:
    """CPU time from here on; `of` says what share went to others than these processes."""

    def __init__(self, processes: Iterable[int] = (), proc: Path = _PROC) -> None:
        self._proc = proc
        self._processes = [os.getpid(), *processes]
        self._start = self._read()

    def load(self) -> Load:
        """The load since the watch began. The processes must still be there."""
        end = self._read()
        if self._start is None or end is None:
            return Load(None)
        whole, busy, own = (b - a for a, b in zip(self._start, end, strict=True))
        return Load(min(1.0, max(0.0, busy - own) / whole) if whole > 0 else 0.0)

    def _read(self) -> tuple[float, float, float] | None:
        """All CPU time, that of all processes, and that of ours, in ticks."""
        try:
            first, *_ = (self._proc / "stat").read_text().splitlines()
            ticks = [int(word) for word in first.split()[1:9]]
            own = sum(self._of(process) for process in self._processes)
        except (OSError, ValueError, IndexError):
            return None
        return sum(ticks), sum(ticks) - sum(ticks[at] for at in _IDLE), own

    def _of(self, process: int) -> int:
        # The name, in brackets, may hold spaces and brackets.
        fields = (self._proc / str(process) / "stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13]))


def before(seconds: float = 0.5) -> Load:
    """The load while this process sleeps."""
    watch = Watch()
    time.sleep(seconds)
    return watch.load()
