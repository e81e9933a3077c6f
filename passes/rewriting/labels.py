"""What a pass says of a rewrite that keeps the formula's value but not its roundings."""

from __future__ import annotations

from attngraph.ir import Node, Remark, remark_on


def reassociated(node: Node, reason: str) -> Remark:
    """A remark on one rewrite that `--exact` leaves out; `reason` says what was done.

    Checked.replace makes it, which also leaves the rewrite out: what is listed is what that is.
    """
    return remark_on(node, "note", "reassociated", reason)
