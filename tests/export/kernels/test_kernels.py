"""The kernel table's choice: provable facts only, and a reason for what was not chosen."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from attngraph.errors import ProviderError
from attngraph.export.kernels import Choice, Facts, check_version, choose
from attngraph.export.kernels.choice import Candidate, pick
from attngraph.export.kernels.crossovers import Split, split
from attngraph.export.kernels.facts import BIAS, BOOL, CAUSAL, SOFTCAP, WEIGHTS
from attngraph.export.kernels.needs import NEEDS
from attngraph.export.kernels.table import (
    ATTENTION,
    BLOCKS,
    FORMS,
    GROUPED,
    KERNELS,
    LEGAL,
    MASKED,
    MULTI_HEAD,
    PADDED,
    PRIMITIVE,
)
from attngraph.export.target import Target, parse_target
from bench import block_causal, machine

F16, F32, F64 = torch.float16, torch.float32, torch.float64
FACTS = Facts(
    dtype=F16,
    heads=12,
    groups=12,
    head_size=64,
    value_size=64,
    batch=(1, None),
    queries=(1, None),
    keys=(1, None),
    square=True,
    aligned_keys=None,
    features=frozenset(),
    positive_scale=True,
)


def chosen(target: str, *features: str, **changes: object) -> Choice:
    facts = replace(FACTS, features=frozenset(features), **changes)
    return choose(facts, parse_target(target), "1.31.1")


def test_every_need_of_the_table_is_a_known_question() -> None:
    assert {need for row in (*LEGAL, *KERNELS) for need in row.needs} <= NEEDS.keys()


@pytest.mark.parametrize("provider", ["cpu", "cuda"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_what_is_legal_has_a_kernel_of_last_resort(form: object, provider: str) -> None:
    for row in LEGAL:
        if form in row.forms and row.provider == provider:
            last = [k for k in KERNELS if form in k.forms and k.provider == provider][-1]
            unconditional = [
                k
                for k in KERNELS
                if form in k.forms and k.provider == provider and not k.needs and not k.sm
            ]
            assert last in unconditional
            assert row.dtypes <= frozenset().union(*(k.dtypes for k in unconditional))


@pytest.mark.parametrize(
    ("target", "features", "changes", "form", "kernel"),
    [
        ("cuda:sm80", (), {}, ATTENTION, "Flash"),
        ("cuda:sm80", (CAUSAL,), {}, ATTENTION, "Flash"),
        ("cuda:sm75", (CAUSAL,), {}, ATTENTION, "memory-efficient"),
        ("cuda", (), {}, ATTENTION, "Flash where SM ≥ 80, else memory-efficient"),
        ("cuda:sm80", (CAUSAL,), {"square": False}, ATTENTION, "memory-efficient"),
        (
            "cuda:sm80",
            (CAUSAL,),
            {"square": None},
            ATTENTION,
            "Flash where not causal, or S = T or a past, else memory-efficient",
        ),
        ("cuda:sm80", (BOOL,), {"aligned_keys": True}, ATTENTION, "memory-efficient"),
        ("cuda:sm80", (BIAS,), {"aligned_keys": False}, ATTENTION, "unfused"),
        (
            "cuda:sm90",
            (BOOL,),
            {},
            ATTENTION,
            "memory-efficient where no mask or bias, or T % 4 = 0, else unfused",
        ),
        ("cuda:sm80", (), {"head_size": 60, "value_size": 60}, PADDED, "Flash"),
        ("cuda:sm80", (), {"value_size": 32}, ATTENTION, "memory-efficient"),
        ("cuda:sm80", (), {"dtype": F32}, ATTENTION, "memory-efficient"),
        ("cuda:sm80", (), {"dtype": F32, "groups": 4}, ATTENTION, "unfused"),
        ("cuda:sm80", (WEIGHTS,), {}, PRIMITIVE, "separate kernels"),
        ("cuda:sm80", (), {"dtype": F64}, PRIMITIVE, "separate kernels"),
        ("cpu", (BOOL,), {"dtype": F32}, ATTENTION, "CPU Attention"),
        ("cpu", (WEIGHTS,), {"dtype": F32}, PRIMITIVE, "separate kernels"),
        ("cpu", (WEIGHTS,), {"dtype": F32, "keys": (64, 64)}, ATTENTION, "CPU Attention"),
        ("cpu", (), {"dtype": F64}, ATTENTION, "separate kernels"),
    ],
)
def test_the_choice(
    target: str, features: tuple[str, ...], changes: dict[str, object], form: object, kernel: str
) -> None:
    found = chosen(target, *features, **changes)
    assert (found.form, found.kernel) == (form, kernel)


def test_the_runner_up_says_why_not() -> None:
    found = chosen("cuda:sm80", CAUSAL)
    assert found.runner_up == GROUPED
    assert found.why_not
    padded = chosen("cuda:sm80", CAUSAL, BOOL, groups=4)
    assert padded.runner_up is not None
    assert padded.why_not
    half = chosen("cpu", CAUSAL, SOFTCAP)
    assert (half.runner_up, half.why_not) == (GROUPED, "it has no kernel for float16")
    masked = chosen("cpu", BOOL, dtype=F32)
    assert (masked.runner_up, masked.why_not) == (MULTI_HEAD, "it takes no bool mask")


def test_what_a_runner_up_would_need_is_a_sentence() -> None:
    found = chosen("cpu", WEIGHTS)
    assert found.form == PRIMITIVE
    assert found.why_not == "it runs only where T is static, or no weights are returned"


def test_equal_times_are_told_once() -> None:
    facts = replace(FACTS, queries=(64, 64))
    ranked = [Candidate(form, kernel="CPU", rank=1) for form in (ATTENTION, MULTI_HEAD)]
    times = {ATTENTION.name: {64: 0.1501}, MULTI_HEAD.name: {64: 0.1502}}
    found = pick(ranked, [], times, facts)
    assert found.why_not == "it is no faster: either took 0.15 ms at 64 queries, as measured"


@pytest.mark.parametrize("version", ["1.30.2", "1.33.0", "2.0.0", "unknown"])
def test_an_unknown_onnxruntime_is_an_error(version: str) -> None:
    with pytest.raises(ProviderError, match=r"no row for onnxruntime .* it knows 1\.31 or 1\.32\."):
        choose(FACTS, Target("cpu"), version)
    with pytest.raises(ProviderError, match=r'pip install "onnxruntime==1\.32\.\*"'):
        check_version(version)
    check_version("1.31.0.dev20260101")
    check_version("1.32.0")


def test_an_onnxruntime_that_no_cuda_was_met_with_compiles_for_the_cpu_alone() -> None:
    choose(FACTS, Target("cpu"), "1.32.0")
    with pytest.raises(
        ProviderError, match=r"onnxruntime 1\.32\.0 on CUDA: it knows 1\.31\. .*gpu=="
    ):
        choose(FACTS, parse_target("cuda:sm90"), "1.32.0")


TIMES = {
    "a": {1: 1.0, 16: 2.0, 64: 6.0, 256: 30.0},
    "b": {1: 4.0, 16: 4.0, 64: 5.0, 256: 15.0},
    "c": {1: 2.0, 16: 3.0, 64: 9.0, 256: 25.0},
}


@pytest.mark.parametrize(
    ("lengths", "found"),
    [
        ((256, 256), Split("b")),
        ((300, 300), Split("b")),
        ((1, 1), Split("a")),
        ((20, 20), Split("a")),
        ((1, 40), Split("a")),
        ((1, None), Split("b", 64, "a")),
        ((1, 70), Split("b", 64, "a")),
        ((70, None), Split("b")),
    ],
)
def test_lengths_decide(lengths: tuple[int, int | None], found: Split) -> None:
    assert split(TIMES, lengths) == found


def test_nothing_measured_decides_nothing() -> None:
    assert split({}, (1, None)) is None
    assert split({"a": {}}, (1, None)) is None


def test_the_branch_lies_where_the_whole_range_is_fastest() -> None:
    """Not only where the form that is fastest at the end is the fastest of all."""
    times = {
        "plain": {128: 1.0, 512: 6.0, 1024: 24.0, 2048: 100.0},
        "few blocks": {128: 1.5, 512: 4.3, 1024: 15.3, 2048: 65.0},
        "many blocks": {128: 1.6, 512: 5.1, 1024: 16.0, 2048: 58.0},
    }
    found = split(times, (1, 4096))
    assert found == Split("many blocks", 512, "plain")
    assert split(times, (1, 1024)) == Split("few blocks", 512, "plain")


def test_a_form_that_wins_by_less_than_the_margin_is_not_worth_a_branch() -> None:
    close = {"a": {1: 1.0, 256: 30.0}, "b": {1: 2.0, 256: 29.9}}
    assert split(close, (1, None)) == Split("a")


def test_blocks_are_never_empty() -> None:
    """Eight blocks of a dynamic length need 64 queries, whatever the times say."""
    times = {BLOCKS[-1].name: {1: 1.0}, ATTENTION.name: {1: 2.0}}
    ranked = [Candidate(form, kernel="CPU", rank=1) for form in (ATTENTION, MASKED, BLOCKS[-1])]
    facts = replace(FACTS, features=frozenset({CAUSAL}))
    found = pick(ranked, [], times, facts)
    assert (found.form, found.start, found.below) == (BLOCKS[-1], 64, ATTENTION)
    static = pick(ranked, [], times, replace(facts, queries=(5, 5)))
    assert (static.form, static.start, static.below) == (BLOCKS[-1], 0, None)


def test_the_table_chooses_by_what_the_bench_measured() -> None:
    families = json.loads(block_causal.MEASURED.read_text())["families"]
    for family, kept in families.items():
        results = json.loads((machine.RESULTS / f"block_causal-{family}.json").read_text())
        assert kept == block_causal.kept(results)


@pytest.mark.parametrize("features", [(CAUSAL,), (CAUSAL, BOOL), (CAUSAL, BIAS)])
def test_long_causal_prompts_are_cut_on_the_cpu(features: tuple[str, ...]) -> None:
    for queries in ((2048, 2048), (1, None)):
        found = chosen("cpu", *features, dtype=F32, queries=queries, keys=queries)
        assert found.form.blocks > 1
        assert "as measured" in found.why_not
        assert (found.below is None) == (queries[1] is not None)
    short = chosen("cpu", *features, dtype=F32, queries=(1, 32), keys=(1, 32))
    assert short.form.blocks < 2
    assert short.below is None
