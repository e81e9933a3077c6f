"""Equal steps that are fed by the one before are a loop; an odd one among them ends it."""

from __future__ import annotations

import pytest

from attngraph.analysis.recurrence.unrolled import steps_in_a_row, unrolled_loops
from attngraph.ir import Graph, parse

STEPS = 6


def _graph(*, reverse: bool = False, odd: int | None = None) -> Graph:
    """h ← tanh(x_t + h W) over six places of x, one of them by another op if it is `odd`."""
    order = list(range(STEPS))[:: -1 if reverse else 1]
    lines, state = [], "start"
    for at, place in enumerate(order):
        op = "aten.sigmoid" if at == odd else "aten.tanh"
        lines += [
            f"%x{at} = aten.select.int(%x) {{dim = 1, index = {place}}}",
            f"%p{at} = aten.matmul(%{state}, %w)",
            f"%s{at} = aten.add.Tensor(%x{at}, %p{at})",
            f"%h{at} = {op}(%s{at})",
        ]
        state = f"h{at}"
    return parse(
        f"graph @main {{\ninput %x : f32[2, {STEPS}, 8]\ninput %start : f32[2, 8]\n"
        "parameter %w : f32[8, 8]\n" + "\n".join(lines) + f"\nreturn %{state}\n}}"
    )


@pytest.mark.parametrize("reverse", [False, True])
def test_equal_steps_are_one_chain(reverse: bool) -> None:
    graph = _graph(reverse=reverse)
    chains = [chain for chain in unrolled_loops(graph) if len(chain.items) == STEPS]
    assert chains
    chain = chains[0]
    assert chain.reverse is reverse
    assert chain.slices.source is graph.inputs[0]
    assert chain.slices.dim == 1
    assert graph.outputs[0] in chain.states[-1]


def test_a_step_of_another_op_ends_the_chain() -> None:
    assert all(len(chain.items) < STEPS for chain in unrolled_loops(_graph(odd=3)))


def test_a_loop_that_was_unrolled_is_told_with_its_steps() -> None:
    assert max(count for count, _ in steps_in_a_row(_graph())) == STEPS


@pytest.mark.parametrize("step", ["", "%r{at} = aten.tanh(%b{at})"])
def test_places_that_are_written_one_by_one_are_no_steps(step: str) -> None:
    """A buffer that takes x_t at place t; with a tanh of it after each write it is a loop."""
    lines, state = [], "start"
    for at in range(STEPS):
        lines += [
            f"%x{at} = aten.select.int(%x) {{dim = 1, index = {at}}}",
            f"%b{at} = aten.select_scatter(%{state}, %x{at}) {{dim = 1, index = {at}}}",
            step.format(at=at),
        ]
        state = f"r{at}" if step else f"b{at}"
    graph = parse(
        f"graph @main {{\ninput %x : f32[2, {STEPS}, 8]\ninput %start : f32[2, {STEPS}, 8]\n"
        + "\n".join(lines)
        + f"\n%y = aten.tanh(%{state})\nreturn %y\n}}"
    )
    assert [count for count, _ in steps_in_a_row(graph)] == ([STEPS] if step else [])
