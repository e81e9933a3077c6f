"""Each move says which elements of its source a layout op's results are: held against torch."""

from __future__ import annotations

import pytest
import torch

from attngraph.analysis.layout.moves import (
    Broadcast,
    Copied,
    Cut,
    Interleaved,
    Permuted,
    Regrouped,
    Repeated,
    Reversed,
    Rolled,
    counted_start,
    move_of,
)
from attngraph.ir import Value, interpret, parse
from attngraph.ir.dims import substitute
from attngraph.ir.traits import LAYOUT, ROLL

HEAD = "graph @main {\n  dim n = 5 in 1..\n  input %x : f32[n, 4, 6]\n"
SIZES = {"n": 5}
LINES = {
    "clone": "%y = aten.clone(%x)",
    "reshape": "%y = aten.reshape(%x) {shape = [n, 2, 12]}",
    "unsqueeze": "%y = aten.unsqueeze(%x) {dim = -1}",
    "flatten": "%y = aten.flatten.using_ints(%x) {start_dim = 1}",
    "expand": "%u = aten.unsqueeze(%x) {dim = 1}\n%y = aten.expand(%u) {size = [n, 3, 4, 6]}",
    "expand in front": "%y = aten.expand(%x) {size = [2, n, 4, 6]}",
    "permute": "%y = aten.permute(%x) {dims = [2, 0, -2]}",
    "transpose": "%y = aten.transpose.int(%x) {dim0 = -1, dim1 = 0}",
    "mT": "%y = aten.mT(%x)",
    "numpy_T": "%y = aten.numpy_T(%x)",
    "swapaxes": "%y = aten.swapaxes(%x) {axis0 = 0, axis1 = -1}",
    "movedim": "%y = aten.movedim.int(%x) {source = 0, destination = -1}",
    "movedim of two": "%y = aten.movedim.intlist(%x) {source = [2, 0], destination = [0, 1]}",
    "select": "%y = aten.select.int(%x) {dim = 1, index = 2}",
    "select from the end": "%y = aten.select.int(%x) {dim = -1, index = -2}",
    "slice": "%y = aten.slice.Tensor(%x) {dim = 2, start = 1, end = 5}",
    "slice by steps": "%y = aten.slice.Tensor(%x) {dim = 2, start = 1, end = 6, step = 2}",
    "slice from the end": "%y = aten.slice.Tensor(%x) {dim = 1, start = -3, end = 4}",
    "slice before the front": "%y = aten.slice.Tensor(%x) {dim = 1, start = -9, end = 3}",
    "narrow": "%y = aten.narrow(%x) {dim = 2, start = 2, length = 3}",
    "second of a split": "%a, %y = aten.split_with_sizes(%x) {split_sizes = [2, 4], dim = -1}",
    "third of chunks": "%a, %b, %y = aten.chunk(%x) {chunks = 3, dim = 2}",
    "second of unbind": "%a, %y, %b, %c = aten.unbind.int(%x) {dim = 1}",
    "repeat": "%y = aten.repeat(%x) {repeats = [2, 1, 1, 3]}",
    "tile": "%y = aten.tile(%x) {dims = [2, 3]}",
    "repeat_interleave": "%y = aten.repeat_interleave.self_int(%x) {repeats = 3, dim = -2}",
    "flip": "%y = aten.flip(%x) {dims = [0, -1]}",
    "roll": "%y = aten.roll(%x) {shifts = [2], dims = [-1]}",
}


def _moved(result: Value, x: torch.Tensor) -> torch.Tensor:
    """What the move of a value makes of its source."""
    move, shape = move_of(result), substitute(list(result.shape), SIZES)
    match move:
        case Copied():
            return x
        case Regrouped():
            return x.reshape(shape)
        case Broadcast():
            return x.expand(shape)
        case Permuted(order=order):
            assert x.permute(order).permute(move.inverse).equal(x)
            return x.permute(order)
        case Cut(dim=dim, step=step, single=single):
            first = counted_start(move)
            first = max(int(substitute(first, SIZES)), 0)
            assert move.first in (first, None)
            count = 1 if single else shape[dim]
            cut = x.index_select(dim, first + torch.arange(count) * int(step))
            return cut.squeeze(dim) if single else cut
        case Reversed(dims=dims):
            for dim in dims:
                x = x.index_select(dim, torch.arange(x.shape[dim]).flip(0))
            return x
        case Rolled(dim=dim, by=by):
            size = x.shape[dim]
            return x.index_select(dim, (torch.arange(size) - int(by)) % size)
        case Repeated(counts=counts):
            x = x.reshape(*[1] * (len(counts) - x.dim()), *x.shape)
            for dim, count in enumerate(counts):
                x = torch.cat([x] * int(count), dim)
            return x
        case Interleaved(dim=dim, times=times):
            return x.index_select(dim, torch.arange(x.shape[dim] * int(times)) // int(times))
    raise AssertionError(f"{result!r} has no move")


@pytest.mark.parametrize("lines", LINES.values(), ids=LINES)
def test_a_move_gives_the_elements_that_the_op_gives(lines: str) -> None:
    graph = parse(f"{HEAD}  {lines}\n  return %y\n}}")
    (y,) = graph.outputs
    move = move_of(y)
    assert move is not None
    seen: dict[Value, torch.Tensor] = {}
    x = torch.arange(120.0).reshape(5, 4, 6)
    (expected,) = interpret(graph, (x,), observe=lambda value, given: seen.update({value: given}))
    assert _moved(y, seen.get(move.source, x)).equal(expected)


def test_every_move_is_shown() -> None:
    shown = set()
    for lines in LINES.values():
        (y,) = parse(f"{HEAD}  {lines}\n  return %y\n}}").outputs
        assert y.producer is not None
        assert y.producer.op in LAYOUT | ROLL
        shown.add(type(move_of(y)))
    every = (Copied, Regrouped, Broadcast, Permuted, Cut, Reversed, Rolled, Repeated, Interleaved)
    assert shown == set(every)


@pytest.mark.parametrize(
    "line",
    [
        "%y = aten.relu(%x)",
        "%y = aten.add.Tensor(%x, %x)",
        "%y = aten.roll(%x) {shifts = [1, 2], dims = [1, 2]}",  # along two axes at once
        "%y = aten.repeat_interleave.self_int(%x) {repeats = 2}",  # of all elements in one row
    ],
)
def test_what_is_no_single_move_has_none(line: str) -> None:
    (y,) = parse(f"{HEAD}  {line}\n  return %y\n}}").outputs
    assert move_of(y) is None
    assert move_of(parse(f"{HEAD}  return %x\n}}").outputs[0]) is None


def test_a_start_that_only_a_run_can_tell_is_no_number() -> None:
    head = "graph @main {\n  dim n = 5 in 2..\n  input %x : f32[n, 4]\n"
    line = "  %y = aten.slice.Tensor(%x) {dim = 0, start = -2, end = n}\n"
    (y,) = parse(f"{head}{line}  return %y\n}}").outputs
    move = move_of(y)
    assert isinstance(move, Cut)
    assert move.first is None
    assert substitute(counted_start(move), SIZES) == 3
