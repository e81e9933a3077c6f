"""What the compiler tells the user about each attention site and each mask, with stable codes."""

from __future__ import annotations

from dataclasses import dataclass

from attngraph.ir.graph import Node
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


def remark_on(
    node: Node,
    status: str,
    code: str,
    reason: str,
    hint: str = "",
    *,
    loc: Loc | None = None,
    name: str = "",
    blamed: Node | None = None,
) -> Remark:
    """On what a node gives, by default the first of it; `blamed` is the node that is the reason."""
    why = "" if blamed is None else f"{blamed.op} at {blamed.loc}"
    place = loc or node.loc, node.op, hint, name or node.outputs[0].name, why
    return Remark(status, code, reason, *place)
