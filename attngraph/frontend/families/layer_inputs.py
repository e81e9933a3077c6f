"""Inputs of each layer of a decoder for each token, beside the embeddings (Gemma 3n, Gemma 4).

Which tokens have which, and what those of images have, is told by the class that reads the images:
it computes them of ids, and hands them to its decoder.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor

LAYER_INPUTS = "per_layer_inputs"


class _Embeddings:
    """Stands for what a decoder returns, so that what follows it runs: its states are the
    embeddings that it was given, and there is nothing else."""

    def __init__(self, embeds: Tensor) -> None:
        self.last_hidden_state = embeds

    def __getattr__(self, _: str) -> None:
        return None


def takes_layer_inputs(model: Any) -> bool:
    """Whether a model has a decoder that can be handed inputs of its layers."""
    return _decoder(model) is not None


def embedded(model: Any, ids: Tensor) -> Mapping[str, Any]:
    """What a model that reads images hands its decoder for ids (B, S), by the names of that."""
    decoder, found = _decoder(model), dict[str, Any]()
    assert decoder is not None

    def reached(**given: Any) -> _Embeddings:
        found.update(given)
        return _Embeddings(given["inputs_embeds"])

    decoder.forward = reached
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        del decoder.forward
    return found


def _decoder(model: Any) -> Any | None:
    """The outermost part that takes inputs of layers, and nothing but text."""
    for part in model.modules():
        taken = inspect.signature(part.forward).parameters
        if LAYER_INPUTS in taken and "inputs_embeds" in taken and not _reads_more(taken):
            return part
    return None


def _reads_more(taken: Mapping[str, Any]) -> bool:
    return "pixel_values" in taken or "input_features" in taken
