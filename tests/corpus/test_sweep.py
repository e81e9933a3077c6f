"""The corpus keeps one record per model, and its page counts what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from attngraph.ir import parse
from attngraph.reports.report import Site
from tests.corpus import sweep
from tests.corpus.page import write_page
from tests.corpus.trial import Record, _kinds, attempt

RIGHT: Record = {
    "model": "bert",
    "attention": "eager",
    "outcome": "right",
    "stage": "parity",
    "fused": 2,
    "declined": {},
    "parity": {"error": 1e-7, "budget": 4e-7},
    "nodes": {"before": 9, "after": 5},
    "timings": {"capture": 1.0, "passes": 0.1, "lower": 0.1, "parity": 0.2},
    "commit": "abc",
}
DECLINED = {**RIGHT, "model": "flint", "fused": 1, "declined": {"softmax-axis": 1}}
WRONG = {**RIGHT, "model": "opt", "outcome": "wrong", "error": "a | b", "parity": None}
FAILED = {**RIGHT, "model": "olmo", "outcome": "failed", "stage": "lower", "error": "no"}
ABSENT = {"model": "git", "attention": "sdpa", "outcome": "absent", "stage": "build", "error": ""}


def page(tmp_path: Path, *records: Record) -> str:
    path = tmp_path / "docs" / "coverage.md"
    write_page({"environment": {"torch": "2.13"}, "records": list(records)}, path)
    return path.read_text("utf-8")


def test_the_page_counts_what_was_exported_ran_and_is_right(tmp_path: Path) -> None:
    text = page(tmp_path, RIGHT, DECLINED, WRONG, FAILED, ABSENT)
    assert "| eager | 4 | 3 | 3 | 2 | 1 (25%) |" in text
    assert "| sdpa | 0 | 0 | 0 | 0 | 0 |" in text
    assert "| `softmax-axis` | 1 | 1 |" in text
    assert "| opt eager | parity | a \\| b |" in text
    assert "Without sdpa in transformers: git." in text


def test_the_page_counts_recurrences_convolutions_and_mixtures(tmp_path: Path) -> None:
    read = {**RIGHT, "model": "lfm2", "kinds": {"recurrences": 2, "short convolutions": 1}}
    kept = {**RIGHT, "model": "olmoe", "kinds": {"mixtures left": 2, "loops left": 3}}
    text = page(tmp_path, read, kept, {**RIGHT, "kinds": {}})
    assert "Counted in 3 of 3 rows" in text
    assert "| recurrences | 2 | 3 loops |" in text
    assert "| mixtures of experts | 0 | 2 mixtures |" in text
    assert "| lfm2 eager | 2 |  | 1 |  |  |  |" in text
    assert "operator | left" not in page(tmp_path, RIGHT)


def test_a_row_of_one_attention_is_absent_with_another() -> None:
    record = attempt("bert attention=sdpa", "eager")
    assert (record["outcome"], record["stage"]) == ("absent", "build")
    assert attempt("bert attention=sdpa", "sdpa")["outcome"] == "right"


def test_a_compile_s_other_sites_are_counted() -> None:
    graph = parse(
        """graph @main {
      dim s = 3 in 1..
      input %x : f32[2, 4, s]
      input %y : f32[2, 4, 7]
      parameter %w : f32[4, 1, 2]
      %a, %b = attn.causal_conv(%x, %w) {activation = "silu"}
      %c = aten.conv1d(%y, %w) {groups = 4}
      return %a, %c
    }""".replace("parameter", "input")
    )
    sites = [Site("named", "", code, "", "", "") for code in ("experts-kept", "experts-kept")]
    sites.append(Site("fused", "attn.linear_attention", "recurrence", "", "", ""))
    assert _kinds(graph, sites) == {
        "recurrences": 1,
        "short convolutions": 1,
        "convolutions by channel left": 1,
        "mixtures left": 2,
    }


def test_rows_whose_passes_take_long_are_listed_the_slowest_first(tmp_path: Path) -> None:
    slow = {**RIGHT, "model": "slow", "timings": {**RIGHT["timings"], "passes": 1.6}}
    slower = {**RIGHT, "model": "slower", "timings": {**RIGHT["timings"], "passes": 3.0}}
    text = page(tmp_path, RIGHT, slow, slower)
    assert "The passes take more than 1.5 × capture in 2 of 3 rows." in text
    listed = text[text.index("more than 1.5 ×") :]
    assert listed.index("| slower eager | 1.0 | 3.0 | 3.0 |") < listed.index("| slow eager |")
    assert "in 0 of 1 rows" in page(tmp_path, RIGHT)


def test_a_rewrite_that_was_taken_back_fails_the_sweep() -> None:
    told = {**RIGHT, "unequal": ["fuse-attention: it is not equal"]}
    assert sweep.defects([told, WRONG], ["bert", "opt"]) == [
        "bert eager: fuse-attention: it is not equal"
    ]
    assert sweep.defects([told], ["opt"]) == []


def test_a_record_takes_the_place_of_its_models_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "RESULTS", tmp_path / "results" / "corpus.json")
    for record in (WRONG, RIGHT, {**WRONG, **RIGHT, "model": "opt"}):
        sweep.store(record)
    stored = sweep.read_results()["records"]
    assert [(row["model"], row["outcome"]) for row in stored] == [
        ("bert", "right"),
        ("opt", "right"),
    ]
    assert sweep.read_results()["environment"]["torch"]
