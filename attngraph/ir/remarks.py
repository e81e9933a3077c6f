"""What the compiler tells the user about each attention site and each mask, with stable codes."""

from __future__ import annotations

from dataclasses import dataclass

from attngraph.ir.loc import UNKNOWN, Loc


@dataclass(frozen=True, slots=True)
class Remark:
    """Output: nothing is computed from it (passes/rewriting/findings.py has what is).

    `status` is "fused", "declined", "named" (a softmax with values that is no attention) or
    "note"; docs/remarks.md explains each `code`.
    """

    status: str
    code: str
    reason: str
    loc: Loc = UNKNOWN
    op: str = ""
    hint: str = ""
    node: str = ""
    blamed: str = ""

    def __str__(self) -> str:
        return f"{self.loc}: {self.status} [{self.code}] {self.reason}"
