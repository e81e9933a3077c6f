"""Stages are told to whoever asked last, in the block that asked, and in no other thread."""

import torch

import attngraph
from attngraph.stages import begins, telling


def test_the_stages_of_a_compile_are_told() -> None:
    told: list[str] = []
    module = torch.nn.Linear(4, 4)
    attngraph.optimize(module, (torch.randn(2, 4),), progress=told.append)
    assert [*dict.fromkeys(told)] == ["capture", "passes", "lower", "parity"]


def test_without_a_listener_of_its_own_a_block_keeps_that_around_it() -> None:
    outer: list[str] = []
    inner: list[str] = []
    begins("nobody")
    with telling(outer.append):
        with telling(None):
            begins("a")
        with telling(inner.append):
            begins("b")
        begins("c")
    begins("nobody")
    assert (outer, inner) == (["a", "c"], ["b"])
