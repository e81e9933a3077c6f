"""The order of the passes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import takewhile

import torch

from attngraph.analysis.masks.masking import NO_MASKED_ROWS
from attngraph.mapped import LARGE
from attngraph.options import check_assumptions
from attngraph.passes import Pass, make, only_exact
from attngraph.passes.attention.fold_masks import FoldMasks
from attngraph.passes.attention.fuse_attention import FuseAttention
from attngraph.passes.attention.raise_softmax import RaiseSoftmax
from attngraph.passes.fusion.fuse_experts import FuseExperts
from attngraph.passes.loops.loop_bodies import LoopBodies
from attngraph.passes.loops.raise_recurrence import RaiseRecurrence
from attngraph.passes.loops.split_loops import SplitLoops
from attngraph.passes.padding.pack_tokens import PackTokens
from attngraph.passes.weights.compose_linears import ComposeLinears
from attngraph.passes.weights.fold_input_scales import FoldInputScales
from attngraph.passes.weights.fold_norms import FoldNorms
from attngraph.passes.weights.fold_scales import FoldScales
from attngraph.passes.weights.merge_projections import MergeProjections

CLEAN = ("canonicalize", "constant-fold", "cse", "dce")
_STAGES = (
    "pair-loops",
    "split-complex",
    "canonicalize",
    "cse",
    "dce",
    "block-windows",
    "dce",
    "split-loops",
    "fuse-linear-attention",
    "raise-recurrence",
    "hoist-steps",
    *CLEAN,
    "fuse-experts",
    "dce",
    "split-products",
    "linearize",
    "defer-layout",
    "raise-softmax",
    "distribute",
    "join-parts",
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
    "defer-layout",
    "simplify-layout",
    "constant-fold",
    "cse",
    "merge-heads",
    "simplify-layout",
    "settle-rows",
    *CLEAN,
    "merge-projections",
    "fuse-norms",
    "fold-norms",
    "fuse-activations",
    "fuse-causal-conv",
    "fold-input-scales",
    "raise-products",
    *CLEAN,
)
_PACKING = ("pack-tokens", *CLEAN)
_SPLITTING = ("split-projections", "drop-key-bias", *CLEAN)
_IN_STEPS = ("raise-products",)
"""Passes for the bodies of loops alone, where what they gain was measured."""
_CLOSING = ("bound-keys", "fuse-quantized", "dce")


def pipeline(
    *,
    exact: bool = False,
    assume: Collection[str] = (),
    ignore_padded_rows: bool = False,
    packed_attention: bool = False,
    few_bits: bool = False,
    part: bool = False,
    apart: bool = False,
    recurrences: bool = True,
    experts: bool = False,
    in_fp16: bool = False,
) -> list[Pass]:
    """The passes `attngraph optimize` runs, in order; with `exact`, those of `--exact`, and with
    `ignore_padded_rows` those of `--ignore-padded-rows` too, for a target with kernels for
    attention over packed rows if `packed_attention`. With `few_bits`, weights are to be
    quantized in blocks of one scale: the scales of norms then stay out of them, as they would
    spread a block's numbers. With `part` no product is split: there is one for each part, for a
    target without launches; with `apart` the projections of a large model aren't joined first, to
    which a launch is nothing. Without `recurrences` those of outer products stay: the target has no
    kernel for them. With `experts` mixtures of experts become one op, for a target that
    has an operator for it. With `in_fp16` weights are to be stored so, and none is made of others
    that loses digits there. Files carry these names (provenance.py), so they stay as they are.

    `assume` are some of `options.ASSUMPTIONS`. Raises UsageError at another.
    """
    check_assumptions(assume)
    packing = _PACKING if ignore_padded_rows else ()
    names = [*_STAGES, *packing, *(_SPLITTING if part else ()), *_CLOSING]
    if not recurrences:
        names.remove("fuse-linear-attention")
    if few_bits:
        names.remove("fold-norms")
    if not experts:
        names.remove("fuse-experts")
    stages = only_exact(names) if exact else make(names)
    if NO_MASKED_ROWS in assume:
        stages = [
            replace(item, no_masked_rows=True)
            if isinstance(item, FoldMasks | FuseAttention | RaiseSoftmax)
            else item
            for item in stages
        ]
    stages = [
        replace(item, recurrences=recurrences)
        if isinstance(item, SplitLoops | RaiseRecurrence)
        else item
        for item in stages
    ]
    stages = [
        replace(item, in_codes=few_bits) if isinstance(item, FuseExperts) else item
        for item in stages
    ]
    stages = [
        replace(item, stored_in=torch.float16)
        if in_fp16 and isinstance(item, ComposeLinears | FoldInputScales | FoldNorms | FoldScales)
        else item
        for item in stages
    ]
    stages = [
        replace(item, attention=packed_attention) if isinstance(item, PackTokens) else item
        for item in stages
    ]
    in_loops = [item for item in stages if item.name not in _SPLITTING[:1]]  # a step has few rows
    stages = [item for item in stages if item.name not in _IN_STEPS]
    stages = [
        replace(item, apart_from=LARGE) if apart and isinstance(item, MergeProjections) else item
        for item in stages
    ]
    # A loop is read as a whole before its body is folded: a power that was rounded to a constant
    # no longer equals the formula. What a body takes and gives is real by then, and its sums over
    # kept inputs are convolutions, which split-loops knows states by. A step's chunk is part of a
    # recurrence over all chunks, and isn't taken out of the body before that is read.
    pairing, *reading = takewhile(lambda item: item.name != "constant-fold", stages)
    rest = stages[1 + len(reading) :]
    convolving = [item for item in rest if item.name == "fuse-causal-conv"]
    whole = [item for item in reading if item.name != "fuse-linear-attention"]
    first = LoopBodies((pairing, *whole, *convolving))
    return [pairing, first, *reading, LoopBodies(tuple(in_loops)), *rest]
