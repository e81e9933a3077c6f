"""What the command exits with where something ended it; other codes are those of the errors."""

from __future__ import annotations

USAGE = 2
INTERNAL = 70  # sysexits.h: EX_SOFTWARE
INTERRUPTED = 130
TERMINATED = 143
BROKEN_PIPE = 141
