"""Each fixture: the pass prints what it says, verifies, settles, keeps the graph's meaning."""

from __future__ import annotations

from pathlib import Path

import pytest

from attngraph.ir import format_graph, parse, verify
from attngraph.passes.canonical.normal_form import check_normal_form
from tests.passes import fixtures

BEFORE_IT = ("canonicalize", "loop-bodies", "split-complex")
"""The passes that see graphs as they are traced; `canonicalize` leaves the normal form."""
PATHS = sorted(Path(__file__).parent.glob("*/*.ir"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_fixture(path: Path, request: pytest.FixtureRequest) -> None:
    fixture = fixtures.read(path)
    original, graph = fixtures.load(fixture.before), fixtures.load(fixture.before)
    verify(graph)
    epoch = graph.epoch
    source = format_graph(graph, loc=fixture.with_loc)
    if path.parent.name not in BEFORE_IT:
        check_normal_form(graph)
    result = fixtures.result_text(graph, fixture.run(graph), loc=fixture.with_loc)
    if request.config.getoption("--update-fixtures"):
        fixtures.write(fixture, result)
        fixture = fixtures.read(path)

    verify(graph)
    if path.parent.name not in BEFORE_IT[1:]:
        check_normal_form(graph)
    if not fixtures.agree(result, fixture.expected):
        assert result == fixture.expected, fixture.claim
    if format_graph(graph, loc=fixture.with_loc) == source:
        assert graph.epoch == epoch, f"{path.parent.name} says it changed what it left alone"
    settled = format_graph(graph)
    fixture.run(graph)
    assert format_graph(graph) == settled, f"a second {path.parent.name} finds more to do"
    assert format_graph(parse(settled)) == settled
    if getattr(fixture.item, "bitwise", False):
        fixtures.assert_identical(fixture, original, graph)
    else:
        fixtures.assert_close_in_float64(fixture, original, graph)
