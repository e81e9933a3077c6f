"""A record of one runtime leaves those of others as they are."""

from __future__ import annotations

from tests.runtimes.page import Ran, renewed


def test_a_runtime_that_ran_replaces_its_own_rows_alone() -> None:
    before: Ran = {
        "optimum 0.1": {"BERT": ["classifier"], "T5": ["tokens"]},
        "openvino 2026.3": {"BERT": ["parity"], "ViT": ["parity"]},
    }
    ran: Ran = {"openvino 2026.4": {"BERT": ["parity", "int8"]}}
    assert renewed(before, ran) == {
        "optimum 0.1": before["optimum 0.1"],
        "openvino 2026.3": {"ViT": ["parity"]},
        "openvino 2026.4": {"BERT": ["int8", "parity"]},
    }


def test_a_check_that_passes_no_more_is_gone() -> None:
    before: Ran = {"openvino 2026.4": {"BERT": ["int8", "parity"]}}
    assert renewed(before, {"openvino 2026.4": {"BERT": ["parity"]}}) == {
        "openvino 2026.4": {"BERT": ["parity"]}
    }
    assert renewed(before, {}) == before
