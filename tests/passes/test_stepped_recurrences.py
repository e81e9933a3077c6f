"""A loop's step becomes linear attention for all numbers, or a remark names what is in the way."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim

import attngraph
from attngraph.frontend.capture import capture
from attngraph.ir import Graph, Remark, clone, interpret
from attngraph.ir.dims import substitute
from attngraph.passes import make
from attngraph.passes.loops.raise_recurrence import RaiseRecurrence
from tests.passes import repeated_updates as repeated
from tests.passes import stepped_recurrences as written
from tests.passes.linear_attentions import WIDTH

pytestmark = pytest.mark.wide

_PASSES = ["canonicalize", "cse", "dce", "split-loops", "raise-recurrence", "dce"]


def _compiled(
    kind: type[torch.nn.Module], names: list[str] = _PASSES
) -> tuple[Graph, Graph, list[Remark]]:
    """The captured graph of any length, what the passes make of it, and what they say."""
    shapes = ({0: Dim("batch", min=1, max=64), 1: Dim("seq", min=1, max=512)},)
    before = capture(kind().eval(), (torch.randn(2, 7, WIDTH),), dynamic_shapes=shapes).graph
    after = clone(before)
    remarks = [remark for item in make(names) for remark in item.run(after)]
    return before, after, remarks


def _ops(graph: Graph) -> set[str]:
    return {node.op for node in graph} & {"attn.scan", "attn.linear_attention"}


@pytest.mark.parametrize("kind", [*written.READ, *repeated.READ])
def test_it_is_read(kind: type[torch.nn.Module]) -> None:
    before, after, remarks = _compiled(kind)
    assert _ops(after) == {"attn.linear_attention"}
    assert not [remark for remark in remarks if remark.code == "recurrence-kept"]
    for length in (1, 2, 19):
        inputs = [torch.randn(3, length, WIDTH)]
        found, expected = (interpret(graph, inputs)[0] for graph in (after, before))
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)
    if kind in repeated.READ:
        count = repeated.READ[kind]
        (node,) = [node for node in after if node.op == "attn.linear_attention"]
        tokens = substitute(node.outputs[0].shape[1], {"seq": 100})
        assert tokens in (100 * count, 100 * count + 1)
        (reason,) = [remark.reason for remark in remarks if remark.code == "recurrence"]
        assert f"of {count} updates of each token" in reason


@pytest.mark.parametrize("kind", [*written.FAINT, *repeated.FAINT])
def test_a_dependency_is_one_however_small_its_coefficient(kind: type[torch.nn.Module]) -> None:
    _, after, remarks = _compiled(kind)
    assert _ops(after) == {"attn.scan"}
    assert [remark.status for remark in remarks if remark.code == "recurrence-kept"] == ["declined"]


@pytest.mark.parametrize("kind", written.FAINT_IN_PARALLEL)
def test_nor_does_it_vanish_in_products_under_a_mask(kind: type[torch.nn.Module]) -> None:
    _, after, _ = _compiled(kind, ["canonicalize", "cse", "dce", "fuse-linear-attention", "dce"])
    assert not _ops(after)


@pytest.mark.parametrize("kind", [*written.KEPT, *repeated.KEPT])
def test_what_stays_a_loop_says_why(kind: type[torch.nn.Module]) -> None:
    _, after, remarks = _compiled(kind)
    assert _ops(after) == {"attn.scan"}
    (remark,) = [remark for remark in remarks if remark.code == "recurrence-kept"]
    status, words = (written.KEPT | repeated.KEPT)[kind]
    assert remark.status == status
    assert words in remark.reason
    assert remark.loc.file.endswith(".py")
    assert remark.blamed


def test_a_loop_that_holds_an_input_says_so() -> None:
    """Nothing makes the next state there, so the choice is blamed."""
    dims = {0: Dim("batch", max=8), 1: Dim("seq", max=32)}
    args = torch.randn(2, 5, 2, 3, 4), torch.arange(10).view(2, 5) % 3 == 0
    report = attngraph.optimize(written.Held().eval(), args, dynamic_shapes=(dims, dims)).report
    assert "it keeps earlier inputs" in str(report)
    assert "taken back" not in str(report)


def test_a_target_without_the_operator_says_so() -> None:
    """And a user that wants the model's own roundings is told of that."""
    shapes = ({1: Dim("seq", min=1, max=512)},)
    args = (torch.randn(2, 7, WIDTH),)
    graph = capture(written.OneDecay().eval(), args, dynamic_shapes=shapes).graph
    said = [
        [r.reason for r in item.run(clone(graph)) if r.code == "recurrence-kept"]
        for item in (RaiseRecurrence(recurrences=False), RaiseRecurrence(exact_only=True))
    ]
    assert [len(reasons) for reasons in said] == [1, 1]
    assert "the target has no operator" in said[0][0]
    assert "--exact" in said[1][0]
