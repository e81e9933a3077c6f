"""torch.distributions without the look at the values that they are given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.distributions import Distribution


@contextmanager
def unvalidated() -> Iterator[None]:
    """Within it, distributions don't check their parameters and samples.

    A trace has no values, and would take each for one that isn't allowed. The model itself raises
    ValueError at those that aren't, so that where it works the graph does the same.
    """
    make = Distribution.__init__

    def made(self: Distribution, *args: Any, **kwargs: Any) -> None:
        make(self, *args[:2], **{**kwargs, "validate_args": False})

    with patch.object(Distribution, "__init__", made):
        yield
