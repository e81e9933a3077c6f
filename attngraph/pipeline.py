"""The order of the passes."""

from __future__ import annotations

from attngraph.passes import Pass, make, registered

CLEAN = ("canonicalize", "constant-fold", "cse", "dce")
_STAGES = (
    "split-complex",
    *CLEAN,
    "linearize",
    "sink-layout",
    "raise-softmax",
    "distribute",
    "canonicalize",
    "dce",
    "fuse-attention",
    "fold-masks",
    "dce",
    "simplify-layout",
    "sink-layout",
    "simplify-layout",
    "legalize-sinks",
    *CLEAN,
    "merge-projections",
    "fuse-norms",
    "fuse-activations",
    *CLEAN,
)


def pipeline() -> list[Pass]:
    """The passes `attngraph optimize` runs, in order."""
    known = registered()
    return make([name for name in _STAGES if name in known])
