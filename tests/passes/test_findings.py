"""Remarks are for people: what later stages compute with is in a pass's findings."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from attngraph.checks.padded import packed_tokens
from attngraph.ir import Loc, Remark
from attngraph.passes import PassResult, run
from attngraph.passes.rewriting.findings import Findings
from attngraph.reports.report import assumptions_of, sites_of
from tests.passes import fixtures

FOLDER = Path(__file__).parent


def _run(name: str) -> list[PassResult]:
    fixture = fixtures.read(FOLDER / f"{name}.ir")
    return run(fixtures.load(fixture.before), [fixture.item])


def test_a_remark_holds_words_and_places_alone() -> None:
    values = [getattr(Remark("note", "mask", "why"), field.name) for field in fields(Remark)]
    assert all(isinstance(value, str | Loc) for value in values)


def test_which_rows_are_packed_is_known_without_remarks() -> None:
    results = _run("pack-tokens/encoder-layer")
    (packed,) = packed_tokens([replace(result, remarks=[]) for result in results])
    assert packed.outputs
    assert packed.valid.outputs


def test_a_merged_attention_is_found_whatever_is_said_of_it() -> None:
    (result,) = _run("merge-heads/concatenated")
    fused = [Remark("fused", "attention", "1 head", node=name) for name in result.findings.became]
    assert len(fused) > 1
    (told,) = {site.merged for site in sites_of(_with(fused, result), {})}
    assert told == result.remarks[0].reason
    unsaid = replace(result, remarks=[replace(said, reason="") for said in result.remarks])
    assert {site.merged for site in sites_of(_with(fused, unsaid), {})} == {""}


def _with(fused: list[Remark], result: PassResult) -> list[PassResult]:
    return [PassResult("fuse-attention", 0.0, 0, 0, True, fused), result]


def test_a_name_that_is_used_again_ends_the_search() -> None:
    fused = PassResult("f", 0, 0, 0, True, [Remark("fused", "attention", "1 head", node="a")])
    there = PassResult("m", 0, 0, 0, True, findings=Findings(became={"a": "b"}))
    back = PassResult("n", 0, 0, 0, True, findings=Findings(became={"b": "a"}))
    back.remarks.append(Remark("note", "merged", "2 are one.", node="a"))
    assert [site.merged for site in sites_of([fused, there, back], {})] == ["2 are one."]


def test_assumptions_are_counted_from_findings() -> None:
    result = PassResult("p", 0.0, 0, 0, False, findings=Findings(assumed=["some-word"] * 2))
    assert assumptions_of([result], ["some-word", "other"]) == [
        "Assumed some-word, without proof, at 2 attentions.",
        "No rewrite relies on the assumption other.",
    ]


def test_what_is_found_in_a_loop_is_named_within_it() -> None:
    outer, inner = Findings(became={"a": "b"}), Findings(became={"a": "c"}, assumed=["w"])
    inner.tally.by_proof = 2
    outer.add(inner, "scan")
    assert outer.became == {"a": "b", "scan/a": "scan/c"}
    assert (outer.assumed, outer.tally.by_proof) == (["w"], 2)
