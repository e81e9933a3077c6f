"""What a pass hands on beside the graph: findings for later stages, remarks for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from attngraph.ir import Graph
from attngraph.passes.rewriting.outcomes import Tally


@dataclass(frozen=True)
class Packed:
    """The tokens that were packed, and which elements of the graph's outputs they leave unsaid.

    `valid` computes from the graph's inputs which tokens are no padding, bool (B, T). For each
    output of the graph that depends on them, by its position: None where its rows (b, t) are the
    tokens themselves, else the places along T that it reads. Such an output is pooled: an element
    is unsaid where one of these places is padding, or every token is.
    """

    valid: Graph
    outputs: Mapping[int, tuple[int, ...] | None]


@dataclass(slots=True)
class Findings:
    """What one pass found.

    `tally` counts its rewrites. `packed` has an entry for each padding mask whose tokens it packed,
    `assumed` one for each attention at which it relied on an assumption, by name. `became` says of
    attentions that it replaced, by the name of their first result, what that is called now.
    """

    tally: Tally = field(default_factory=Tally)
    packed: list[Packed] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    became: dict[str, str] = field(default_factory=dict)

    def add(self, other: Findings, within: str) -> None:
        """Takes in what was found in the body of the loop whose first result is `within`."""
        self.tally.add(other.tally)
        self.packed += other.packed
        self.assumed += other.assumed
        self.became |= {f"{within}/{a}": f"{within}/{b}" for a, b in other.became.items()}


_RUNNING: WeakKeyDictionary[Graph, Findings] = WeakKeyDictionary()


@contextmanager
def recorded(graph: Graph) -> Iterator[Findings]:
    """Collects what the pass that runs on a graph meanwhile finds."""
    outer, found = _RUNNING.get(graph), Findings()
    _RUNNING[graph] = found
    try:
        yield found
    finally:
        if outer is None:
            del _RUNNING[graph]
        else:
            _RUNNING[graph] = outer


def findings_of(graph: Graph) -> Findings:
    """The findings of the pass that runs on the graph; outside of any, some that nobody reads."""
    return _RUNNING.get(graph) or Findings()


def tally_of(graph: Graph) -> Tally:
    """The counts among them."""
    return findings_of(graph).tally
