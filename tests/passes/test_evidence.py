"""A fusion that is broken on purpose is caught by evaluation and taken back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attngraph.analysis.attention.site import Site
from attngraph.errors import IRError
from attngraph.ir import Graph, format_graph, interpret, parse, verify
from attngraph.passes import run
from attngraph.passes.attention import fuse_attention, masking

TEXT = """
graph @main {
  dim batch = 3 in 1..
  dim seq = 7 in 1..64
  input %q : f32[batch, 2, seq, 8]
  input %k : f32[batch, 2, seq, 8]
  input %v : f32[batch, 2, seq, 8]
  input %padding : bool[batch, seq]
  input %bias : f32[2, seq, seq]
  %kt = aten.permute(%k) {dims = [0, 1, 3, 2]} : f32[batch, 2, 8, seq]
  %scores = aten.matmul(%q, %kt) : f32[batch, 2, seq, seq]
  %scaled = aten.mul.Scalar(%scores) {other = 0.5} : f32[batch, 2, seq, seq]
  %biased = aten.add.Tensor(%scaled, %bias) : f32[batch, 2, seq, seq]
  %keys = aten.reshape(%padding) {shape = [batch, 1, 1, seq]} : bool[batch, 1, 1, seq]
  %fill = aten.full() {size = [], fill_value = FILL, dtype = f32} : f32[]
  %masked = aten.where.self(%keys, %fill, %biased) : f32[batch, 2, seq, seq]
  %weights = aten.softmax.int(%masked) {dim = -1} : f32[batch, 2, seq, seq]
  %context = aten.matmul(%weights, %v) : f32[batch, 2, seq, 8]
  return %context
}
"""


def _graph(fill: str) -> Graph:
    return parse(TEXT.replace("FILL", fill))


def _inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 5, 8) for _ in range(3))
    padding = torch.rand(2, 5) < 0.4
    padding[1] = True  # every key of this element is masked
    return [q, k, v, padding, torch.randn(2, 5, 5)]


def _breaks() -> dict[str, tuple[str, Callable[[Any], Any]]]:
    def without_steps(kind: type) -> Callable[[Any], Any]:
        def change(emit: Any) -> Any:
            def broken(graph: Graph, build: Any, evidence: Any, site: Site) -> Any:
                steps = tuple(step for step in site.steps if not isinstance(step, kind))
                return emit(graph, build, evidence, replace(site, steps=steps))

            return broken

        return change

    def changed(**fields: Any) -> Callable[[Any], Any]:
        def change(emit: Any) -> Any:
            def broken(graph: Graph, build: Any, evidence: Any, site: Site) -> Any:
                return emit(graph, build, evidence, replace(site, **fields))

            return broken

        return change

    return {
        "mask dropped": ("-inf", without_steps(fuse_attention.Mask)),
        "finite mask dropped": ("-3.4028234663852886e+38", without_steps(fuse_attention.Mask)),
        "bias dropped": ("-inf", without_steps(fuse_attention.Bias)),
        "scale doubled": ("-inf", changed(scale=1.0)),
        "causal invented": ("-inf", changed(causal=True)),
        "masked rows zeroed": ("-inf", changed(masked_rows="zero")),
        "softcap invented": ("-inf", changed(softcap=5.0)),
    }


@pytest.mark.parametrize("name", list(_breaks()))
def test_a_broken_fusion_is_taken_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fill, change = _breaks()[name]
    graph = _graph(fill)
    expected = interpret(graph, _inputs())
    monkeypatch.setattr(fuse_attention, "_emit", change(fuse_attention._emit))
    (result,) = run(graph, "fuse-attention")
    run(graph, "dce")
    verify(graph)
    (remark,) = result.remarks
    assert (remark.status, remark.code) == ("declined", "unequal")
    found = interpret(graph, _inputs())
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, expected, strict=True)
    )


def test_a_fusion_that_inference_rejects_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def rejects(*_: Any) -> None:
        raise IRError("aten.reshape is rejected by its evaluation")

    graph = _graph("-inf")
    before = format_graph(graph)
    monkeypatch.setattr(masking._Writer, "apply", rejects)
    (result,) = run(graph, "fuse-attention")
    verify(graph)
    assert format_graph(graph) == before
    (remark,) = result.remarks
    assert (remark.status, remark.code) == ("declined", "unequal")
    assert "aten.reshape is rejected" in remark.reason


@pytest.mark.parametrize("fill", ["-inf", "-3.4028234663852886e+38", "-10000.0"])
def test_the_right_fusion_stays(fill: str) -> None:
    graph = _graph(fill)
    (expected,) = interpret(graph, _inputs())
    (result,) = run(graph, "fuse-attention")
    codes = [remark.code for remark in result.remarks if remark.code != "reassociated"]
    assert codes == ["attention", *["weak-fill"] * (fill == "-10000.0")]
    (found,) = interpret(graph, _inputs())
    assert torch.allclose(found, expected, atol=1e-6, equal_nan=True)


def test_equal_regions_are_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from attngraph.passes.rewriting.evidence import Evidence

    calls = []
    compare = Evidence._compare
    monkeypatch.setattr(Evidence, "_compare", lambda *a: calls.append(1) or compare(*a))
    text = TEXT.replace("FILL", "-inf")
    head, _, body = text.partition("  %kt =")
    body = "  %kt =" + body.partition("  return")[0]
    second = body
    names = [
        "q",
        "kt",
        "scores",
        "scaled",
        "biased",
        "keys",
        "fill",
        "masked",
        "weights",
        "context",
    ]
    for name in names:
        second = second.replace(f"%{name} ", f"%{name}_2 ").replace(f"%{name})", f"%{name}_2)")
        second = second.replace(f"%{name},", f"%{name}_2,")
    head += "  input %q_2 : f32[batch, 2, seq, 8]\n"
    graph = parse(f"{head}{body}{second}  return %context, %context_2\n}}\n")
    (result,) = run(graph, "fuse-attention")
    assert [remark.status for remark in result.remarks] == ["fused", "fused"]
    assert len(calls) == 1
