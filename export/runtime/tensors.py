"""Tensors between torch and onnxruntime, without a copy."""

from __future__ import annotations

import functools
from typing import Any

import onnxruntime
import torch
from torch.utils.dlpack import from_dlpack


class _BoolStorage:
    """A bool tensor's bytes in DLPack, labelled as bool.

    onnxruntime 1.31 rejects DLPack's own bool code and takes uint8 whose owner says it is bool;
    1.32 takes the code, and nobody's word.
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
    is_labelled = tensor.dtype is torch.bool and not _takes_bools()
    return onnxruntime.OrtValue.from_dlpack(_BoolStorage(tensor) if is_labelled else tensor)


@functools.cache
def _takes_bools() -> bool:
    """Whether this onnxruntime knows DLPack's code of bools."""
    try:
        value = onnxruntime.OrtValue.from_dlpack(torch.zeros(1, dtype=torch.bool))
    except RuntimeError:
        return False
    return bool(value.data_type() == "tensor(bool)")


def to_torch(value: onnxruntime.OrtValue, dtype: torch.dtype) -> torch.Tensor:
    """onnxruntime's tensor as torch's, in the same memory."""
    tensor: torch.Tensor = from_dlpack(value)
    return tensor.view(torch.bool) if dtype is torch.bool else tensor
