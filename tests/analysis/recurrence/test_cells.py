"""A step is read as a cell by its equations; what switches where no drawn row comes is none."""

from __future__ import annotations

import pytest
import torch

from attngraph.analysis.recurrence.cells import Cell, read_cell, run_cell
from attngraph.analysis.recurrence.steps import Step, read_step
from attngraph.ir import parse

HIDDEN, WIDTH = 3, 2
HEAD = """graph @step {
  dim batch = 3 in 1..
  input %h : f32[batch, 3]
  input %c : f32[batch, 3]
  input %x : f32[batch, 2]
  input %w : f32[12, 2]
  input %u : f32[12, 3]
  input %b : f32[12]
  input %w1 : f32[3, 2]
  input %u1 : f32[3, 3]
  input %rows : f32[batch, 3]
  %wx = aten.linear(%x, %w, %b)
  %uh = aten.linear(%h, %u)
  %g = aten.add.Tensor(%wx, %uh)
  %g0, %g1, %g2, %g3 = aten.split_with_sizes(%g) {split_sizes = [3, 3, 3, 3], dim = 1}
  %wx0, %wx1, %wx2, %wx3 = aten.split_with_sizes(%wx) {split_sizes = [3, 3, 3, 3], dim = 1}
  %uh0, %uh1, %uh2, %uh3 = aten.split_with_sizes(%uh) {split_sizes = [3, 3, 3, 3], dim = 1}
  %zero = aten.full() {size = [], fill_value = 0.0, dtype = f32}
"""
_GRU = """%r = aten.sigmoid(%g0)
%z = aten.sigmoid(%g1)
%p = aten.mul.Tensor(%r, %uh2)
%q = aten.add.Tensor(%wx2, %p)
%n = aten.tanh(%q)
%d = aten.sub.Tensor(%h, %n)
%e = aten.mul.Tensor(%z, %d)
%y = aten.add.Tensor(%n, %e)"""
_LSTM = """%i = aten.sigmoid(%g0)
%f = aten.sigmoid(%g1)
%o = aten.sigmoid(%g2)
%n = aten.tanh(%g3)
%in = aten.mul.Tensor(%i, %n)
%fc = aten.mul.Tensor(%f, %c)
%m = aten.add.Tensor(%in, %fc)
%t = aten.tanh(%m)
%y = aten.mul.Tensor(%o, %t)"""
_EXPONENTIALS = """%v = aten.mul.Scalar(%g0) {other = 2.0}
%nv = aten.neg(%v)
%e = aten.exp(%v)
%ne = aten.exp(%nv)
%e1 = aten.add.Scalar(%e) {other = 1.0}
%e2 = aten.sub.Scalar(%e) {other = 1.0}
%n1 = aten.add.Scalar(%ne) {other = 1.0}
%n2 = aten.rsub.Scalar(%ne) {other = 1.0}
%below = aten.div.Tensor(%e2, %e1)
%above = aten.div.Tensor(%n2, %n1)"""
READ: dict[str, tuple[str, str]] = {
    "tanh": ("rnn_tanh", "%y = aten.tanh(%g0)"),
    "tanh in two pieces": (
        "rnn_tanh",
        f"{_EXPONENTIALS}\n%is = aten.ge.Scalar(%g0) {{other = 0.0}}\n"
        "%y = aten.where.self(%is, %above, %below)",
    ),
    "relu": ("rnn_relu", "%y = aten.relu(%g0)"),
    "relu as a clamp": ("rnn_relu", "%y = aten.clamp(%g0) {min = 0.0}"),
    "relu as a choice": (
        "rnn_relu",
        "%is = aten.gt.Scalar(%g0) {other = 0.0}\n%y = aten.where.self(%is, %g0, %zero)",
    ),
    "relu as a maximum": ("rnn_relu", "%y = aten.maximum(%g0, %zero)"),
    "relu by an absolute": (
        "rnn_relu",
        "%a = aten.abs(%g0)\n%s = aten.add.Tensor(%a, %g0)\n%y = aten.mul.Scalar(%s) {other = 0.5}",
    ),
    "gru": ("gru", _GRU),
    "lstm": ("lstm", _LSTM),
    "gates that are cut where they saturate": (
        "lstm",
        _LSTM.replace("(%g0)", "(%cut)").replace(
            "%i =", "%cut = aten.clamp(%g0) {min = -24.0, max = 24.0}\n%i ="
        ),
    ),
}


def _step(lines: str, *, batch: str = "batch", rows: int = 3) -> Step | None:
    results = "%y, %m" if "%m =" in lines else "%y"
    text = f"{HEAD}{lines}\nreturn {results}\n}}"
    if batch != "batch":
        text = text.replace("  dim batch = 3 in 1..\n", "").replace("[batch,", f"[{batch},")
    graph = parse(text)
    torch.manual_seed(0)
    shapes = {"w": (12, 2), "u": (12, 3), "b": (12,), "w1": (3, 2), "u1": (3, 3), "rows": (rows, 3)}
    numbers = {name: torch.randn(shape) for name, shape in shapes.items()}
    h, c, x = graph.inputs[:3]
    states = [h, c][: len(graph.outputs)]
    return read_step(states, [x], graph.outputs, lambda value: numbers.get(value.name))


def _cell(lines: str) -> Cell | None:
    step = _step(lines)
    assert step is not None
    return read_cell(step)


@pytest.mark.parametrize(("kind", "lines"), READ.values(), ids=READ)
def test_a_cell_is_read_with_its_weights(kind: str, lines: str) -> None:
    step = _step(lines)
    assert step is not None
    cell = read_cell(step)
    assert cell is not None
    assert cell.kind == kind
    x = torch.randn(7, WIDTH, dtype=torch.float64)
    states = [torch.randn(7, HIDDEN, dtype=torch.float64) for _ in step.states]
    expected = step.run(step.results, x, states)
    assert expected is not None
    found = run_cell(cell, x, [states[at] for at in cell.states])
    for at, after in zip(cell.states, found, strict=True):
        torch.testing.assert_close(after, expected[at], rtol=0, atol=1e-8)


def test_the_weights_are_those_of_the_step() -> None:
    step, cell = _step("%y = aten.tanh(%g0)"), _cell("%y = aten.tanh(%g0)")
    assert step is not None
    assert cell is not None
    w, u, b = (next(x for v, x in step.fixed.items() if v.name == name) for name in "wub")
    torch.testing.assert_close(cell.weight, w[:3], rtol=0, atol=1e-9)
    torch.testing.assert_close(cell.recurrence, u[:3], rtol=0, atol=1e-9)
    assert cell.bias is not None
    torch.testing.assert_close(cell.bias[:3] + cell.bias[3:], b[:3], rtol=0, atol=1e-9)


def test_the_memory_may_be_the_first_state() -> None:
    graph = parse(f"{HEAD}{_LSTM.replace('%h', '%s')}\nreturn %m, %y\n}}")
    h, c, x = graph.inputs[:3]
    numbers = {"w": torch.randn(12, 2), "u": torch.randn(12, 3), "b": torch.randn(12)}
    step = read_step([c, h], [x], graph.outputs, lambda value: numbers.get(value.name))
    assert step is not None
    cell = read_cell(step)
    assert cell is not None
    assert cell.states == (1, 0)


OTHERS: dict[str, str] = {
    "a residual": "%t = aten.tanh(%g0)\n%y = aten.add.Tensor(%t, %h)",
    "a part of the state beside it": "%t = aten.tanh(%g0)\n%s = aten.mul.Scalar(%h) "
    "{other = 1e-6}\n%y = aten.add.Tensor(%t, %s)",
    "a gate of the memory": _LSTM.replace("%i = aten.sigmoid(%g0)", "%gc = aten.add.Tensor(%g0, %c)"
    "\n%i = aten.sigmoid(%gc)"),
    "rows that are averaged": "%a = aten.mean.dim(%g0) {dim = [0], keepdim = true}\n"
    "%s = aten.add.Tensor(%g0, %a)\n%y = aten.tanh(%s)",
    "the row before": "%r = aten.roll(%g0) {shifts = [1], dims = [0]}\n%y = aten.tanh(%r)",
}  # fmt: skip
SWITCHING: dict[str, str] = {
    "a state that is cut far out": "%y = aten.clamp(%g0) {min = 0.0, max = 10000.0}",
    "an input that is cut far out": "%xc = aten.clamp(%x) {min = -1000.0, max = 1000.0}\n"
    "%a = aten.linear(%xc, %w1)\n%b1 = aten.linear(%h, %u1)\n%s = aten.add.Tensor(%a, %b1)\n"
    "%y = aten.relu(%s)",
    "a memory that is cut far out": _LSTM.replace("%m =", "%m0 =").replace(
        "%t =", "%m = aten.clamp(%m0) {min = -1000.0, max = 1000.0}\n%t ="
    ),
    "a limit that is the least of two": "%far = aten.full() {size = [], fill_value = 10000.0, "
    "dtype = f32}\n%r = aten.relu(%g0)\n%y = aten.minimum(%r, %far)",
    "large inputs that count as none": "%a = aten.abs(%x)\n%is = aten.gt.Scalar(%a) "
    "{other = 500.0}\n%xc = aten.where.self(%is, %zero, %x)\n%s = aten.linear(%xc, %w1)\n"
    "%y = aten.tanh(%s)",
    "small inputs that count as others": "%a = aten.abs(%x)\n%low = aten.lt.Scalar(%a) "
    "{other = 1e-9}\n%some = aten.gt.Scalar(%a) {other = 0.0}\n"
    "%is = aten.logical_and(%low, %some)\n%one = aten.full() {size = [], fill_value = 1.0, "
    "dtype = f32}\n%xc = aten.where.self(%is, %one, %x)\n%s = aten.linear(%xc, %w1)\n"
    "%y = aten.tanh(%s)",
    "one number that is told apart": "%is = aten.eq.Scalar(%x) {other = 3.0}\n"
    "%xc = aten.where.self(%is, %zero, %x)\n%s = aten.linear(%xc, %w1)\n%y = aten.tanh(%s)",
    "NaN that counts as none": "%xc = aten.nan_to_num(%x)\n%s = aten.linear(%xc, %w1)\n"
    "%y = aten.tanh(%s)",
    "NaN that is looked for": "%is = aten.isnan(%x)\n%xc = aten.where.self(%is, %zero, %x)\n"
    "%s = aten.linear(%xc, %w1)\n%y = aten.tanh(%s)",
    "NaN that isn't itself": "%is = aten.eq.Tensor(%x, %x)\n"
    "%xc = aten.where.self(%is, %x, %zero)\n%s = aten.linear(%xc, %w1)\n%y = aten.tanh(%s)",
    "halves, which end at 65504": "%r = aten.relu(%g0)\n%s = aten._to_copy(%r) {dtype = f16}\n"
    "%y = aten._to_copy(%s) {dtype = f32}",
    "places that are rounded": "%r = aten.mul.Scalar(%g0) {other = 1e-9}\n%s = aten.round(%r)\n"
    "%t = aten.add.Tensor(%g0, %s)\n%y = aten.relu(%t)",
}


@pytest.mark.parametrize("lines", OTHERS.values(), ids=OTHERS)
def test_what_is_another_function_is_no_cell(lines: str) -> None:
    assert _cell(lines) is None


@pytest.mark.parametrize("lines", SWITCHING.values(), ids=SWITCHING)
def test_what_switches_where_no_row_comes_is_no_cell(lines: str) -> None:
    assert _cell(lines) is None


@pytest.mark.parametrize("rows", [1, 3])
def test_a_number_for_each_row_is_no_bias(rows: int) -> None:
    """Of a static batch; of one row it is the bias."""
    step = _step("%s = aten.add.Tensor(%g0, %rows)\n%y = aten.tanh(%s)", batch=str(rows), rows=rows)
    assert step is not None
    assert (read_cell(step) is not None) == (rows == 1)
