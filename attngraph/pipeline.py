"""The order of the passes."""

from __future__ import annotations

from attngraph.passes import Pass, make, only_exact, registered
from attngraph.passes.loop_bodies import LoopBodies

CLEAN = ("canonicalize", "constant-fold", "cse", "dce")
_STAGES = (
    "split-complex",
    *CLEAN,
    "split-products",
    "linearize",
    "sink-layout",
    "raise-softmax",
    "distribute",
    "canonicalize",
    "dce",
    "fuse-rotary",
    "dce",
    "fuse-attention",
    "fuse-cache",
    "fold-masks",
    "dce",
    "linearize",
    "constant-fold",
    "fold-scales",
    "compose-linears",
    "fold-scales",
    "drop-key-bias",
    "simplify-layout",
    "sink-layout",
    "simplify-layout",
    "constant-fold",
    "cse",
    "merge-heads",
    "simplify-layout",
    "settle-rows",
    "legalize-sinks",
    *CLEAN,
    "merge-projections",
    "fuse-norms",
    "fuse-activations",
    "fold-input-scales",
    *CLEAN,
)


def pipeline(*, exact: bool = False) -> list[Pass]:
    """The passes `attngraph optimize` runs, in order; with `exact`, those of `--exact`."""
    known = registered()
    names = [name for name in _STAGES if name in known]
    stages = only_exact(names) if exact else make(names)
    return [LoopBodies(tuple(stages)), *stages]
