"""A loop is divided where some of its states read no others, and what is behind these is read."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim

from attngraph.frontend.capture import capture
from attngraph.ir import Graph, Remark, clone, interpret, verify
from attngraph.passes import make
from attngraph.passes.loops.fission import Group, closed_groups, ways
from attngraph.passes.loops.loop_bodies import LoopBodies
from tests.passes import divided_loops as written
from tests.passes.divided_loops import WIDTH

_CLEAN = make(["canonicalize", "cse", "dce"])
_PASSES = [LoopBodies(tuple(_CLEAN)), *_CLEAN, *make(["split-loops", "raise-recurrence"]), *_CLEAN]
_OPS = {"attn.scan", "attn.linear_attention", "attn.recurrent"}


def _compiled(
    kind: type[torch.nn.Module], dtype: torch.dtype = torch.float32
) -> tuple[Graph, Graph, list[Remark]]:
    """The captured graph of any length, what the passes make of it, and what they say."""
    shapes = ({0: Dim("batch", min=1, max=64), 1: Dim("seq", min=1, max=512)},)
    module, x = kind().eval().to(dtype), torch.randn(2, 7, WIDTH, dtype=dtype)
    before = capture(module, (x,), dynamic_shapes=shapes).graph
    after = clone(before)
    remarks = [remark for item in _PASSES for remark in item.run(after)]
    verify(after)
    return before, after, remarks


def _ops(graph: Graph) -> list[str]:
    return [node.op for node in graph if node.op in _OPS]


def _assert_same(before: Graph, after: Graph, x: torch.Tensor) -> None:
    found, expected = (interpret(graph, [x])[0] for graph in (after, before))
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kind", written.DIVIDED)
def test_it_is_divided(kind: type[torch.nn.Module]) -> None:
    before, after, _ = _compiled(kind)
    assert sorted(_ops(after)) == sorted(written.DIVIDED[kind])
    for length in (1, 2, 19):
        _assert_same(before, after, torch.randn(3, length, WIDTH))


def test_the_loop_that_stays_has_a_running_maximum_alone() -> None:
    """Of which the rest of a step is made for all steps at once, and a note says why it stays."""
    _, after, remarks = _compiled(written.Matrix)
    (loop,) = [node for node in after if node.op == "attn.scan"]
    assert {node.op for node in loop.attrs["body"]} <= {
        "aten.add.Tensor",
        "aten.maximum",
        "aten.clone",
    }
    (kept,) = [remark for remark in remarks if remark.code == "recurrence-kept"]
    assert kept.status == "note"
    assert "no linear function of the state, for maximum" in kept.reason


@pytest.mark.parametrize("kind", written.KEPT)
def test_what_stays_a_loop_says_why(kind: type[torch.nn.Module]) -> None:
    before, after, remarks = _compiled(kind)
    assert _ops(after) == ["attn.scan"]
    reasons = [remark.reason for remark in remarks if remark.code == "recurrence-kept"]
    for reason, words in zip(reasons, written.KEPT[kind], strict=True):
        assert words in reason
    _assert_same(before, after, torch.randn(3, 5, WIDTH))


def test_states_that_no_kernel_takes_say_so_before_what_else_they_read() -> None:
    _, after, remarks = _compiled(written.Matrix, torch.float64)
    assert _ops(after) == ["attn.scan"]
    declined = [remark.reason for remark in remarks if remark.status == "declined"]
    assert len(declined) == 2
    assert all("no kernel for a state in float64" in reason for reason in declined)


def test_no_loop_hands_on_matrices() -> None:
    """All of them would be more numbers than the loop takes and gives."""
    _, after, _ = _compiled(written.OfSquashed)
    (loop,) = [node for node in after if node.op == "attn.scan"]
    stacked = loop.outputs[loop.attrs["carried"] :]
    assert stacked
    assert all(len(value.shape) < 5 or 1 in value.shape[3:] for value in stacked)


def test_a_matrix_is_no_normaliser() -> None:
    """All that steps add to one would be more numbers than the loop ever holds."""
    _, after, _ = _compiled(written.TwoSquares)
    assert sorted(_ops(after)) == ["attn.linear_attention", "attn.scan"]


def test_groups_that_read_no_others() -> None:
    needs = [Group(each) for each in ({0, 2}, {1, 2}, {2}, {3})]
    assert list(ways(needs)) == [Group({2})]
    chain = [Group(each) for each in ({0}, {0, 1}, {0, 1, 2})]
    assert list(ways(chain)) == [Group({0, 1}), Group({0})]
    circle = [Group(each) for each in ({0, 1}, {0, 1})]
    assert list(ways(circle)) == []


def test_what_single_states_need() -> None:
    needs = [Group(each) for each in ({0, 1}, {0, 1}, {0, 1, 2}, {3})]
    assert closed_groups(needs) == [Group({3}), Group({0, 1}), Group({0, 1, 2})]
    assert closed_groups([Group({0, 1}), Group({0, 1})]) == []
