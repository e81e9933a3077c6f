"""Features of images that first layers of a decoder add too (DeepStack, arXiv 2406.04334).

An encoder gives some for each of these layers, in rows as those that take the tokens' places; the
decoder adds them where the tokens are. Here they are one tensor for all tokens, zero at text.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

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
    """While it lasts, first layers of the model add features (L, B, S, H) to all tokens' own."""
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
    """In the place of a mask of tokens: an index of all of them, which no trace has to count."""

    def to(self, *_: Any, **__: Any) -> Any:
        return ...
