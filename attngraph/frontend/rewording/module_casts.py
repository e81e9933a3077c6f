"""Lets a module be cast in a forward to the dtype that it has, as routers of experts are.

`self.classifier = self.classifier.to(x.dtype)` puts new tensors in the places of the weights. In a
trace these are the graph's inputs, which torch can't replace, and there is nothing to be done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn


@contextmanager
def casts_to_own_dtype() -> Iterator[None]:
    """A module that is cast to what all of its floats are is itself."""
    own = nn.Module.to
    parse: Any = torch._C._nn._parse_to

    def cast(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device, dtype, _, layout = parse(*args, **kwargs)
        held = (*self.parameters(), *self.buffers())
        others = {each.dtype for each in held if each.is_floating_point()} - {dtype}
        if device is None and layout is None and not others:
            return self
        return own(self, *args, **kwargs)

    with patch.object(nn.Module, "to", cast):
        yield
