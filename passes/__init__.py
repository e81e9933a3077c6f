"""Graph passes: analyses and rewrites, one per file."""

from attngraph.passes import canonicalize, constant_fold, cse, dce, fuse_attention
from attngraph.passes.manager import Pass, PassResult, make, register, registered, run

__all__ = [
    "Pass",
    "PassResult",
    "canonicalize",
    "constant_fold",
    "cse",
    "dce",
    "fuse_attention",
    "make",
    "register",
    "registered",
    "run",
]
