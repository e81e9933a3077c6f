"""Reads a step of a loop as a cell of an RNN, LSTM or GRU.

Nothing is matched by shape of code. A gate σ(Wx + Uh + b) is a value in (0, 1) whose logit is
affine in x and h; a candidate's artanh is. Which value is which gate follows from the equations: an
LSTM's forget gate, for one, is the slope of its memory. W, U and b are then read off by moving one
feature at a time, and what was read is evaluated against the step, on rows that reach all that it
does (sides.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from attngraph.analysis.recurrence.sides import Sides
from attngraph.analysis.recurrence.steps import Step
from attngraph.dialect.recurrent import RESET_FIRST, recurrent
from attngraph.ir import Value

_CLOSE = 1e-8  # of float64 that went through a logit, relative to the largest element
_NOTHING = 1e-12  # of the largest weight: what a zero is read as
_ROWS = 6
_SPREAD = 0.5  # of x and h: few gates saturate
_MEMORY = 3.0  # an LSTM's memory while its gates are read: far enough from zero to divide by
_SCALES = (1.0, 6.0, 1e-3, 0.0, 50.0)

Rows = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From x (N, I) and h (N, H) to (N, H); NaN where it isn't defined."""


@dataclass(frozen=True)
class Cell:
    """A cell by the name and with the weights of `attn.recurrent`, in float64.

    `states` says which of the step's states is h, and for an LSTM which is c.
    """

    kind: str
    states: tuple[int, ...]
    weight: torch.Tensor
    recurrence: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True)
class Linear:
    """w = W x + U h + b."""

    weight: torch.Tensor
    recurrence: torch.Tensor
    bias: torch.Tensor


def read_cell(step: Step) -> Cell | None:
    """The cell that a step with one or two states is; None where it is none of them."""
    if not Sides(step).are_known:
        return None
    if len(step.states) == 1:
        found = _single(_Probe(step, (0,)))
    elif len(step.states) == 2:
        found = (cell for order in ((0, 1), (1, 0)) for cell in _lstm(_Probe(step, order)))
    else:
        return None
    return next((cell for cell in found if _is_equal(step, cell)), None)


class _Probe:
    """Runs a step whose states are h and, where there are two, c; and reads affine maps."""

    def __init__(self, step: Step, order: tuple[int, ...]) -> None:
        self.step, self.order = step, order
        self.results = [step.results[at] for at in order]
        self.width = sum(step.widths)
        self._seed = torch.Generator().manual_seed(0)
        points = [(self.draw(self.width), self.draw(step.hidden)) for _ in range(3)]
        (xa, ha), (xb, hb), (xo, ho) = points
        self.x = torch.cat([xa, xb, xo, xa + xb - xo])
        self.h = torch.cat([ha, hb, ho, ha + hb - ho])

    def draw(self, width: int) -> torch.Tensor:
        drawn = torch.randn(_ROWS, width, generator=self._seed, dtype=torch.float64)
        return drawn * _SPREAD

    def run(
        self, wanted: Sequence[Value], x: torch.Tensor, h: torch.Tensor, c: torch.Tensor | float = 0
    ) -> list[torch.Tensor]:
        """The wanted values; NaN where the step can't be run."""
        states = [h, torch.zeros_like(h) + c][: len(self.order)]
        found = self.step.run(
            wanted, x, [states[self.order.index(at)] for at in range(len(states))]
        )
        return [torch.full_like(h, torch.nan) for _ in wanted] if found is None else found

    def one(self, value: Value) -> Rows:
        """The value as a function of rows."""
        return lambda x, h: self.run([value], x, h)[0]

    def through(self, value: Value, by: Callable[[torch.Tensor], torch.Tensor]) -> Rows:
        """A function of the value."""
        return lambda x, h: by(self.run([value], x, h)[0])

    def is_affine(self, rows: Rows) -> bool:
        """Whether values at the rows `x`, `h` are as an affine map's."""
        w = rows(self.x, self.h)
        a, b, o, s = w.chunk(4)
        return _is_zero(a + b - o - s, w)

    def read(self, rows: Rows) -> Linear:
        """The affine map, one feature at a time from a point where nothing is zero."""
        x, h = self.x[:1], self.h[:1]
        moved = torch.eye(self.width + self.step.hidden, dtype=torch.float64)
        moved = torch.cat([torch.zeros_like(moved[:1]), moved])
        w = rows(x + moved[:, : self.width], h + moved[:, self.width :])
        matrix = (w[1:] - w[:1]).T
        weight, recurrence = matrix[:, : self.width], matrix[:, self.width :]
        return Linear(weight, recurrence, w[0] - weight @ x[0] - recurrence @ h[0])

    def read_affine(self, rows: Rows) -> Linear | None:
        """The affine map, if it is one."""
        return self.read(rows) if self.is_affine(rows) else None


def _is_zero(difference: torch.Tensor, scale: torch.Tensor) -> bool:
    bound = _CLOSE * max(1.0, float(scale.abs().max()))
    return bool((difference.abs() <= bound).all())  # NaN and infinity are not


def _single(probe: _Probe) -> Iterator[Cell]:
    """Cells whose one state is h."""
    if (w := probe.read_affine(probe.through(probe.results[0], torch.atanh))) is not None:
        yield _cell("rnn_tanh", (0,), [w])
    gates: list[Rows] = []
    for value in probe.step.values():
        rows = probe.one(value)
        if probe.is_affine(rows):
            (after,) = probe.run(probe.results, probe.x, probe.h)
            if _is_zero(after - rows(probe.x, probe.h).relu(), after):
                yield _cell("rnn_relu", (0,), [probe.read(rows)])
        elif probe.is_affine(probe.through(value, torch.logit)):
            gates += [rows, probe.through(value, lambda gate: 1 - gate)]
    for update in gates:
        yield from _gru(probe, update, gates)


def _gru(probe: _Probe, update: Rows, gates: Sequence[Rows]) -> Iterator[Cell]:
    """h' = (1 - z) n + z h, where n = tanh(w) and `update` is z."""

    def candidate(x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        z = update(x, h)
        (after,) = probe.run(probe.results, x, h)
        return ((after - z * h) / (1 - z)).atanh()

    w = candidate(probe.x, probe.h)
    if not bool(w.isfinite().all()):
        return
    for reset in gates:
        if (new := _reset_after(probe, candidate, reset)) is not None:
            kind, part, inner = new
            z, r = probe.read(_logit_of(update)), probe.read(_logit_of(reset))
            if not _is_unweighted(z) and not _is_unweighted(r):
                yield _cell(kind, (0,), [z, r, part], inner)


def _logit_of(gate: Rows) -> Rows:
    return lambda x, h: gate(x, h).logit()


def _reset_after(
    probe: _Probe, candidate: Rows, reset: Rows
) -> tuple[str, Linear, torch.Tensor] | None:
    """w = W x + b + r ⊙ (U h + d), or W x + b + U (r ⊙ h): the kind, its map, and d.

    d is the slope in r of what remains of w at h = 0 once it is freed of everything affine.
    """
    still = torch.zeros_like(probe.h)
    w, r = candidate(probe.x, still), reset(probe.x, still)
    bend_w, bend_r = (a + b - o - s for a, b, o, s in (w.chunk(4), r.chunk(4)))
    inner = (bend_w * bend_r).sum(0) / (bend_r * bend_r).sum(0)
    if not _is_zero(bend_w - inner * bend_r, w):
        if not _is_zero(bend_w, w):
            return None
        inner = torch.zeros_like(inner)
    hidden = probe.step.hidden
    given = probe.read(lambda x, h: candidate(x, 0 * h) - inner * reset(x, 0 * h))

    def rest(x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """r ⊙ U h, or U (r ⊙ h)."""
        return candidate(x, h) - x @ given.weight.T - given.bias - inner * reset(x, h)

    x = probe.x[:1].expand(hidden, -1)
    h = torch.eye(hidden, dtype=torch.float64)
    made, gate = rest(x, h), reset(x, h)
    if probe.is_affine(lambda x, h: rest(x, h) / reset(x, h)):
        return "gru", Linear(given.weight, (made / gate).T, given.bias), inner
    own = gate.diagonal()[:, None]  # row k has only h's feature k, so only that of r counts
    return RESET_FIRST, Linear(given.weight, (made / own).T, given.bias), torch.zeros_like(inner)


def _lstm(probe: _Probe) -> Iterator[Cell]:
    """c' = f c + i g and h' = o tanh(c')."""
    after, memory = probe.results

    def forget(x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        full, empty = (probe.run([memory], x, h, c)[0] for c in (_MEMORY, 0.0))
        return ((full - empty) / _MEMORY).logit()

    def leave(x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        h, c = probe.run([after, memory], x, h, _MEMORY)
        return (h / c.tanh()).logit()

    f, o = probe.read_affine(forget), probe.read_affine(leave)
    if f is None or o is None:
        return
    for value in probe.step.values():
        for known_by, other_by in ((torch.logit, torch.atanh), (torch.atanh, torch.logit)):
            known = probe.read_affine(probe.through(value, known_by))
            if known is None:
                continue
            other = probe.read_affine(_factor(probe, memory, value, other_by))
            if other is not None:
                i, g = (known, other) if known_by is torch.logit else (other, known)
                if not _is_coupled(i, f):
                    yield _cell("lstm", probe.order, [i, o, f, g])


def _factor(
    probe: _Probe, product: Value, known: Value, by: Callable[[torch.Tensor], torch.Tensor]
) -> Rows:
    """A function of what makes the product of `known`."""

    def rows(x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        whole, part = probe.run([product, known], x, h)
        return by(whole / part)

    return rows


def _is_unweighted(gate: Linear) -> bool:
    """Whether a gate adds x as it is (MUT2): the operator would multiply it by an identity."""
    rows, columns = gate.weight.shape
    eye = torch.eye(rows, columns, dtype=torch.float64)
    return rows == columns and _is_zero(gate.weight - eye, eye)


def _is_coupled(i: Linear, f: Linear) -> bool:
    """Whether i = 1 - f: a cell with three products, which as an LSTM would have four."""
    pairs = ((i.weight, f.weight), (i.recurrence, f.recurrence), (i.bias, f.bias))
    return all(_is_zero(a + b, a) for a, b in pairs)


def _cell(
    kind: str, states: tuple[int, ...], gates: Sequence[Linear], inner: torch.Tensor | None = None
) -> Cell:
    """`inner` is the recurrence's own bias of the last gate."""
    bias = torch.cat([gate.bias for gate in gates])
    second = torch.zeros_like(bias)
    if inner is not None:
        second[-len(inner) :] = inner
    weight = torch.cat([gate.weight for gate in gates])
    recurrence = torch.cat([gate.recurrence for gate in gates])
    joint = torch.cat([bias, second])
    floor = _NOTHING * max(float(tensor.abs().max()) for tensor in (weight, recurrence, joint))
    weight, recurrence, joint = (
        torch.where(tensor.abs() <= floor, 0, tensor) for tensor in (weight, recurrence, joint)
    )
    return Cell(kind, states, weight, recurrence, joint if bool(joint.any()) else None)


def run_cell(cell: Cell, x: torch.Tensor, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One step of rows x (N, I), with the states in the order of `attn.recurrent`."""
    h, c = [*(state[None] for state in states), None][:2]
    bias = None if cell.bias is None else cell.bias[None]
    made = recurrent(x[None], h, c, cell.weight[None], cell.recurrence[None], bias, cell=cell.kind)
    return [state[0] for state in made[1:]]


def _is_equal(step: Step, cell: Cell) -> bool:
    """Whether step and cell agree on small rows and large ones, which reach all of the step."""
    numbers = (cell.weight, cell.recurrence, cell.bias)
    if not all(tensor is None or bool(tensor.isfinite().all()) for tensor in numbers):
        return False
    seed, sides = torch.Generator().manual_seed(1), Sides(step)
    for scale in _SCALES:
        widths = [sum(step.widths), *(step.hidden for _ in step.states)]
        x, *states = (
            scale * torch.randn(_ROWS, width, generator=seed, dtype=torch.float64)
            for width in widths
        )
        expected = step.run(step.results, x, states, sides.note)
        if expected is None:
            return False
        found = run_cell(cell, x, [states[at] for at in cell.states])
        for place, after in zip(cell.states, found, strict=True):
            if not _is_zero(after - expected[place], expected[place]):
                return False
    return sides.are_seen()
