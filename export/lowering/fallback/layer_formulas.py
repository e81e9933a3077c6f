"""Formulas of layers, as in formulas.py: in forms that their operators don't have."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attngraph.errors import LoweringError
from attngraph.export.lowering.fallback.pointwise_formulas import FORMULAS, each, formula

__all__ = ["FORMULAS"]


@formula("aten.conv_tbc")
def _conv_tbc(x: Tensor, weight: Tensor, bias: Tensor, pad: int = 0) -> Tensor:
    result = F.conv1d(x.permute(1, 2, 0), weight.permute(2, 1, 0), bias, padding=pad)
    return result.permute(2, 0, 1)


def _transposed(
    axes: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
    dilation: Sequence[int] = (1,),
) -> Any:
    """Padded at the end and dilated, which onnxruntime refuses: all of it, then cut or filled up.

    What is filled up is the bias alone.
    """
    if not any(output_padding) or all(step == 1 for step in dilation):
        return NotImplemented
    whole: Any = getattr(F, f"conv_transpose{axes}d")
    result = whole(x, weight, None, stride, 0, 0, groups, dilation)
    pairs = zip(each(padding, axes), each(output_padding, axes), strict=True)
    ends = [(-p, q - p) for p, q in pairs]
    result = F.pad(result, [end for pair in reversed(ends) for end in pair])
    return result if bias is None else result + bias.reshape(-1, *[1] * axes)


for _axes, _name in enumerate(("conv_transpose1d", "conv_transpose2d.input"), 1):
    formula(f"aten.{_name}")(functools.partial(_transposed, _axes))
formula("aten.conv_transpose3d.input")(functools.partial(_transposed, 3))


@formula("aten.pixel_shuffle")
def _pixel_shuffle(x: Tensor, factor: int) -> Any:
    """Of integers and bools, which `DepthToSpace` has no kernel for."""
    if x.dtype.is_floating_point:
        return NotImplemented
    *rest, channels, height, width = x.shape
    parts = x.reshape([*rest, channels // factor**2, factor, factor, height, width])
    first = len(rest) + 1
    order = [*range(first), first + 2, first, first + 3, first + 1]
    wide = [*rest, channels // factor**2, height * factor, width * factor]
    return parts.permute(order).reshape(wide)


def _by_batch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised by channel with the statistics of the batch; their mean, and 1 / deviation."""
    axes = [0, *range(2, x.ndim)]
    mean = x.mean(axes, keepdim=True)
    scale = torch.rsqrt(x.var(axes, correction=0, keepdim=True) + eps)
    result = (x - mean) * scale
    shape = [-1, *[1] * (x.ndim - 2)]
    result = result if weight is None else result * weight.reshape(shape)
    result = result if bias is None else result + bias.reshape(shape)
    return result, mean.flatten(), scale.flatten()


@formula("aten.native_batch_norm", "aten._native_batch_norm_legit")
def _batch_norm_with_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *others: Any
) -> Any:
    _mean, _variance, training, _momentum, eps = others
    return _by_batch(x, weight, bias, eps) if training else NotImplemented


@formula("aten._native_batch_norm_legit_functional")
def _batch_norm_that_updates(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """And the running statistics after it, of which the variance is the unbiased one."""
    if not training:
        return NotImplemented
    axes = [0, *range(2, x.ndim)]
    means, variances = x.mean(axes), x.var(axes)
    updated = [
        old * (1 - momentum) + new * momentum for old, new in ((mean, means), (variance, variances))
    ]
    return *_by_batch(x, weight, bias, eps), *updated


@formula("aten.batch_norm")
def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Any:
    if not training:
        return NotImplemented
    if mean is not None:
        raise LoweringError(
            "in training mode it updates its running statistics, which no file keeps; call eval() "
            "before exporting the model, or give it none (track_running_stats=False)"
        )
    return _by_batch(x, weight, bias, eps)[0]
