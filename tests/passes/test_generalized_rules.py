"""A state that is read by another key than it is written by leaves its loop, or is said to stay."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim

from attngraph.frontend.capture import capture
from attngraph.ir import Graph, Remark, clone, interpret
from attngraph.passes import make
from tests.passes import generalized_rules as written
from tests.passes.linear_attentions import WIDTH

pytestmark = pytest.mark.wide

_PASSES = ["canonicalize", "cse", "dce", "split-loops", "raise-recurrence", "dce"]


def _compiled(kind: type[torch.nn.Module]) -> tuple[Graph, Graph, list[Remark]]:
    shapes = ({0: Dim("batch", min=1, max=64), 1: Dim("seq", min=1, max=512)},)
    before = capture(kind().eval(), (torch.randn(2, 7, WIDTH),), dynamic_shapes=shapes).graph
    after = clone(before)
    remarks = [remark for item in make(_PASSES) for remark in item.run(after)]
    return before, after, [each for each in remarks if each.code.startswith("recurrence")]


def _ops(graph: Graph) -> list[str]:
    return [node.op for node in graph if node.op in ("attn.scan", _OP, "attn.linear_attention")]


_OP = "attn.generalized_delta_rule"


@pytest.mark.parametrize("kind", [*written.BOUNDED, *written.UNBOUNDED])
def test_it_is_read(kind: type[torch.nn.Module]) -> None:
    before, after, (remark,) = _compiled(kind)
    assert _ops(after) == [_OP]
    assert remark.op == _OP
    lacking = written.UNBOUNDED.get(kind)
    over = "chunks of 16 tokens" if lacking is None else f"tokens: chunks ask for {lacking}"
    assert f"in a Scan over {over}." in remark.reason
    for length in (1, 2, 19):
        inputs = [torch.randn(3, length, WIDTH)]
        found, expected = (interpret(graph, inputs)[0] for graph in (after, before))
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kind", written.KEPT)
def test_what_is_nearly_one_stays(kind: type[torch.nn.Module]) -> None:
    _, after, (remark,) = _compiled(kind)
    assert _ops(after) == ["attn.scan"]
    assert remark.status == "declined"
    assert written.KEPT[kind] in remark.reason
