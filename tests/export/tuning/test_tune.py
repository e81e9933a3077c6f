"""Tuning measures a site once, chooses by what it measured, and survives any cache file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from attngraph.export.kernels import Facts, Form
from attngraph.export.kernels.table import ATTENTION, BLOCKS, GROUPED, MASKED
from attngraph.export.lowering.lower import lower
from attngraph.export.target import Target
from attngraph.export.tuning import timing, tune
from attngraph.ir import DimInfo, Graph
from tests.export.lowered import graph_of
from tests.export.lowering.test_attention_forms import CAUSAL, check, site

CPU = Target("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "attngraph" / "kernels"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Facts]:
    """The sites measured; GroupQueryAttention wins below 64 queries, eight blocks above."""
    asked: list[Facts] = []

    def measure(
        facts: Facts,
        forms: Sequence[Form],
        target: Target,
        lengths: Sequence[int],
        seconds: float,
        *,
        threads: int | None = None,
    ) -> dict[str, dict[int, float]]:
        asked.append(facts)
        best = {length: BLOCKS[-1] if length >= 64 else GROUPED for length in lengths}
        return {
            form.name: {length: 1.0 if form == best[length] else 2.0 for length in lengths}
            for form in forms
        }

    monkeypatch.setattr(tune, "measure", measure)
    return asked


def two_sites() -> Graph:
    body = "  input %q : f32[batch, seq, 32]\n"
    for layer in range(3):
        query = f"%r{layer - 1}" if layer else "%q"
        causal = ", causal = true" if layer < 2 else ""
        body += f"  %r{layer} = attn.attention({query}, %q, %q)"
        body += f" {{heads = 4, kv_heads = 4, scale = 0.5{causal}}} : f32[batch, seq, 32]\n"
    return graph_of(f"{body}  return %r2")


def test_each_distinct_site_is_measured_once(measured: list[Facts], cache: Path) -> None:
    notes: list[str] = []
    first = tune.tuned(two_sites(), CPU, notes.append)
    assert len(measured) == 2
    assert len(list(cache.glob("*.json"))) == 2
    again = tune.tuned(two_sites(), CPU, notes.append)
    assert len(measured) == 2
    assert [*first.values()] == [*again.values()]
    assert notes == []
    choice, same, _ = first.values()
    assert choice == same
    assert choice.tuned
    assert (choice.form, choice.start, choice.below) == (BLOCKS[-1], 64, GROUPED)
    assert choice.runner_up is not None
    assert choice.why_not == "it took 2 ms at 64 queries, as measured, and this 1"


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"version": 1}', '{"version": 1, "site": "another"}', "\0"]
)
def test_a_bad_cache_file_is_measured_anew(
    measured: list[Facts], cache: Path, content: str
) -> None:
    graph, notes = site(attrs=CAUSAL), list[str]()
    expected = [*tune.tuned(graph, CPU, notes.append).values()]
    (path,) = cache.glob("*.json")
    path.write_text(content)
    assert [*tune.tuned(graph, CPU, notes.append).values()] == expected
    (said,) = notes
    assert str(path) in said
    assert len(measured) == 2
    tune.tuned(graph, CPU, notes.append)
    assert len(measured) == 2


@pytest.mark.parametrize("milliseconds", [{}, {"Attention": {}}, {"another": {"1": 1.0}}, {"a": 1}])
def test_times_of_unknown_forms_choose_nothing_else(cache: Path, milliseconds: Any) -> None:
    graph = site(attrs=CAUSAL, queries=4, keys=4)
    tune.tuned(graph, CPU, print, seconds=1e-4)
    (path,) = cache.glob("*.json")
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "milliseconds": milliseconds}))
    (choice,) = tune.tuned(graph, CPU, print, seconds=1e-4).values()
    assert choice.form.name


def test_a_cache_that_cannot_be_written_is_noted(
    measured: list[Facts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    notes: list[str] = []
    assert tune.tuned(site(attrs=CAUSAL), CPU, notes.append)
    assert any("can't be kept" in note for note in notes)


def test_a_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the XDG base directory specification says."""
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert tune.cache_folder().is_absolute()


@pytest.mark.machine
@pytest.mark.parametrize(
    ("operands", "attrs"),
    [
        ((), CAUSAL),
        (("m : bool[batch, 1, 1, seq]",), CAUSAL),
        (("b : f32[4, seq, seq]",), f"{CAUSAL}, softcap = 2.0"),
        ((), ""),
    ],
)
def test_what_is_measured_for_real_is_what_is_emitted(
    operands: tuple[str, ...], attrs: str
) -> None:
    graph = site(*operands, attrs=attrs)
    (node,) = graph
    choices = tune.tuned(graph, CPU, print, seconds=1e-4)
    assert choices[node].tuned

    check(graph, lower(graph, kernels=choices), (1, 9))


@pytest.mark.machine
def test_every_form_is_timed_at_every_length() -> None:
    graph = site(attrs=CAUSAL)
    (node,) = graph
    dims = {name: DimInfo(1, 64) for name in graph.dims}
    facts = tune.facts_of(node, dims)
    assert tune.lengths_of(facts) == [1, 16, 64]
    forms = [ATTENTION, MASKED, GROUPED]
    times = timing.measure(facts, forms, CPU, [1, 16], 1e-4)
    assert times.keys() == {form.name for form in forms}
    assert all(row.keys() == {1, 16} and min(row.values()) > 0 for row in times.values())
