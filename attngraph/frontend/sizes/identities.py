"""Equalities of sizes that hold for every size, which torch.export takes for demands.

Two ways to halve a length twice, such as strides of convolutions and `mask[:, 2::2][:, 2::2]`, give
(n − 3) // 4 and ((n − 1) // 2 − 1) // 2. torch asks whether these are equal, and fails where it
looks for the n at which they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import sympy
from torch.fx.experimental.symbolic_shapes import DimConstraints

from attngraph.ir.dims import same


@contextmanager
def known_identities() -> Iterator[None]:
    """Within it, torch counts equalities that hold for every size as trivial."""
    plain: Callable[[DimConstraints, Any], bool] = DimConstraints.add

    def add(self: DimConstraints, expr: Any) -> bool:
        return (isinstance(expr, sympy.Eq) and same(*expr.args)) or plain(self, expr)

    with patch.object(DimConstraints, "add", add):
        yield
