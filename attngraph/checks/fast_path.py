"""Whether torch.nn's fused fast path computes another function than the module's own code.

nn.TransformerEncoder and nn.MultiheadAttention have two forms in eager: without gradients a fused
one, which packs padded rows away and returns zeros there, and NaN where a row has no key. The trace
and the reference are of the other. Where the two differ, a user who compares by hand must know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.utils import _pytree as pytree

from attngraph.frontend.capture import Captured
from attngraph.inference import restored

_KINDS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
_ROUNDING = 2.0**-10
"""A share of an output's largest number: far above what other orders of sums change in float32."""


def fast_path_notes(
    module: nn.Module,
    captured: Captured,
    cases: Mapping[str, tuple[torch.Tensor, ...]],
    eager: Mapping[str, Sequence[torch.Tensor]],
) -> list[str]:
    """A sentence where the fast path returns something else than `eager` in a case."""
    kinds = {type(part).__name__ for part in module.modules() if isinstance(part, _KINDS)}
    if not kinds or not torch.backends.mha.get_fastpath_enabled():
        return []
    for label, tensors in cases.items():
        if label not in eager:
            continue
        args, kwargs = captured.call(tensors)
        try:
            fused = _fused(module, args, kwargs)
        except Exception:  # a form of its own, which may not take what the other does
            continue
        pairs = list(zip(fused, eager[label], strict=False))
        if any(_differ(ours, own) for ours, own in pairs):
            return [
                f"Without gradients torch.nn's fast path of {' and '.join(sorted(kinds))} returns "
                f"something else than the module's own code, at {label} for one: zeros in padded "
                "rows, or NaN in rows without a key. The file follows the code, as eager does "
                "with gradients or after torch.backends.mha.set_fastpath_enabled(False)."
            ]
    return []


def _fused(
    module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
) -> list[torch.Tensor]:
    modes = [(part, part.training) for part in module.modules()]
    with restored(module), torch.no_grad():
        try:
            for part, _ in modes:
                part.training = False
            leaves = pytree.tree_leaves(module(*args, **kwargs))
        finally:
            for part, mode in modes:
                part.training = mode
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _differ(fused: torch.Tensor, own: torch.Tensor) -> bool:
    if fused.shape != own.shape:
        return True
    if not own.is_floating_point() or not own.numel():
        return False
    if not torch.equal(fused.isfinite(), own.isfinite()):
        return True
    gap = (fused - own).nan_to_num(0.0, 0.0, 0.0).abs().max()
    largest = own.nan_to_num(0.0, 0.0, 0.0).abs().max()
    return bool(gap > _ROUNDING * largest)
