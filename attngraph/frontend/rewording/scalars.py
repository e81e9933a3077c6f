"""Functions that take numbers where a model gives sizes: torch would make constants of these.

`linspace` of as many steps as a size, as coordinates of an image are, a power whose base is a ratio
of sizes, as rotary embeddings that stretch with the length have, and a tensor of ratios of sizes
are computed from tensors of one element. So is a tensor of a list in which numbers are tensors,
whose values a trace lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch

from attngraph.frontend.rewording.loop_lists import Steps

MAKERS = (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)
"""What makes a tensor of a number or of lists of them."""


def of_sizes(
    func: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]
) -> torch.Tensor | None:
    """The result of a call on open sizes; None where the call itself can be traced."""
    if func in (torch.linspace, torch.logspace):
        names = ("start", "end", "steps", "base")
        range_of = dict(zip(names, args, strict=False)) | dict(named)
        if any(_is_open(range_of.get(name)) for name in names[:3]):
            number = range_of.pop("base", 10.0)
            exponents = _linspace(**range_of)
            if exponents is None or func is torch.linspace:
                return exponents
            return torch.pow(number, exponents)
    if func in (torch.pow, torch.Tensor.__rpow__) and len(args) == 2:
        base, exponent = args if func is torch.pow else args[::-1]
        if _is_open(base) and isinstance(exponent, torch.Tensor):
            return _number(base, _result_type(base, exponent), exponent.device) ** exponent
    if func in MAKERS:
        like, *rest = args if func is torch.Tensor.new_tensor else (None, *args)
        data = rest[0] if rest else named.get("data")
        device = named.get("device") or (None if like is None else like.device)
        if isinstance(data, Steps):
            whole: torch.Tensor = data.whole()
            dtype = named.get("dtype") or (None if like is None else like.dtype)
            return whole.to(dtype=dtype, device=device, copy=True)
        if _has_open_floats(data):
            return _made(data, dtype=named.get("dtype"), device=device)
        if isinstance(data, (list, tuple)) and _has_tensors(data):
            dtype = named.get("dtype") or (_common(data) if like is None else like.dtype)
            return _made(data, dtype=dtype, device=device).detach()
    return None


def _is_open(number: Any) -> bool:
    """Whether it is computed from sizes, and not from what a tensor holds."""
    return isinstance(number, (torch.SymInt, torch.SymFloat)) and number.node.has_hint()


def _result_type(number: Any, tensor: torch.Tensor) -> torch.dtype:
    is_float = isinstance(number, torch.SymFloat) and not tensor.dtype.is_floating_point
    return torch.get_default_dtype() if is_float else tensor.dtype


def _has_open_floats(data: Any) -> bool:
    """Whether nested lists of numbers hold ratios of sizes."""
    if isinstance(data, (list, tuple)):
        return any(map(_has_open_floats, data))
    return isinstance(data, torch.SymFloat) and _is_open(data)


def _has_tensors(data: Any) -> bool:
    """Whether nested lists of numbers hold tensors of a single number."""
    if isinstance(data, (list, tuple)):
        return any(map(_has_tensors, data))
    return isinstance(data, torch.Tensor) and data.dim() == 0


def _common(data: Any) -> torch.dtype:
    """The dtype that torch gives a tensor of nested lists of numbers and such tensors."""
    if isinstance(data, (list, tuple)):
        return reduce(torch.promote_types, map(_common, data))
    if isinstance(data, torch.Tensor):
        return data.dtype
    if isinstance(data, (bool, torch.SymBool)):
        return torch.bool
    is_whole = isinstance(data, (int, torch.SymInt))
    return torch.int64 if is_whole else torch.get_default_dtype()


def _made(data: Any, *, dtype: torch.dtype | None, device: Any) -> torch.Tensor:
    dtype = dtype or torch.get_default_dtype()
    if isinstance(data, (list, tuple)):
        return torch.stack([_made(each, dtype=dtype, device=device) for each in data])
    return _number(data, dtype, device)


def _number(number: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
    if isinstance(number, torch.Tensor):
        return number.to(dtype=dtype, device=device)
    return torch.full((), number, dtype=dtype, device=device)


def _linspace(
    start: Any,
    end: Any,
    steps: Any,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **others: Any,
) -> torch.Tensor | None:
    """As torch computes it: the first half from the start on, the second one back from the end."""
    dtype = dtype or torch.get_default_dtype()
    if any(map(others.get, ("out", "layout"))) or dtype not in (torch.float32, torch.float64):
        return None  # whole numbers are rounded as they go, and halves by kernels of their own
    first, last = _number(start, dtype, device), _number(end, dtype, device)
    place = torch.arange(steps, device=device)
    step = (last - first) / _number(steps - 1, dtype, device).clamp(min=1)
    ahead = first + step * place.to(dtype)
    back = last - step * (steps - 1 - place).to(dtype)
    return torch.where((2 * place < steps - 1) | (place == 0), ahead, back)
