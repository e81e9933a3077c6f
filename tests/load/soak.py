"""What long work in one process holds of memory: calls and generations, or compiles.

    python -m tests.load.soak [--minutes 30] [--compiles 1000]

Either is left out where it is 0. bench/results/soak.json and many_compiles.json keep the resident
memory when caches had filled and at the end, for docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from bench.machine import write
from tests.load.test_many_compiles import compile_one
from tests.load.test_threads import decoded, encoded, resident

_MEBIBYTE = 1 << 20
_WARM_TURNS, _WARM_SHARE = 40, 4
_CALLS, _GENERATIONS = 20, 3


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.load.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--compiles", type=int, default=1000)
    options = parser.parse_args()
    if options.minutes:
        write("soak", soaked(60 * options.minutes))
    if options.compiles:
        write("many_compiles", compiled(options.compiles))


def soaked(seconds: float) -> dict[str, Any]:
    """Calls of an encoder, and generations of a decoder with either cache, at changing sizes."""
    for turn in range(_WARM_TURNS):
        _work(turn)
    before, begin, turns = _mebibytes(), time.monotonic(), 0
    while time.monotonic() < begin + seconds:
        _work(turns)
        turns += 1
    return {
        "seconds": round(seconds),
        "calls": _CALLS * turns,
        "generations": 2 * _GENERATIONS * turns,
        "mib": [before, _mebibytes()],
    }


def _work(turn: int) -> None:
    decoded("growing", turn % 5, calls=_GENERATIONS)
    decoded("static", turn % 5, calls=_GENERATIONS)
    encoded(turn % 5, calls=_CALLS)


def compiled(count: int) -> dict[str, Any]:
    """Models that no other compile had, by memory after each quarter of them."""
    mib = []
    for place in range(count):
        compile_one(place)
        if (place + 1) % (count // _WARM_SHARE) == 0:
            mib.append(_mebibytes())
    return {"compiles": count, "mib": mib}


def _mebibytes() -> float:
    return round(resident() / _MEBIBYTE, 1)


if __name__ == "__main__":
    main()
