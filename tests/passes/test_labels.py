"""Every pass says whether it is exact, and `--exact` runs what is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attngraph.compiling.pipeline import pipeline
from attngraph.ir import Graph, Remark, format_graph
from attngraph.passes import label_of, make, only_exact, registered
from tests.passes.fixtures import load, read

FIXTURES = Path(__file__).parents[1] / "passes"
BOTH = sorted(
    path
    for name in registered()
    if label_of(make(name)[0]) != "exact"
    for path in (FIXTURES / name).glob("*.ir")
)


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


def _after(path: Path, *, exact: bool) -> tuple[str, list[Remark]]:
    """A fixture's graph after its pass, or after what `--exact` leaves of that."""
    fixture = read(path)
    graph: Graph = load(fixture.before)
    item: Any = fixture.item
    if exact and label_of(item) == "reassociating":
        return format_graph(graph), []
    remarks = (replace(item, exact_only=True) if exact else item).run(graph)
    return format_graph(graph), remarks


@pytest.mark.parametrize("path", BOTH, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_what_exact_leaves_out_is_what_is_listed(path: Path) -> None:
    (whole, remarks), (exact, others) = (_after(path, exact=only) for only in (False, True))
    listed = [remark for remark in remarks if remark.code == "reassociated"]
    assert bool(listed) == (whole != exact)
    assert not [remark for remark in others if remark.code == "reassociated"]
