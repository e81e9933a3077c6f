"""Keys that may be NaN where a fill hides them: held against what rows of zeros give."""

from __future__ import annotations

import pytest
import torch

from attngraph.analysis.attention.hidden_nans import nan_of_keys, values_of
from attngraph.analysis.attention.logits import Factor
from attngraph.analysis.attention.site import Site, understand
from attngraph.analysis.layout.axes import Operand, fresh_axes
from attngraph.ir import Graph, Value, interpret, parse

_GRAPH = """graph @main {
  input %q : f32[2, 3, 5, 4]
  input %k : f32[2, 3, 7, 4]
  input %v : f32[2, 3, 7, 6]
  input %m : bool[2, 1, 1, 7]
  input %bias : f32[2, 1, 1, 7]
  parameter %w : f32[6, 4]
  %low = aten.full() {size = [], fill_value = -inf, dtype = f32}
  %length = aten.linalg_vector_norm(%k) {dim = [-1], keepdim = true}
  %safe = aten.add.Scalar(%length) {other = 1e-6}
  %kn = aten.div.Tensor(%k, %length)
  %kt = aten.transpose.int(%kn) {dim0 = -2, dim1 = -1}
  %values = aten.alias(%v)
  %s = aten.matmul(%q, %kt)
  %masked = aten.where.self(%m, %s, %low)
  %p = aten.softmax.int(%masked) {dim = -1}
  %y = aten.matmul(%p, %values)
  return %y
}
"""
_MASKED = "aten.where.self(%m, %s, %low)"
# (what is changed; whether a hidden row of zeros leaves eager a number that an added mask doesn't)
CASES: dict[str, tuple[str, str, bool]] = {
    "keys by their own norm": (_MASKED, _MASKED, True),
    "an epsilon beside the norm": ("aten.div.Tensor(%k, %length)", "aten.div.Tensor(%k, %safe)",
                                   False),
    "values of the same tensor": ("%values = aten.alias(%v)", "%values = aten.linear(%kn, %w)",
                                  False),
    "a mask that is added": (_MASKED, "aten.add.Tensor(%s, %bias)", False),
    "no mask": (_MASKED, "aten.alias(%s)", False),
}  # fmt: skip


def _value(graph: Graph, name: str) -> Value:
    return next(v for node in graph for v in node.outputs if v.name == name)


def _site(graph: Graph) -> Site:
    anchor = _value(graph, "p").producer
    assert anchor is not None
    site = understand(anchor)
    assert isinstance(site, Site)
    return site


@pytest.mark.parametrize(("old", "new", "is_lost"), CASES.values(), ids=CASES)
def test_what_a_fill_takes_away_is_named(old: str, new: str, is_lost: bool) -> None:
    assert old in _GRAPH
    graph = parse(_GRAPH.replace(old, new))
    site = _site(graph)
    below = [site.value[-1].operand.value]
    found = nan_of_keys(site, _value(graph, "kn"), (), below)
    assert (found is not None) == is_lost
    if found is not None:
        assert found.output.name == "kn"
    # Eager is held against scores to which the mask is added.
    q, k, v = (torch.randn(2, 3, n, width) for n, width in ((5, 4), (7, 4), (7, 6)))
    seen = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    k[1, :, 5:], seen[1, ..., 5:] = 0, False
    bias = torch.zeros(2, 1, 1, 7).masked_fill(~seen, -torch.inf)
    (y,) = interpret(graph, [q, k, v, seen, bias], constants={"w": torch.randn(6, 4)})
    added = parse(_GRAPH.replace(old, new).replace(_MASKED, "aten.add.Tensor(%s, %bias)"))
    (other,) = interpret(added, [q, k, v, seen, bias], constants={"w": torch.randn(6, 4)})
    assert bool(other.isnan().any() and not y.isnan().any()) == is_lost


def test_an_operator_that_adds_its_mask_itself_loses_nothing() -> None:
    line = "aten.scaled_dot_product_attention(%q, %kn, %values, %m)"
    start = _GRAPH.index("  %s = ")
    graph = parse(f"{_GRAPH[:start]}  %p = {line}\n  return %p\n}}")
    assert nan_of_keys(_site(graph), _value(graph, "kn"), (), [_value(graph, "values")]) is None


def test_a_divisor_of_the_scores_that_may_be_zero_is_named() -> None:
    graph = parse(_GRAPH.replace("aten.div.Tensor(%k, %length)", "aten.alias(%k)").replace(
        "  %s = ", "  %unused = aten.add.Tensor(%length, %safe)\n  %s = "))  # fmt: skip
    site = _site(graph)
    length, safe = (
        Factor(Operand(value, fresh_axes(value.shape)), divides=True)
        for value in (_value(graph, "length"), _value(graph, "safe"))
    )
    key, below = _value(graph, "kn"), [_value(graph, "values")]
    found = nan_of_keys(site, key, [length], below)
    assert found is not None
    assert found.output.name == "length"
    assert nan_of_keys(site, key, [safe], below) is None
    assert nan_of_keys(site, key, [Factor(length.operand)], below) is None  # a factor of 0 is 0
    assert values_of([length, Factor(None, number=3)]) == [_value(graph, "length")]
