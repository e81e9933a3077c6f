"""One step of a loop as a function of rows, run in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from attngraph.analysis.values.running import Observer, run_nodes
from attngraph.analysis.values.widening import widened
from attngraph.ir import Node, ScalarType, TensorType, Value
from attngraph.ir.dims import same, same_shape
from attngraph.ir.slices import backward_slice
from attngraph.ir.traits import RANDOM, UNSET

_ROWS = 256  # at once: what a step makes of them stays small


@dataclass(frozen=True)
class Step:
    """`results` as functions of `states` (B, H) or (H,), `inputs` (B, I) or (I,), and constants.

    Each row of a result is a function of that row of the others, which whoever reads a step so has
    to confirm.
    """

    states: tuple[Value, ...]
    inputs: tuple[Value, ...]
    results: tuple[Value, ...]
    nodes: tuple[Node, ...]
    fixed: Mapping[Value, torch.Tensor]

    @property
    def hidden(self) -> int:
        """The width of a state."""
        return int(self.states[0].shape[-1])

    @property
    def widths(self) -> list[int]:
        """The widths of the inputs."""
        return [int(value.shape[-1]) for value in self.inputs]

    def values(self) -> list[Value]:
        """What the step makes that has the type of a state."""
        made = [value for node in self.nodes for value in node.outputs]
        return [value for value in made if _is_like(value, self.states[0])]

    def run(
        self,
        wanted: Sequence[Value],
        x: torch.Tensor,
        states: Sequence[torch.Tensor],
        observe: Observer | None = None,
    ) -> list[torch.Tensor] | None:
        """The wanted values (N, H) for N rows: x (N, ΣI) is the inputs side by side.

        None where the step takes no such rows. `observe` is told what each node gets and gives.
        """
        given = [*states, *torch.split_with_sizes(x, self.widths, -1)]
        lead = self.states[0].shape[0] if len(self.states[0].shape) == 2 else None
        parts: list[list[torch.Tensor]] = []
        at, rows = 0, _ROWS if isinstance(lead, sympy.Symbol) else lead
        while at < len(x):
            taken = [tensor[at : at + (rows or 1)] for tensor in given]
            missing = (rows or 1) - len(taken[0])
            if missing and rows == lead:
                taken = [torch.cat([tensor, tensor[-1:].expand(missing, -1)]) for tensor in taken]
            found = self._once(wanted, taken, lead, observe)
            if found is None:
                return None
            kept = len(x) - at
            parts.append([tensor[:kept] for tensor in found])
            at += rows or 1
        return [torch.cat(column) for column in zip(*parts, strict=True)]

    def _once(
        self,
        wanted: Sequence[Value],
        given: Sequence[torch.Tensor],
        lead: Any,
        observe: Observer | None,
    ) -> list[torch.Tensor] | None:
        sizes = {lead.name: len(given[0])} if isinstance(lead, sympy.Symbol) else {}
        if lead is None:
            given = [tensor[0] for tensor in given]
        memory: dict[Value, Any] = dict(self.fixed)
        memory.update(zip((*self.states, *self.inputs), given, strict=True))
        if run_nodes(self.nodes, memory, sizes, observe) is None:
            return None
        found = [memory[value] for value in wanted]
        return [tensor[None] for tensor in found] if lead is None else found


def read_step(
    states: Sequence[Value],
    inputs: Sequence[Value],
    results: Sequence[Value],
    data: Callable[[Value], torch.Tensor | None],
) -> Step | None:
    """None where the results depend on anything but rows and constants, or nothing carries them.

    `data` gives a constant's numbers.
    """
    shape = states[0].shape
    if len(shape) not in (1, 2) or not all(_is_like(value, states[0]) for value in results):
        return None
    if not all(_is_like(value, states[0]) for value in states) or not isinstance(shape[-1], int):
        return None
    if len(shape) == 2 and not isinstance(shape[0], (int, sympy.Symbol)):
        return None
    for value in inputs:
        if not isinstance(value.type, TensorType) or not isinstance(value.shape[-1:], tuple):
            return None
        if value.dtype != states[0].dtype or len(value.shape) != len(shape):
            return None
        if not isinstance(value.shape[-1], int) or not all(map(same, value.shape[:-1], shape[:-1])):
            return None
    cut = {*states, *inputs}
    leaves, nodes = backward_slice(results, cut.__contains__)
    fixed: dict[Value, torch.Tensor] = {}
    for leaf in leaves:
        if leaf in cut:
            continue
        numbers = None if isinstance(leaf.type, ScalarType) else data(leaf)
        if numbers is None or numbers.is_meta:
            return None
        fixed[leaf] = widened(numbers.detach())
    return Step(tuple(states), tuple(inputs), tuple(results), tuple(nodes), fixed)


def _is_like(value: Value, state: Value) -> bool:
    if not isinstance(value.type, TensorType) or not value.dtype.is_floating_point:
        return False
    return value.dtype == state.dtype and same_shape(value.shape, state.shape)


def known_data(value: Value | None) -> torch.Tensor | None:
    """The numbers of a constant, or of what is made of constants alone."""
    if value is None or value.producer is None:
        return None if value is None else value.data
    leaves, nodes = backward_slice([value], lambda leaf: leaf.producer is None)
    memory: dict[Value, Any] = {leaf: leaf.data for leaf in leaves if leaf.is_constant}
    if len(memory) < max(len(leaves), 1) or any(data is None for data in memory.values()):
        return None
    if any(node.op in RANDOM | UNSET for node in nodes):
        return None
    made = run_nodes(nodes, memory, {}, wide=False)
    return None if made is None else torch.as_tensor(made[value])
