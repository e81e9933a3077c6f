"""How a rewrite is evaluated: how often, how precisely, and without multiplying large weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attngraph.ir import Builder, Graph, TensorType, parse
from attngraph.ir.ops import evaluate
from attngraph.passes import run
from attngraph.passes.rewriting import regions
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.evidence import TOLERANCE, Evidence, _close
from attngraph.passes.rewriting.outcomes import Different, Equal, Outcome
from attngraph.passes.rewriting.sparse_products import only_needed
from tests.passes.test_checked import GELU, SIBLINGS, graph_of


def test_equal_rewrites_are_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    compare = Evidence._compare

    def counted(*args: Any) -> Outcome:
        calls.append("")
        return compare(*args)

    monkeypatch.setattr(Evidence, "_compare", counted)
    lines = GELU.strip().splitlines()
    second = "\n".join(lines[1:-1])
    for name in "abcdy":
        second = second.replace(f"%{name} ", f"%{name}2 ").replace(f"%{name})", f"%{name}2)")
    second = second.replace("%x", "%x2")
    head = "\n".join(["", lines[0], "  input %x2 : f32[batch, seq, 8]", *lines[1:-1], second])
    graph = graph_of(f"{head}\n  return %y, %y2")
    run(graph, "fuse-activations")
    assert [node.op for node in graph] == ["aten.gelu", "aten.gelu"]
    assert len(calls) == 1


def test_what_a_rewrite_relied_on_is_looked_for() -> None:
    graph = graph_of("""
  input %x : f32[batch, seq, 8]
  %a = aten.abs(%x)
  %b = aten.mul.Scalar(%a) {other = 2.0}
  %y = aten.abs(%b)
  return %y""")
    (last,) = [node for node in graph if node.output.name == "y"]
    checked = Checked(graph, "some-pass")
    copied = Builder(graph, last)("aten.clone", last.inputs[0])
    assert checked.replace([(last.output, copied)])
    assert graph.outputs == (copied,)


@pytest.mark.parametrize("numbers", [1e-4, 1.0])
def test_a_relative_error_of_a_millionth_is_seen(numbers: float) -> None:
    graph = graph_of("\n  input %x : f32[batch, 8]\n  %y = aten.neg(%x)\n  return %y")
    (node,) = graph
    wrong = Builder(graph)("aten.mul.Scalar", graph.inputs[0], other=-1 - 3e-6 * numbers)
    outcome = Evidence(graph).compare([(node.output, wrong)], graph.inputs, kinds=["plain"])
    assert isinstance(outcome, Equal if numbers < 1 else Different)


def test_large_weights_are_never_multiplied_at_full_size(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = [0]
    widened = regions.widened

    def seen(value: Any) -> Any:
        result = widened(value)
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            largest[0] = max(largest[0], result.numel())
        return result

    monkeypatch.setattr(regions, "widened", seen)
    body = SIBLINGS.replace("f32[8, 8]", "f32[1024, 1024]").replace("f32[8]", "f32[1024]")
    graph = graph_of(body.replace("seq, 8]", "seq, 1024]"))
    run(graph, "merge-projections")
    assert "aten.split_with_sizes" in {node.op for node in graph}
    assert 0 < largest[0] < 1024 * 1024 / 8


@pytest.mark.parametrize(
    ("op", "shapes", "attrs"),
    [
        ("aten.linear", [(2, 300), (400, 300), (400,)], {}),
        ("aten.mm", [(2, 300), (300, 400)], {}),
        ("aten.matmul", [(2, 3, 300), (300, 400)], {}),
        ("aten.matmul", [(400, 300), (2, 300, 3)], {}),
        ("aten.addmm", [(400,), (2, 300), (300, 400)], {}),
        ("aten.einsum", [(2, 3, 10, 30), (10, 30, 400)], {"equation": "bshd,hde->bse"}),
    ],
)
def test_rows_that_meet_zeros_are_left_out(
    op: str, shapes: list[tuple[int, ...]], attrs: dict[str, Any]
) -> None:
    graph = Graph()
    torch.manual_seed(0)
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    values = [graph.add_constant(f"c{i}", tensor) for i, tensor in enumerate(tensors)]
    node = Builder(graph).node(op, *values, **attrs)
    small = min((t for t in tensors if t.ndim > 1), key=torch.Tensor.numel)
    axis = small.shape.index(300) if 300 in small.shape else -1
    small.index_fill_(axis, torch.arange(1, small.shape[axis]), 0)
    cut = only_needed(node, tensors)
    assert max(t.numel() for t in cut) < max(t.numel() for t in tensors) / 8
    (expected,), (found,) = (evaluate(node, given, {}) for given in (tensors, cut))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_without_weights_a_merge_is_not_evaluated() -> None:
    graph = parse(f"graph @main {{\n  dim batch = 3 in 1..\n  dim seq = 5 in 1..{SIBLINGS}\n}}\n")
    run(graph, "merge-projections")
    assert "aten.split_with_sizes" in {node.op for node in graph}


def test_regions_that_differ_in_a_large_mask_are_compared_each_by_itself() -> None:
    def compared(graph: Graph, evidence: Evidence, mask: torch.Tensor, name: str) -> Outcome:
        build = Builder(graph)
        x = graph.inputs[0]
        kept = build.constant(mask, name)
        zero = build("aten.full", size=[], fill_value=0.0)
        return evidence.compare([(x, build("aten.where.self", kept, x, zero))], [x, kept])

    graph = Graph("main")
    graph.add_input("x", TensorType(torch.float32, (8, 8)))
    evidence = Evidence(graph)
    everything = torch.ones(8, 8, dtype=torch.bool)
    assert isinstance(compared(graph, evidence, everything, "open"), Equal)
    assert not isinstance(compared(graph, evidence, everything.tril(), "causal"), Equal)


@pytest.mark.parametrize(
    ("scale", "shift"), [(1e4, ""), (1e18, "logsumexp")], ids=["overflow", "absorption"]
)
def test_inputs_beyond_float64_tell_nothing_of_a_softmax(scale: float, shift: str) -> None:
    """Of exponentials that overflow, and of a log of a sum that huge logits absorb."""
    sums = """
  %top = aten.logsumexp(%a) {dim = [1], keepdim = true}
  %less = aten.sub.Tensor(%a, %top)
  %y = aten.exp(%less)"""
    if not shift:
        sums = """
  %e = aten.exp(%a)
  %sum = aten.sum.dim_IntList(%e) {dim = [1], keepdim = true}
  %y = aten.div.Tensor(%e, %sum)"""
    graph = graph_of(f"""
  input %x : f32[batch, 8]
  %a = aten.mul.Scalar(%x) {{other = {scale}}}{sums}
  return %y""")
    build = Builder(graph)
    scores = next(iter(graph)).output
    right = build("aten.softmax.int", scores, dim=1)
    wrong = build("aten.softmax.int", build("aten.mul.Scalar", scores, other=0.5), dim=1)
    (old,) = graph.outputs
    evidence, kinds = Evidence(graph), ["plain", "tiny", "zero"]
    assert isinstance(evidence.compare([(old, right)], graph.inputs, kinds=kinds), Equal)
    if not shift:
        assert isinstance(evidence.compare([(old, wrong)], graph.inputs, kinds=kinds), Different)


def test_numbers_are_close_as_allclose_says_of_the_largest() -> None:
    random = torch.Generator().manual_seed(0)
    numbers = torch.tensor([0, 1, -1, 1e-9, 1e-4, 1e300, -1e308, torch.inf, -torch.inf, torch.nan])
    numbers = numbers.double()

    def drawn(count: int) -> torch.Tensor:
        return numbers[torch.randint(0, len(numbers), (count,), generator=random)]

    found = set()
    for turn in range(2000):
        a = drawn(turn % 5)
        b = a * (1 + 3e-7 * torch.randn(len(a), generator=random)) if turn % 3 else drawn(len(a))
        finite = b[b.isfinite()].abs()
        scale = max(float(finite.max()), 1e-3) if finite.numel() else 1.0
        close = torch.allclose(a, b, rtol=0, atol=TOLERANCE * scale, equal_nan=True)
        assert _close(a, b, TOLERANCE) == close
        found.add(close)
    assert found == {True, False}
