"""Axes of several inputs that one Dim names: torch keeps a symbol for each until the trace ends.

Two batches of `b` that are joined have b + b' rows, of which a half is no batch: torch.export makes
a constant of both. Where such an axis is cut, the symbols are told to be equal, as the Dim says. So
they are where a root is taken of both sides' product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch.utils import _pytree as pytree

from attngraph.frontend.interface.shapes import Request


class Ties:
    """The sizes of a trace's inputs that are equal, in pairs, and the `sizes` of all requests."""

    def __init__(self) -> None:
        self.sizes: dict[Request, torch.SymInt] = {}
        self._pairs: list[tuple[torch.SymInt, torch.SymInt]] = []

    def see(self, leaves: Sequence[Any], requests: Sequence[Request]) -> None:
        first: dict[str, torch.SymInt] = {}
        for request in requests:
            size = leaves[request.leaf].shape[request.axis]
            if isinstance(size, torch.SymInt):
                self.sizes[request] = size
            if request.name is not None and isinstance(size, torch.SymInt):
                known = first.setdefault(request.name, size)
                if known is not size:
                    self._pairs.append((known, size))

    def settle(self, total: Any) -> None:
        """Has the sizes be one of which a size, or its expression, is made up."""
        expr = total.node.expr if isinstance(total, torch.SymInt) else total
        symbols = expr.free_symbols if isinstance(expr, sympy.Basic) else ()
        for first, other in self._pairs if len(symbols) > 1 else ():
            own = first.node.expr, other.node.expr
            if own[0] != own[1] and all(expr.free_symbols <= symbols for expr in own):
                bool(first == other)  # which torch takes for a condition, and the Dim fulfils it


@contextmanager
def seen_ties(module: torch.nn.Module, requests: Sequence[Request], ties: Ties) -> Iterator[None]:
    """Within it, `ties` get the sizes that the module is called with."""

    def see(_: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        ties.see(pytree.tree_leaves((args, dict(kwargs))), requests)

    handle = module.register_forward_pre_hook(see, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
