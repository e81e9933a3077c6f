"""Every pass says whether it is exact, and `--exact` runs what is."""

from __future__ import annotations

import pytest

from attngraph.passes import label_of, make, only_exact, registered
from attngraph.pipeline import pipeline


@pytest.mark.parametrize("name", registered())
def test_every_pass_has_a_label(name: str) -> None:
    (item,) = make(name)
    assert isinstance(item.exact, bool)
    if getattr(item, "bitwise", False):
        assert item.exact


def test_exact_keeps_the_order_and_leaves_out_what_reassociates() -> None:
    kept = [item.name for item in pipeline(exact=True)]
    every = [item.name for item in pipeline()]
    assert kept == [item.name for item in pipeline() if label_of(item) != "reassociating"]
    assert "distribute" in every
    assert "distribute" not in kept
    assert "fuse-attention" in kept


def test_a_pass_of_both_kinds_is_told_to_be_exact() -> None:
    (item,) = only_exact(["raise-softmax"])
    assert label_of(item) == "exact and reassociating"
    assert item == type(item)(exact_only=True)
    assert item != make("raise-softmax")[0]
