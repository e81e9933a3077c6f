"""Runs that replay a CUDA graph: the same buffers each time, and one run at a time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import onnxruntime
import torch

from attngraph.errors import UsageError
from attngraph.export.runtime.tensors import to_ort


@dataclass(frozen=True)
class Fixed:
    """An input or output of one size only."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(
        cls, what: str, name: str, dtype: torch.dtype, shape: tuple[int | str | None, ...] | None
    ) -> Fixed:
        """Raises UsageError where a dim isn't static; `what` is "input" or "output"."""
        fixed = tuple(dim for dim in shape or () if isinstance(dim, int))
        if shape is None or len(fixed) != len(shape):
            text = "any" if shape is None else f"({', '.join(map(str, shape))})"
            raise UsageError(
                f"A CUDA graph needs static shapes, and the {what} {name!r} has shape {text}: "
                "compile without dynamic dims, or open the session without cuda_graph."
            )
        return cls(name, dtype, fixed)


class Replay:
    """One binding to buffers of its own on a device; a run copies in, replays, and copies out.

    onnxruntime records its kernels in the first runs, with the addresses they read and write.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        inputs: Sequence[Fixed],
        outputs: Sequence[Fixed],
        device: torch.device,
    ) -> None:
        self._session = session
        self._device = device
        self._lock = threading.Lock()
        self._binding = session.io_binding()
        self._inputs, self._outputs = (
            [torch.empty(each.shape, dtype=each.dtype, device=device) for each in fixed]
            for fixed in (inputs, outputs)
        )
        for each, buffer in zip(inputs, self._inputs, strict=True):
            self._binding.bind_ortvalue_input(each.name, to_ort(buffer))
        for each, buffer in zip(outputs, self._outputs, strict=True):
            self._binding.bind_ortvalue_output(each.name, to_ort(buffer))

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """New tensors, on the CPU where all inputs are."""
        with self._lock:
            for buffer, tensor in zip(self._inputs, tensors, strict=True):
                buffer.copy_(tensor)
            if self._device.type == "cuda":  # onnxruntime runs on a stream of its own
                torch.cuda.current_stream(self._device).synchronize()
            self._session.run_with_iobinding(self._binding)
            self._binding.synchronize_outputs()
            keep = any(tensor.device == self._device for tensor in tensors)
            place = self._device if keep else torch.device("cpu")
            return [buffer.to(place, copy=True) for buffer in self._outputs]


def graph_device(device_id: int) -> torch.device:
    """Where the buffers lie. Raises UsageError where torch has no CUDA to make them with."""
    if not torch.cuda.is_available():
        raise UsageError(
            "cuda_graph needs a PyTorch with CUDA, which makes the buffers that are replayed on; "
            "install one, or open the session without cuda_graph."
        )
    return torch.device("cuda", device_id)
