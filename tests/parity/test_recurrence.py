"""Cells written by hand: each spelling becomes one ONNX op, and what only looks alike does not."""

from __future__ import annotations

import pytest

from tests.parity.cells import (
    CELLS,
    OTHERS,
    Backward,
    Cell,
    Scanned,
    Unrolled,
    gru_reset_first,
    loops,
    lstm_packed,
    mut1,
    operators,
    peephole,
    reset_on_the_input,
)

pytestmark = pytest.mark.wide


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.__name__)
def test_a_scan_over_a_cell_is_its_operator(cell: Cell) -> None:
    assert loops(operators(Scanned(cell), any_length=True)) == {CELLS[cell]: 1}


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.__name__)
def test_an_unrolled_cell_is_its_operator(cell: Cell) -> None:
    found = operators(Unrolled(cell, zero=False))
    assert loops(found) == {CELLS[cell]: 1}
    assert not {"Sigmoid"} & found.keys()
    assert found["Gather"] == 1  # of the size check


@pytest.mark.parametrize("cell", OTHERS, ids=lambda cell: cell.__name__)
def test_what_is_no_such_cell_stays_as_it_is(cell: Cell) -> None:
    assert loops(operators(Scanned(cell), any_length=True)) == {"Scan": 1}


@pytest.mark.parametrize("cell", [peephole, mut1, reset_on_the_input], ids=lambda c: c.__name__)
def test_nor_is_it_taken_where_it_is_unrolled(cell: Cell) -> None:
    assert loops(operators(Unrolled(cell))) == {}


@pytest.mark.parametrize("cell", [lstm_packed, gru_reset_first], ids=lambda c: c.__name__)
def test_a_scan_from_the_end(cell: Cell) -> None:
    found = operators(Backward(cell, zero=False), any_length=True)
    assert loops(found) == {CELLS[cell]: 1}
