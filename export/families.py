"""Families of CPUs: those for which the same forms are fastest, as far as is known.

Times can only be measured on a machine that is at hand, so a table may lack a family. It then takes
that of the nearest one, and the report names both.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Collection
from pathlib import Path

FAMILIES = ("amx", "avx512", "avx2")
"""From the widest products of a core to the narrowest: tiles, 512 bits, 256 bits."""
_NEEDS = {"amx": {"amx_tile"}, "avx512": {"avx512f"}}
_CPUINFO = Path("/proc/cpuinfo")


def family_of(flags: Collection[str]) -> str:
    """The family of a CPU with these flags, as Linux calls them; the last one has none."""
    return next((name for name, needs in _NEEDS.items() if needs <= {*flags}), FAMILIES[-1])


@functools.cache
def own_family() -> str:
    """The family of this machine's CPU. Where its flags can't be read, it counts as the last."""
    try:
        lines = _CPUINFO.read_text().splitlines() if platform.system() == "Linux" else []
    except OSError:
        lines = []
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return family_of(flags.split())


def nearest(family: str, known: Collection[str]) -> str:
    """The family itself if it is known, else the nearest that is, the narrower of two."""
    place = FAMILIES.index(family)
    return min(known, key=lambda name: (abs(FAMILIES.index(name) - place), -FAMILIES.index(name)))
