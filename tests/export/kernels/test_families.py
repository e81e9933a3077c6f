"""Families of CPUs: read off flags, and the nearest one's times where there are none."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest

import attngraph
from attngraph.errors import UsageError
from attngraph.export import families
from attngraph.export.families import FAMILIES, family_of, nearest
from attngraph.export.kernels import choose, crossovers, facts_of
from attngraph.export.target import parse_target
from examples.ladder import build_rung
from tests.export.lowered import graph_of

SITE = """  input %q : f32[batch, seq, 64]
  %a = attn.attention(%q, %q, %q) {heads = 4, kv_heads = 4, scale = 0.5, causal = true}
  return %a"""


@pytest.mark.parametrize(
    ("flags", "family"),
    [
        ("fma avx2 avx512f avx512_vnni amx_tile amx_int8", "amx"),
        ("fma avx2 avx512f avx512_vnni", "avx512"),
        ("fma avx2 avx_vnni", "avx2"),
        ("", "avx2"),
    ],
)
def test_a_family_is_read_off_a_cpus_flags(flags: str, family: str) -> None:
    assert family_of(flags.split()) == family


def test_the_nearest_family_is_the_narrower_of_two() -> None:
    assert nearest("avx512", FAMILIES) == "avx512"
    assert nearest("avx512", ("amx",)) == "amx"
    assert nearest("avx512", ("amx", "avx2")) == "avx2"
    assert nearest("amx", ("avx2", "avx512")) == "avx512"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_may_name_another_machines_family(family: str) -> None:
    target = parse_target(f"cpu:{family}")
    assert (target.provider, target.family, str(target)) == ("cpu", family, f"cpu:{family}")
    with pytest.raises(UsageError, match="cpu: followed by one of amx, avx512, avx2"):
        parse_target(f"cpu:{family}x")


def test_each_family_goes_by_its_own_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here blocks win on one family and the plain operator on the other."""
    plain = dict.fromkeys((1, 128, 4096), 1.0)
    times = {
        name: {"causal": {"Attention": plain, "Attention, 8 query blocks": other}}
        for name, other in (
            ("amx", dict.fromkeys(plain, 3.0)),
            ("avx2", {1: 3.0, 128: 3.0, 4096: 0.1}),
        )
    }
    monkeypatch.setattr(crossovers, "_measured", lambda: times)
    graph = graph_of(SITE)
    (node,) = graph
    facts = facts_of(node, graph.dims)
    found = [crossovers.split(crossovers.measured(facts, name), facts.queries) for name in FAMILIES]
    assert [one is not None and one.start > 0 for one in found] == [False, True, True]
    monkeypatch.setattr(crossovers, "own_family", lambda: "amx")
    assert crossovers.timed_family(None) == "amx"
    assert crossovers.timed_family("avx512") == "avx2"


def test_the_table_says_on_which_family_it_was_measured() -> None:
    text = files("attngraph.export.kernels").joinpath("measured.json").read_text()
    known = json.loads(text)["families"]
    assert {*known} <= {*FAMILIES}
    assert families.own_family() in FAMILIES
    graph = graph_of(SITE)
    (node,) = graph
    assert choose(facts_of(node, graph.dims), parse_target("cpu:amx")).start
    module, args, shapes = build_rung("self")
    for family in FAMILIES:
        report = attngraph.optimize(
            module, args, dynamic_shapes=shapes, target=f"cpu:{family}", verify="off"
        ).report
        assert report.timed_on == nearest(family, known)
        told = [note for note in report.notes if "the nearest family of CPUs" in note]
        assert len(told) == (family not in known)
