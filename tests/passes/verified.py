"""Verifies graphs between passes: well formed after each one, in normal form once canonical."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from attngraph.errors import IRError
from attngraph.ir import Graph, verify
from attngraph.passes import PassResult
from attngraph.passes.canonical.normal_form import check_normal_form

UNFINISHED = frozenset(["pack-tokens"])
"""Passes that canonicalize always follows. While its rewrites are evaluated, pack-tokens needs −1
for the number of rows, which the trials can't know."""


class Verified:
    """An observer of runs of passes. Types are inferred again for the nodes that a pass made."""

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[Graph, int] = WeakKeyDictionary()
        self._canonical: WeakKeyDictionary[Graph, None] = WeakKeyDictionary()

    def __call__(self, graph: Graph, result: PassResult) -> None:
        """Raises AssertionError with the name of the pass at the first violation."""
        if result.name == "canonicalize":
            self._canonical.setdefault(graph)
        elif not result.changed and graph in self._made:
            return
        known = self._made.get(graph, 0)
        self._made[graph] = graph.created
        try:
            verify(graph, types_of=[node for node in graph if node.number > known])
            if graph in self._canonical and result.name not in UNFINISHED:
                check_normal_form(graph)
        except IRError as error:
            raise AssertionError(f"After {result.name}: {error}") from error
