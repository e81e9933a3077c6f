"""Weights that are tensors of a type of their own, such as torchao's: codes with scales.

torch.export traces `linear(x, weight)` with such a weight as one operator. A graph has plain
tensors, so the weight becomes the numbers that it stands for; what the type does beyond that (it
may round activations, say) shows in parity.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

from attngraph.errors import CaptureError
from attngraph.ir.storage import wraps

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def plain_weight(name: str, data: torch.Tensor) -> torch.Tensor:
    """The numbers that a weight stands for; a plain tensor in memory of its own is returned as is.

    Raises CaptureError where its type doesn't give them.
    """
    if isinstance(data, FakeTensor):
        raise CaptureError(
            f"The model's {name} is a fake tensor, which has no numbers: load the weights first."
        )
    if not wraps(data):
        if data.is_neg() or data._is_zerotensor():  # what its memory holds isn't what it reads
            return data.detach().clone()
        return data if type(data) in _PLAIN else data.as_subclass(torch.Tensor)
    for read in (lambda data: data.dequantize(), lambda data: data * 1, _by_linear):
        try:
            with torch.no_grad():
                found = read(data)
        except Exception:  # whatever its type has no operator for
            continue
        if isinstance(found, torch.Tensor) and not wraps(found) and found.shape == data.shape:
            return found.detach().to(data.dtype)
    kind = type(data)
    raise CaptureError(
        f"The model's {name} is a {kind.__module__}.{kind.__qualname__}, a tensor that wraps "
        "others and doesn't give its numbers: give the type a dequantize(), or replace the weight "
        "by a plain tensor before you compile."
    )


def _by_linear(data: torch.Tensor) -> torch.Tensor:
    unit = torch.eye(data.shape[1], dtype=data.dtype, device=data.device)
    return torch.nn.functional.linear(unit, data).T.contiguous()
