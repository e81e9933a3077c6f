"""What Triton's Python backend runs: a decoder that generates, or a session with a CUDA graph.

A model's folder has a `model.py` that imports this class. Triton's own module is in the backend's
processes alone, so it is imported there.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from attngraph.decoding.decoder import Decoder
from attngraph.export.runtime.session import Session
from attngraph.export.target import parse_target
from attngraph.frontend.families.cache import METADATA_KEY

FILE = "model.onnx"
IDS, MASK, COUNT, TOKENS = "input_ids", "attention_mask", "max_new_tokens", "output_ids"


class TritonPythonModel:
    """One instance: the file beside its `model.py`, on the instance's own GPU."""

    def initialize(self, args: dict[str, str]) -> None:
        """Opens the file; Triton's `args` say where it lies and on which device it runs."""
        said = json.loads(args["model_config"])["parameters"]
        target, graph = (said[name]["string_value"] for name in ("target", "cuda_graph"))
        on_gpu = target != "cpu"
        options: dict[str, Any] = {"cuda_graph": True} if graph == "true" else {}
        if on_gpu:
            options["provider_options"] = {"device_id": args["model_instance_device_id"]}
        path = Path(args["model_repository"]) / args["model_version"] / FILE
        self._triton: Any = importlib.import_module("triton_python_backend_utils")
        session = Session.open(path, parse_target(target), **options)
        self._session, self._decoder = session, None
        if METADATA_KEY in session.metadata:
            session.close()
            self._decoder = Decoder.load(path, target, **options)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """An answer to each request; one that fails is told why, and costs no other."""
        return [self._answer(request) for request in requests]

    def finalize(self) -> None:
        """Closes the session."""
        (self._session if self._decoder is None else self._decoder.session).close()

    def _answer(self, request: Any) -> Any:
        triton = self._triton
        try:
            given = {
                tensor.name(): torch.from_numpy(tensor.as_numpy().copy())
                for tensor in request.inputs()
            }
            results = self._run(given)
        except Exception as error:
            return triton.InferenceResponse([], triton.TritonError(str(error)))
        return triton.InferenceResponse(
            [triton.Tensor(name, tensor.numpy()) for name, tensor in results.items()]
        )

    def _run(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self._decoder is None:
            return dict(zip(self._session.output_names, self._session.run(given), strict=True))
        count = int(given[COUNT].reshape(-1)[0])
        tokens = self._decoder.generate(given[IDS], count, given.get(MASK))
        return {TOKENS: tokens}
