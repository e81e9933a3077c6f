"""A language model run on a few tokens, to see what it keeps of them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.errors import UsageError
from attngraph.frontend.interface.modalities import cache_parameter
from attngraph.frontend.tracing.trace_errors import reason
from attngraph.inference import inference

ROWS, PROMPT = 2, 3


class DoesNotRun(UsageError):
    """A model doesn't run at all, whatever it keeps."""


def called_on(
    model: nn.Module,
    rows: int,
    length: int,
    given: Mapping[str, Any],
    *,
    token: int = 1,
    behind: int = 0,
) -> Mapping[str, Any]:
    """What a model returns for so many tokens, `behind` as many others. Raises DoesNotRun."""
    device = next(model.parameters()).device
    inputs: dict[str, Any] = dict(given)
    if "position_ids" in inspect.signature(model.forward).parameters:
        places = torch.arange(behind, behind + length, device=device)
        inputs["position_ids"] = places.expand(rows, -1)
    ids = torch.full((rows, length), token, device=device)
    try:
        result: Mapping[str, Any] = model(input_ids=ids, use_cache=True, **inputs)
    except Exception as error:
        raise DoesNotRun(
            f"{type(model).__name__} doesn't run on a few tokens: {reason(error).rstrip('.')}."
        ) from error
    return result


def taken_again(model: Any) -> tuple[str, Any]:
    """The parameter of its forward that takes what it keeps, and that of a prompt.

    A model that returns nothing of the kind may fill a cache of transformers that it is given.
    Raises UsageError where there is none, or several.
    """
    from transformers import DynamicCache

    with inference(model):
        own = called_on(model, ROWS, PROMPT, {})
    taken = inspect.signature(model.forward).parameters
    found = [
        name
        for name, value in own.items()
        if name in taken and value is not None and not isinstance(value, Tensor)
    ]
    named = cache_parameter(model.forward)
    if not found and named in taken:
        return named, DynamicCache(config=model.config.get_text_config(decoder=True))
    if len(found) != 1:
        raise UsageError(
            f"The cache of {type(model).__name__} can't be found: of what it returns, its forward "
            f"takes {' and '.join(found) or 'nothing'} again."
        )
    return found[0], own[found[0]]
