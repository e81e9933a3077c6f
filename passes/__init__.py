"""Graph passes: analyses and rewrites, one per file."""

import attngraph.dialect  # noqa: F401  (the passes emit its ops)
from attngraph.passes import (
    canonicalize,
    constant_fold,
    cse,
    dce,
    distribute,
    fold_masks,
    fuse_activations,
    fuse_attention,
    fuse_norms,
    legalize_sinks,
    linearize,
    merge_projections,
    raise_softmax,
    simplify_layout,
    sink_layout,
    split_complex,
)
from attngraph.passes.manager import Pass, PassResult, make, register, registered, run

__all__ = [
    "Pass",
    "PassResult",
    "canonicalize",
    "constant_fold",
    "cse",
    "dce",
    "distribute",
    "fold_masks",
    "fuse_activations",
    "fuse_attention",
    "fuse_norms",
    "legalize_sinks",
    "linearize",
    "make",
    "merge_projections",
    "raise_softmax",
    "register",
    "registered",
    "run",
    "simplify_layout",
    "sink_layout",
    "split_complex",
]
