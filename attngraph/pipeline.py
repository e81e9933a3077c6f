"""The order of the passes."""

from __future__ import annotations

from attngraph.passes import Pass, make, registered

CLEAN = ("canonicalize", "constant-fold", "cse", "dce")
_STAGES = (
    *CLEAN,
    "raise-softmax",
    "distribute",
    "fuse-attention",
    "fold-masks",
    *CLEAN,
    "legalize-sinks",
    "merge-projections",
    "fuse-norms",
    "fuse-activations",
    *CLEAN,
)


def pipeline() -> list[Pass]:
    """The passes `attngraph optimize` runs, in order."""
    known = registered()
    return make([name for name in _STAGES if name in known])
