"""Features of queries and keys that are reordered alike: ⟨Q, K⟩ is the same without the reordering.

So interleaved rotary embeddings whose result is written as halves need no permute.
"""

from __future__ import annotations

from collections.abc import Sequence

from attngraph.analysis.attention.roles import Stage
from attngraph.analysis.layout.axes import Atom, Operand, resolve


def shared_order(
    query: Sequence[Stage], key: Sequence[Stage], features: Sequence[Atom]
) -> tuple[Atom, ...]:
    """The features in the order in which both sides are stored, if that is one order."""
    features = resolve(features)
    stored = [_stored(side[-1].operand, features) for side in (query, key)]
    is_whole = set(stored[0]) == set(features) and len(stored[0]) == len(features)
    return stored[0] if is_whole and stored[0] == stored[1] else features


def _stored(operand: Operand, features: Sequence[Atom]) -> tuple[Atom, ...]:
    return tuple(atom for atom in operand.atoms if atom in set(features))
