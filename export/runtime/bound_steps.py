"""Steps of a model whose state lies in buffers that each step reads and writes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import onnxruntime
import torch

from attngraph.export.runtime.session import Session
from attngraph.export.runtime.tensors import to_ort, to_torch


class BoundSteps:
    """One binding for all steps: the buffers are bound once, as inputs and as outputs.

    `buffers` are the state's tensors by the input that reads them, and `presents` the output of
    each. Of a step's other outputs those that are `fetched` come to the CPU, and what is `made`
    stays where the provider computes. One step at a time; not for several threads at once.
    """

    def __init__(
        self,
        session: Session,
        buffers: Mapping[str, torch.Tensor],
        presents: Mapping[str, str],
        fetched: Sequence[str],
        made: Collection[str] = (),
    ) -> None:
        self._session = session
        here = "cpu" if session.provider == "CPUExecutionProvider" else "cuda"
        self._places = {**dict.fromkeys(fetched, "cpu"), **dict.fromkeys(made, here)}
        self._dtypes = [session.output_dtype(name) for name in self._places]
        self._binding: onnxruntime.IOBinding = session.binding()
        self._bind_outputs()
        for name, tensor in buffers.items():
            value = to_ort(tensor)
            self._binding.bind_ortvalue_input(name, value)
            self._binding.bind_ortvalue_output(presents[name], value)

    def step(self, feeds: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The outputs that are fetched, then those that are made. Raises as `Session.run` does."""
        for name, tensor in feeds.items():
            self._binding.bind_ortvalue_input(name, to_ort(tensor.contiguous()))
        self._bind_outputs()  # anew: what an earlier step gave is the caller's
        results = self._session.run_binding(self._binding)
        return [to_torch(value, dtype) for value, dtype in zip(results, self._dtypes, strict=False)]

    def _bind_outputs(self) -> None:
        """The first ones that are bound, so that a run gives them first."""
        for name, place in self._places.items():
            self._binding.bind_output(name, place, 0 if place == "cpu" else self._session.device_id)
