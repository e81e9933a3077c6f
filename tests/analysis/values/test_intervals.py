"""Intervals hold every number that an element may be, whatever the inputs are."""

from __future__ import annotations

import math

import pytest
import torch

from attngraph.analysis.values.intervals import EVERYTHING, Interval, Intervals
from attngraph.ir import Graph, Value, interpret, parse

HEAD = """graph @main {
  input %x : f32[3, 4, 8]
  input %z : f32[3, 4, 8]
  input %m : bool[3, 4, 1]
  input %i : i64[3]
  parameter %w : f32[5, 8]
  parameter %b : f32[5]
  parameter %g : f32[8]
  parameter %c : f32[3, 1, 8]
  %t = aten.tanh(%x)
  %s = aten.sigmoid(%z)
  %n = aten.layer_norm(%x, %g) {normalized_shape = [8]}
  %e = aten.exp(%x)
  %of_t = aten.exp(%t)
  %low = aten.full() {size = [], fill_value = -1e4, dtype = f32}
"""
BOUNDED: dict[str, Interval] = {
    "aten.mul.Scalar(%t) {other = -3.0}": (-3, 3),
    "aten.neg(%s)": (-1, 0),
    "aten.add.Tensor(%t, %s)": (-1, 2),
    "aten.sub.Tensor(%t, %s)": (-2, 1),
    "aten.rsub.Scalar(%s) {other = 1.0}": (0, 1),
    "aten.add.Scalar(%t) {other = 2.5}": (1.5, 3.5),
    "aten.add.Scalar(%t) {other = 2.5, alpha = -2}": (-6, -4),
    "aten.sub.Scalar(%t) {other = 2.5, alpha = 2}": (-6, -4),
    "aten.mul.Tensor(%t, %s)": (-1, 1),
    "aten.relu(%t)": (0, 1),
    "aten.mean.dim(%t) {dim = [1]}": (-1, 1),
    "aten.amax(%s) {dim = [1]}": (0, 1),
    "aten.maximum(%t, %s)": (0, 1),
    "aten.minimum(%t, %s)": (-1, 1),
    "aten.where.self(%m, %t, %low)": (-1e4, 1),
    "aten.where.self(%m, %t, %s)": (-1, 1),
    "aten.cat(%t, %s) {dim = -1}": (-1, 1),
    "aten.triu(%s)": (0, 1),
    "aten.constant_pad_nd(%s) {pad = [1, 2]}": (0, 1),
    "aten.constant_pad_nd(%s) {pad = [1, 2], value = -2.0}": (-2, 1),
    "aten.softmax.int(%x) {dim = -1}": (0, 1),
    "aten.exp(%t)": (math.exp(-1), math.e),
    "aten.exp(%x)": (0, math.inf),
    "aten.log(%of_t)": (-1, 1),
    "aten.log_sigmoid(%x)": (-math.inf, 0),
    "aten.pow.Tensor_Scalar(%s) {exponent = 0.0625}": (0, math.inf),
    "aten.pow.Tensor_Tensor(%s, %x)": (0, math.inf),
    "aten.pow.Scalar(%x) {self = 0.9}": (0, math.inf),
    "aten.softplus(%x) {beta = 2.0}": (0, math.inf),
    "aten.cumprod(%s) {dim = 1}": (0, math.inf),
    "aten.mul.Tensor(%e, %s)": (0, math.inf),
    "aten.mul.Tensor(%e, %e)": (0, math.inf),
    "aten.permute(%t) {dims = [0, 2, 1]}": (-1, 1),
    "aten.index_select(%c, 0, %i)": (-2, 2),
    "aten._to_copy(%m) {dtype = f32}": (0, 1),
    "aten.add.Tensor(%c, %c)": (-4, 4),
}
PROVED = [
    "aten.layer_norm(%x, %g) {normalized_shape = [8]}",
    "aten.linear(%n, %w, %b)",
    "aten.linear(%t, %w)",
    "aten.log(%s)",
]
WITHOUT = [
    "aten.mul.Scalar(%x) {other = 2.0}",
    "aten.linear(%x, %w)",
    "aten.add.Tensor(%t, %s) {alpha = 2}",
    "aten.reciprocal(%t)",
    "aten.pow.Tensor_Scalar(%t) {exponent = 3}",
    "aten.pow.Scalar(%x) {self = -0.9}",
    "aten.softplus(%x) {beta = -1.0}",
    "aten.cumprod(%t) {dim = 1}",
    "aten.mul.Tensor(%e, %t)",
]


def _made(line: str) -> tuple[Graph, Value]:
    draw = torch.Generator().manual_seed(4)
    weights = {
        "w": torch.randn(5, 8, generator=draw),
        "b": torch.randn(5, generator=draw),
        "g": torch.randn(8, generator=draw),
        "c": torch.linspace(-2, 2, 24).reshape(3, 1, 8),
    }
    line = line.replace("(%c, 0, %i)", "(%c, %i) {dim = 0}")
    graph = parse(f"{HEAD}  %y = {line}\n  return %y\n}}", weights)
    return graph, graph.outputs[0]


def _lies_in(graph: Graph, found: Interval) -> None:
    for seed, size in enumerate((1e-3, 1.0, 1e6)):
        draw = torch.Generator().manual_seed(seed)
        x, z = (torch.randn(3, 4, 8, generator=draw) * size for _ in range(2))
        (y,) = interpret(graph, [x, z, x[..., :1] > 0, torch.tensor([0, 2, 1])])
        numbers = y.double()[~y.isnan()]
        slack = 1e-5 * max(1.0, *(abs(end) for end in found if math.isfinite(end)))
        assert found[0] - slack <= float(numbers.min())
        assert float(numbers.max()) <= found[1] + slack


@pytest.mark.parametrize("line", BOUNDED)
def test_an_interval_is_as_narrow_as_its_operands_say(line: str) -> None:
    graph, y = _made(line)
    found = Intervals().of(y)
    assert found == pytest.approx(BOUNDED[line])
    _lies_in(graph, found)


@pytest.mark.parametrize("line", PROVED)
def test_weights_and_norms_bound_what_inputs_do_not(line: str) -> None:
    graph, y = _made(line)
    found = Intervals(weights=True).of(y)
    assert found != EVERYTHING
    _lies_in(graph, found)


@pytest.mark.parametrize("line", WITHOUT)
def test_nothing_is_claimed_of_anything_else(line: str) -> None:
    _, y = _made(line)
    assert Intervals().of(y) == EVERYTHING
    assert Intervals().largest(y) == math.inf


def test_weights_are_read_where_that_is_asked() -> None:
    _, y = _made("aten.linear(%t, %w)")
    assert Intervals().of(y) == EVERYTHING
    assert Intervals(weights=True).largest(y) < math.inf


@pytest.mark.parametrize(
    ("dtype", "expected"), [("f16", (-math.inf, 1)), ("i8", (-128, 127)), ("i64", (-100000, 1))]
)
def test_a_dtype_holds_what_it_can(dtype: str, expected: Interval) -> None:
    text = HEAD.replace("-1e4", "-1e5")
    graph = parse(
        f"{text}  %f = aten.where.self(%m, %t, %low)\n"
        f"  %y = aten._to_copy(%f) {{dtype = {dtype}}}\n  return %y\n}}"
    )
    assert Intervals().of(graph.outputs[0]) == expected


def test_a_cast_to_integers_cuts_towards_zero() -> None:
    """What lies in [0.5, 1.5] becomes 0 or 1."""
    graph = parse(
        f"{HEAD}  %f = aten.add.Scalar(%s) {{other = 0.5}}\n"
        "  %y = aten._to_copy(%f) {dtype = i64}\n  return %y\n}"
    )
    assert Intervals().of(graph.outputs[0]) == (0, 1)


def test_lengths_of_rows_are_bounded() -> None:
    graph, y = _made("aten.layer_norm(%x) {normalized_shape = [8]}")
    assert Intervals().length(y) == pytest.approx(math.sqrt(8))
    (found,) = interpret(
        graph, [torch.randn(3, 4, 8), torch.zeros(3, 4, 8), torch.ones(3, 4, 1).bool(),
                torch.zeros(3).long()],
    )  # fmt: skip
    assert float(found.norm(dim=-1).max()) <= math.sqrt(8) + 1e-4


def test_what_a_step_of_a_loop_gives_is_bounded_whatever_its_state_is() -> None:
    step = (
        "graph @step {\\n  input %h : f32[2]\\n  input %t : f32[2]\\n  input %g : f32[2]\\n"
        "  %new = aten.add.Tensor(%h, %t)\\n  %a = aten.sigmoid(%new)\\n"
        "  %y = aten.mul.Tensor(%a, %g)\\n  return %new, %y, %new, %t\\n}\\n"
    )
    graph = parse(
        "graph @main {\n  input %h : f32[2]\n  input %x : f32[5, 2]\n  input %z : f32[2]\n"
        "  %t = aten.tanh(%x)\n  %g = aten.tanh(%z)\n"
        f'  %last, %y, %hs, %ts = attn.scan(%h, %t, %g) {{body = "{step}", carried = 1, '
        "scanned = 1}\n  return %last, %y, %hs, %ts\n}"
    )
    found = [Intervals().of(value) for value in graph.outputs]
    assert found == [EVERYTHING, (-1.0, 1.0), EVERYTHING, (-1.0, 1.0)]
