"""Tensors between torch and onnxruntime, without a copy."""

from __future__ import annotations

from typing import Any

import onnxruntime
import torch
from torch.utils.dlpack import from_dlpack


class _BoolStorage:
    """A bool tensor's bytes in DLPack, labelled as bool.

    onnxruntime 1.31 rejects DLPack's own bool code and takes uint8 whose owner says it is bool.
    """

    dtype = "bool"

    def __init__(self, tensor: torch.Tensor) -> None:
        self._bytes = tensor.view(torch.uint8)

    def __dlpack__(self) -> Any:
        return self._bytes.__dlpack__()


def to_ort(tensor: torch.Tensor) -> onnxruntime.OrtValue:
    """A contiguous tensor as onnxruntime's, in the same memory.

    But for one that torch reads with the other sign, as it does `z.conj().imag`: DLPack knows none.
    """
    tensor = tensor.resolve_neg()
    labelled = _BoolStorage(tensor) if tensor.dtype is torch.bool else tensor
    return onnxruntime.OrtValue.from_dlpack(labelled)


def to_torch(value: onnxruntime.OrtValue, dtype: torch.dtype) -> torch.Tensor:
    """onnxruntime's tensor as torch's, in the same memory."""
    tensor: torch.Tensor = from_dlpack(value)
    return tensor.view(torch.bool) if dtype is torch.bool else tensor
