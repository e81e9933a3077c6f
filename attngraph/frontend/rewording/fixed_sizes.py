"""Functions that stand in for those of torch that make constants of sizes in a trace.

Their C++ asks for sizes as numbers. Each is computed here as torch documents it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from attngraph.frontend.rewording.mapped_layers import LAYERS, is_mapped

_larger: Callable[..., Any] = torch.sym_max
_POOLS = (F.max_pool1d, torch.max_pool1d)
_POOL = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
_TAKES = (torch.take_along_dim, torch.Tensor.take_along_dim)
_WINDOWS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    torch.hann_window: lambda turn: 0.5 - 0.5 * turn.cos(),
    torch.hamming_window: lambda turn: 0.54 - 0.46 * turn.cos(),
    torch.blackman_window: lambda turn: 0.42 - 0.5 * turn.cos() + 0.08 * (2 * turn).cos(),
}


def with_open_sizes(func: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """The result of a call; None where the function is none of these, or its sizes are numbers."""
    named = dict(named)
    if func in _POOLS and not named.pop("return_indices", False):
        return _pooled(**dict(zip(_POOL, args, strict=False)) | named)
    if func in _TAKES:
        return _taken(*args, **named)
    if func in LAYERS and is_mapped(args[0] if args else named.get("input", named.get("query"))):
        return LAYERS[func](*args, **named)
    if func is F.affine_grid:
        return _grid(*args, **named)
    if func is torch.kron:
        return _kron(*args, **named)
    if func in _WINDOWS and not set(named) - {"periodic", "dtype", "device", "window_length"}:
        return _window(_WINDOWS[func], *args, **named)
    return None


def _is_open(tensor: torch.Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in tensor.shape)


def _pooled(
    input: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> torch.Tensor | None:
    """A pooling of images that have one row."""
    if not _is_open(input):
        return None
    kernel, step, edge, gap = (
        (of_row, *(number if isinstance(number, (tuple, list)) else (number,)))
        for of_row, number in (
            (1, kernel_size),
            (1, kernel_size if stride is None or stride == [] else stride),
            (0, padding),
            (1, dilation),
        )
    )
    return F.max_pool2d(input.unsqueeze(-2), kernel, step, edge, gap, ceil_mode).squeeze(-2)


def _taken(
    input: torch.Tensor, indices: torch.Tensor, dim: int | None = None
) -> torch.Tensor | None:
    if not (_is_open(input) or _is_open(indices)) or input.dim() != indices.dim():
        return None
    if dim is None:
        return input.reshape(-1).gather(0, indices.reshape(-1))
    dim %= input.dim()
    pairs = [*zip(input.shape, indices.shape, strict=True)]
    shape = [theirs if isinstance(own, int) and own == 1 else own for own, theirs in pairs]
    whole, places = ([*shape[:dim], -1, *shape[dim + 1 :]] for _ in range(2))
    return input.expand(whole).gather(dim, indices.expand(places))


def _grid(
    theta: torch.Tensor, size: Sequence[Any], align_corners: bool | None = None
) -> torch.Tensor | None:
    """Of each pixel's place from −1 to 1 along each axis, the image under the map."""
    if not any(isinstance(each, torch.SymInt) for each in size):
        return None
    axes = [_centres(each, theta, bool(align_corners)) for each in size[2:]]
    places = torch.meshgrid(*axes, indexing="ij")[::-1]
    homogeneous = torch.stack([*places, torch.ones_like(places[0])], -1)
    flat = homogeneous.reshape(1, -1, len(axes) + 1)
    return (flat @ theta.mT).reshape(theta.shape[0], *size[2:], len(axes))


def _centres(count: Any, like: torch.Tensor, align_corners: bool) -> torch.Tensor:
    place = torch.arange(count, dtype=like.dtype, device=like.device)
    if not align_corners:
        centres: torch.Tensor = (2 * place + 1) / count - 1
        return centres
    return torch.where(place * 0 + count > 1, 2 * place / _larger(count - 1, 1) - 1, 0.0)


def _kron(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    if not (_is_open(input) or _is_open(other)):
        return None
    axes = max(input.dim(), other.dim())
    first, second = (
        each[(None,) * (axes - each.dim())] if each.dim() < axes else each
        for each in (input, other)
    )
    for axis in range(axes):
        first = first.unsqueeze(2 * axis + 1)
        second = second.unsqueeze(2 * axis)
    product = first * second
    sizes = [product.shape[2 * axis] * product.shape[2 * axis + 1] for axis in range(axes)]
    return product.reshape(sizes)


def _window(
    formula: Callable[[torch.Tensor], torch.Tensor],
    window_length: Any,
    periodic: bool = True,
    dtype: torch.dtype | None = None,
    device: Any = None,
) -> torch.Tensor | None:
    if not isinstance(window_length, torch.SymInt):
        return None
    length: Any = window_length
    count = length if periodic else _larger(length - 1, 1)
    place = torch.arange(length, dtype=dtype or torch.get_default_dtype(), device=device)
    window = formula(place * (2 * torch.pi) / count)
    # a window of one number is 1, symmetric or not
    return torch.where(place * 0 + length > 1, window, torch.ones_like(window))
