"""What may be NaN where inputs are numbers: held against what rows of zeros make of it."""

from __future__ import annotations

import pytest
import torch

from attngraph.analysis.masks.nans import keeping_nan, may_be_nan, nan_makers
from attngraph.ir import interpret, parse

HEAD = """graph @main {
  input %x : f32[3, 4, 8]
  input %m : bool[3, 4]
  parameter %w : f32[8, 8]
"""
_NORM = "%n = aten.linalg_vector_norm(%x) {dim = [-1], keepdim = true}\n"
_SQUARES = "%p = aten.pow.Tensor_Scalar(%x) {exponent = 2.0}\n"
_SUM = f"{_SQUARES}%s = aten.sum.dim_IntList(%p) {{dim = [-1], keepdim = true}}\n"
_COUNT = "%c = aten.sum.dim_IntList(%m) {dim = [-1], keepdim = true}\n"
MADE = {
    "its own norm": f"{_NORM}%y = aten.div.Tensor(%x, %n)",
    "its own norm, laid out": f"{_NORM}%e = aten.expand(%n) {{size = [3, 4, 8]}}\n"
    "%y = aten.div.Tensor(%x, %e)",
    "the root of its squares": f"{_SUM}%r = aten.sqrt(%s)\n%y = aten.div.Tensor(%x, %r)",
    "the inverse root": f"{_SUM}%r = aten.rsqrt(%s)\n%y = aten.mul.Tensor(%x, %r)",
    "a negative power": f"{_SUM}%r = aten.pow.Tensor_Scalar(%s) {{exponent = -0.5}}\n"
    "%y = aten.mul.Tensor(%x, %r)",
    "the largest": "%a = aten.abs(%x)\n%l = aten.amax(%a) {dim = [-1], keepdim = true}\n"
    "%y = aten.div.Tensor(%x, %l)",
    "a count": f"{_COUNT}%u = aten.unsqueeze(%c) {{dim = 2}}\n"
    "%z = aten.mul.Scalar(%x) {other = 0.0}\n%y = aten.div.Tensor(%z, %u)",
    "a logarithm": "%a = aten.abs(%x)\n%l = aten.log(%a)\n%y = aten.mul.Tensor(%l, %x)",
    "rows without keys": "%f = aten.full() {size = [], fill_value = -inf, dtype = f32}\n"
    "%u = aten.unsqueeze(%m) {dim = 2}\n%a = aten.where.self(%u, %x, %f)\n"
    "%y = aten.softmax.int(%a) {dim = -1}",
}  # fmt: skip
SAFE = {
    "an epsilon beside the norm": f"{_NORM}%e = aten.add.Scalar(%n) {{other = 1e-06}}\n"
    "%y = aten.div.Tensor(%x, %e)",
    "an epsilon under the root": f"{_SUM}%e = aten.add.Scalar(%s) {{other = 1e-06}}\n"
    "%r = aten.rsqrt(%e)\n%y = aten.mul.Tensor(%x, %r)",
    "a norm that is clamped": f"{_NORM}%e = aten.clamp_min(%n) {{min = 1e-12}}\n"
    "%y = aten.div.Tensor(%x, %e)",
    "a positive power": f"{_SUM}%r = aten.pow.Tensor_Scalar(%s) {{exponent = 0.5}}\n"
    "%y = aten.mul.Tensor(%x, %r)",
    "a sum of exponentials": "%a = aten.exp(%x)\n%s = aten.sum.dim_IntList(%a) {dim = [-1], "
    "keepdim = true}\n%e = aten.add.Scalar(%s) {other = 1.0}\n%y = aten.div.Tensor(%x, %e)",
    "log1p of what isn't negative": "%a = aten.abs(%x)\n%y = aten.log1p(%a)",
    "NaN that is replaced": f"{_NORM}%d = aten.div.Tensor(%x, %n)\n%y = aten.nan_to_num(%d)",
    "a softmax of products": "%a = aten.linear(%x, %w)\n%y = aten.softmax.int(%a) {dim = -1}",
}  # fmt: skip


def _rows(lines: str) -> tuple[bool, bool]:
    """(what the analysis says, whether rows of zeros are NaN)."""
    graph = parse(f"{HEAD}{lines}\n  return %y\n}}")
    x, m = torch.randn(3, 4, 8), torch.ones(3, 4, dtype=torch.bool)
    x[1, 2:], m[1] = 0, False
    (y,) = interpret(graph, (x, m), constants={"w": torch.randn(8, 8)})
    assert isinstance(y, torch.Tensor)
    return may_be_nan(graph.outputs), bool(y.isnan().any())


@pytest.mark.parametrize("lines", MADE.values(), ids=MADE)
def test_what_rows_of_zeros_make_nan_is_found(lines: str) -> None:
    assert _rows(lines) == (True, True)


@pytest.mark.parametrize("lines", SAFE.values(), ids=SAFE)
def test_what_is_safe_is_left_alone(lines: str) -> None:
    assert _rows(lines) == (False, False)


def test_the_maker_is_named() -> None:
    graph = parse(f"{HEAD}{MADE['its own norm']}\n  %z = aten.linear(%y, %w)\n  return %z, %x\n}}")
    assert [node.op for node in nan_makers([graph.outputs[0]])] == ["aten.div.Tensor"]
    assert nan_makers([graph.outputs[1], None]) == set()


@pytest.mark.parametrize(
    ("lines", "keeps"),
    [
        ("%z = aten.linear(%y, %w)", True),
        ("%z = aten.relu(%y)", True),
        ("%z = aten.nan_to_num(%y)", False),
        ("%u = aten.unsqueeze(%m) {dim = 2}\n%z = aten.where.self(%u, %y, %x)", False),
    ],
)
def test_a_value_keeps_the_nan_of_another_unless_something_may_take_it_away(
    lines: str, keeps: bool
) -> None:
    graph = parse(f"{HEAD}{MADE['its own norm']}\n{lines}\n  return %y, %z\n}}")
    y, z = graph.outputs
    assert (y in keeping_nan([z])) == keeps
    assert bool(nan_makers([y], keeping_nan([z]))) != keeps
