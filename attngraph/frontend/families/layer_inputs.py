"""What layers of a decoder read for each token beside the embeddings.

- Inputs of each layer (Gemma 3n, Gemma 4). The class that reads the images says which tokens have
  which, and what those of images have: it computes them from ids and hands them to its decoder.
- Features of images that first layers add too (DeepStack, arXiv 2406.04334). An encoder gives some
  for each of these layers, in rows as those that take the tokens' places; the decoder adds them
  where the tokens are. Here they are one tensor for all tokens, zero at text.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

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
    """What a model that reads images hands its decoder for ids (B, S), by the decoder's names."""
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


_TAKEN = {"visual_pos_masks", "deepstack_visual_embeds"}


def adds_in_layers(kind: type[Any]) -> bool:
    """Whether a module's layers take features of images by these names."""
    return set(inspect.signature(kind.forward).parameters) >= _TAKEN


def deep_rows(encoded: Any) -> Tensor | None:
    """The features (L, N, H) for L layers that an encoder returned beside its rows, if any."""
    layers = getattr(encoded, "deepstack_features", None)
    if not layers:
        return None
    rows = [each if isinstance(each, Tensor) else torch.cat(list(each)) for each in layers]
    return torch.stack([each.reshape(-1, each.shape[-1]) for each in rows])


@contextlib.contextmanager
def added_in_layers(model: nn.Module, features: Tensor | None) -> Iterator[None]:
    """Within it, the model's first L layers add features (L, B, S, H) to those of the tokens."""
    with contextlib.ExitStack() as held:
        for part in model.modules() if features is not None else ():
            if adds_in_layers(type(part)):
                hook = part.register_forward_pre_hook(_adding(features), with_kwargs=True)
                held.callback(hook.remove)
        yield


def _adding(features: Tensor | None) -> Any:
    def given(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        assert features is not None
        added = {"visual_pos_masks": _Everywhere(), "deepstack_visual_embeds": list(features)}
        return args, {**kwargs, **added}

    return given


class _Everywhere:
    """Stands for a mask of tokens: an index of all of them, which no trace has to count."""

    def to(self, *_: Any, **__: Any) -> Any:
        return ...
