"""An order of features that queries and keys share is left out, and no other."""

from __future__ import annotations

import itertools

import pytest
import torch

from attngraph.analysis.attention.roles import Stage
from attngraph.analysis.attention.shared_order import shared_order
from attngraph.analysis.layout.axes import Atom, Operand
from attngraph.ir import TensorType, Value


def _side(lead: Atom, *features: Atom) -> list[Stage]:
    atoms = (lead, *features)
    value = Value("x", TensorType(torch.float32, tuple(atom.size for atom in atoms)))
    return [Stage(Operand(value, tuple((atom,) for atom in atoms)), 1.0)]


@pytest.mark.parametrize(
    ("query", "key"), list(itertools.product(itertools.permutations(range(3)), repeat=2))
)
def test_the_order_is_that_of_both_sides_or_that_of_the_sum(
    query: tuple[int, ...], key: tuple[int, ...]
) -> None:
    features = tuple(Atom(size) for size in (2, 3, 4))
    found = shared_order(
        _side(Atom(5), *(features[i] for i in query)),
        _side(Atom(7), *(features[i] for i in key)),
        features,
    )
    stored = tuple(features[i] for i in query)
    assert found == (stored if query == key else features)


def test_a_feature_that_a_side_lacks_keeps_the_order_of_the_sum() -> None:
    first, second = Atom(2), Atom(3)
    sides = [_side(Atom(5), second), _side(Atom(7), second)]
    assert shared_order(*sides, (first, second)) == (first, second)
