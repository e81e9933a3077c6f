"""Steps of a model whose state lies in buffers that each step reads and writes."""

from __future__ import annotations

from collections.abc import Mapping

import onnxruntime
import torch

from attngraph.export.runtime.session import Session
from attngraph.export.runtime.tensors import to_ort, to_torch


class BoundSteps:
    """One binding for all steps: the buffers are bound once, as inputs and as outputs.

    `buffers` are the state's tensors by the input that reads them, and `presents` the output of
    each. One step at a time; not for several threads at once.
    """

    def __init__(
        self,
        session: Session,
        buffers: Mapping[str, torch.Tensor],
        presents: Mapping[str, str],
        fetched: str,
    ) -> None:
        self._session = session
        self._fetched = fetched
        self._dtype = session.output_dtype(fetched)
        self._binding: onnxruntime.IOBinding = session.binding()
        self._binding.bind_output(fetched, "cpu")
        for name, tensor in buffers.items():
            value = to_ort(tensor)
            self._binding.bind_ortvalue_input(name, value)
            self._binding.bind_ortvalue_output(presents[name], value)

    def step(self, feeds: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The output that is fetched, on the CPU. Raises as `Session.run` does."""
        for name, tensor in feeds.items():
            self._binding.bind_ortvalue_input(name, to_ort(tensor.contiguous()))
        self._binding.bind_output(self._fetched, "cpu")
        results = self._session.run_binding(self._binding)
        return to_torch(results[0], self._dtype)
