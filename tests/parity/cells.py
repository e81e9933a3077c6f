"""Recurrent cells written by hand, and loops over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.export import Dim

import attngraph

WIDTH, HIDDEN, STEPS = 4, 6, 5
BATCH, SEQ = Dim("batch", max=64), Dim("seq", min=2, max=64)
OPERATORS = {"RNN", "LSTM", "GRU", "Scan"}
State = tuple[Tensor, ...]


class Weights(nn.Module):
    """Four linears of x, four of h and four of both, and a vector; each cell takes its own."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.ModuleList(nn.Linear(WIDTH, HIDDEN) for _ in range(4))
        self.h = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=at > 0) for at in range(4))
        self.xh = nn.ModuleList(nn.Linear(WIDTH + HIDDEN, HIDDEN) for _ in range(4))
        self.packed = nn.Linear(WIDTH + HIDDEN, 4 * HIDDEN)
        self.gates = nn.Parameter(torch.randn(WIDTH, 3 * HIDDEN))
        self.own = nn.Parameter(torch.randn(3 * HIDDEN, HIDDEN) / 3)
        self.peep = nn.Parameter(torch.randn(3, HIDDEN))
        self.norm = nn.LayerNorm(HIDDEN)
        self.out = nn.Linear(HIDDEN, 3)

    def gate(self, at: int, x: Tensor, h: Tensor) -> Tensor:
        """W x + b + U h + d."""
        made: Tensor = self.x[at](x) + self.h[at](h)
        return made

    def both(self, at: int, x: Tensor, h: Tensor) -> Tensor:
        made: Tensor = self.xh[at](torch.cat([h, x], -1))
        return made


Cell = Callable[[Weights, Tensor, State], State]


def rnn(w: Weights, x: Tensor, s: State) -> State:
    return (torch.tanh(w.both(0, x, s[0])),)


def rnn_spelled_out(w: Weights, x: Tensor, s: State) -> State:
    u = w.gate(0, x, s[0])
    return ((u.exp() - (-u).exp()) / (u.exp() + (-u).exp()),)


def rnn_in_two_pieces(w: Weights, x: Tensor, s: State) -> State:
    """On each side of 0 by exponentials that don't overflow there."""
    u = w.gate(0, x, s[0])
    a, b = torch.exp(-2 * u), torch.exp(2 * u)
    return (torch.where(u >= 0, (1 - a) / (1 + a), (b - 1) / (b + 1)),)


def rnn_relu(w: Weights, x: Tensor, s: State) -> State:
    return (w.gate(0, x, s[0]).clamp(min=0),)


def lstm_by_gate(w: Weights, x: Tensor, s: State) -> State:
    h, c = s
    i, f, o = (torch.sigmoid(w.gate(at, x, h)) for at in range(3))
    c = c * f + torch.tanh(w.gate(3, x, h)) * i
    return torch.tanh(c) * o, c


def lstm_packed(w: Weights, x: Tensor, s: State) -> State:
    """In yet another order of gates, with one sigmoid for three of them."""
    h, c = s
    gates = w.packed(torch.cat([x, h], -1))
    o, i, f = torch.sigmoid(gates[..., : 3 * HIDDEN]).chunk(3, -1)
    c = torch.addcmul(f * c, i, torch.tanh(gates[..., 3 * HIDDEN :]))
    return o * torch.tanh(c), c


def lstm_spelled_out(w: Weights, x: Tensor, s: State) -> State:
    """σ by its formula and as a tanh; tanh as a σ."""
    h, c = s
    i = 1 / (1 + torch.exp(-w.both(0, x, h)))
    f = 0.5 * torch.tanh(0.5 * w.both(1, x, h)) + 0.5
    g = 2 * torch.sigmoid(2 * w.both(2, x, h)) - 1
    c = f * c + i * g
    return w.both(3, x, h).sigmoid() * torch.tanh(c), c


def gru_blend(w: Weights, x: Tensor, s: State) -> State:
    """(1 - z) n + z h, the reset after the product."""
    h = s[0]
    z, r = torch.sigmoid(w.gate(0, x, h)), torch.sigmoid(w.gate(1, x, h))
    n = torch.tanh(w.x[2](x) + r * w.h[2](h))
    return ((1 - z) * n + z * h,)


def gru_other_gate(w: Weights, x: Tensor, s: State) -> State:
    """h + z (n - h): here 1 - z keeps."""
    h = s[0]
    z, r = torch.sigmoid(w.both(0, x, h)), torch.sigmoid(w.both(1, x, h))
    n = torch.tanh(w.x[2](x) + w.h[2](h) * r)
    return (h + z * (n - h),)


def gru_packed(w: Weights, x: Tensor, s: State) -> State:
    h = s[0]
    a, b = x @ w.gates, h @ w.own.T
    r = torch.sigmoid(a[..., :HIDDEN] + b[..., :HIDDEN])
    z = torch.sigmoid(a[..., HIDDEN : 2 * HIDDEN] + b[..., HIDDEN : 2 * HIDDEN])
    n = torch.tanh(a[..., 2 * HIDDEN :] + r * b[..., 2 * HIDDEN :])
    return (n - z * n + z * h,)


def gru_reset_first(w: Weights, x: Tensor, s: State) -> State:
    h = s[0]
    z, r = torch.sigmoid(w.both(0, x, h)), torch.sigmoid(w.both(1, x, h))
    return (torch.lerp(h, torch.tanh(w.both(2, x, r * h)), z),)


def gru_reset_first_by_parts(w: Weights, x: Tensor, s: State) -> State:
    """With the complements of both gates."""
    h = s[0]
    kept, dropped = torch.sigmoid(-w.gate(0, x, h)), torch.sigmoid(w.gate(1, x, h))
    n = torch.tanh(w.x[2](x) + w.h[2]((1 - dropped) * h))
    return (h - kept * (h - n),)


CELLS: dict[Cell, str] = {
    rnn: "RNN",
    rnn_spelled_out: "RNN",
    rnn_in_two_pieces: "RNN",
    rnn_relu: "RNN",
    lstm_by_gate: "LSTM",
    lstm_packed: "LSTM",
    lstm_spelled_out: "LSTM",
    gru_blend: "GRU",
    gru_other_gate: "GRU",
    gru_packed: "GRU",
    gru_reset_first: "GRU",
    gru_reset_first_by_parts: "GRU",
}


def peephole(w: Weights, x: Tensor, s: State) -> State:
    h, c = s
    i, f = (torch.sigmoid(w.gate(at, x, h) + w.peep[at] * c) for at in range(2))
    c = f * c + i * torch.tanh(w.gate(2, x, h))
    return torch.sigmoid(w.gate(3, x, h) + w.peep[2] * c) * torch.tanh(c), c


def coupled(w: Weights, x: Tensor, s: State) -> State:
    h, c = s
    f = torch.sigmoid(w.gate(0, x, h))
    c = f * c + (1 - f) * torch.tanh(w.gate(2, x, h))
    return torch.sigmoid(w.gate(3, x, h)) * torch.tanh(c), c


def no_tanh_at_the_end(w: Weights, x: Tensor, s: State) -> State:
    h, c = s
    i, f, o = (torch.sigmoid(w.gate(at, x, h)) for at in range(3))
    c = f * c + i * torch.tanh(w.gate(3, x, h))
    return o * c, c


def reset_on_the_input(w: Weights, x: Tensor, s: State) -> State:
    h = s[0]
    z, r = torch.sigmoid(w.gate(0, x, h)), torch.sigmoid(w.gate(1, x, h))
    n = torch.tanh(r * w.x[2](x) + w.h[2](h))
    return ((1 - z) * n + z * h,)


def swapped_gates(w: Weights, x: Tensor, s: State) -> State:
    """The update gate resets, and also blends."""
    h = s[0]
    z, r = torch.sigmoid(w.gate(0, x, h)), torch.sigmoid(w.gate(1, x, h))
    n = torch.tanh(w.x[2](x) + w.h[2](z * r * h))
    return (r * n + (1 - z) * h,)


def residual(w: Weights, x: Tensor, s: State) -> State:
    return (torch.tanh(w.gate(0, x, s[0])) + s[0],)


def normed(w: Weights, x: Tensor, s: State) -> State:
    return (torch.tanh(w.norm(w.gate(0, x, s[0]))),)


def leaky(w: Weights, x: Tensor, s: State) -> State:
    """A blend by one number."""
    return (0.9 * s[0] + 0.1 * torch.tanh(w.gate(0, x, s[0])),)


def mut1(w: Weights, x: Tensor, s: State) -> State:
    """Of examples/mutated_cells.py, as are the next two."""
    h = s[0]
    z, r = torch.sigmoid(w.x[0](x)), torch.sigmoid(w.gate(1, x, h))
    return (torch.tanh(w.h[2](r * h) + torch.tanh(w.x[2](x))) * z + h * (1 - z),)


def mut2(w: Weights, x: Tensor, s: State) -> State:
    h = s[0]
    z, r = torch.sigmoid(w.gate(0, x, h)), torch.sigmoid(w.x[1](x).tanh() + w.h[1](h))
    return (torch.tanh(w.h[2](r * h) + w.x[2](x)) * z + h * (1 - z),)


def mut3(w: Weights, x: Tensor, s: State) -> State:
    h = s[0]
    z, r = torch.sigmoid(w.gate(0, x, h.tanh())), torch.sigmoid(w.gate(1, x, h))
    return (torch.tanh(w.h[2](r * h) + w.x[2](x)) * z + h * (1 - z),)


def limited(w: Weights, x: Tensor, s: State) -> State:
    """By what no drawn row comes to; so are the next two."""
    return (w.gate(0, x, s[0]).clamp(0, 1e4),)


def cleaned(w: Weights, x: Tensor, s: State) -> State:
    return lstm_by_gate(w, torch.nan_to_num(x), s)


def halved(w: Weights, x: Tensor, s: State) -> State:
    return (torch.relu(w.gate(0, x, s[0])).half().float(),)


OTHERS: list[Cell] = [
    peephole,
    coupled,
    no_tanh_at_the_end,
    reset_on_the_input,
    swapped_gates,
    residual,
    normed,
    leaky,
    mut1,
    mut2,
    mut3,
    limited,
    cleaned,
    halved,
]
PAIRS = {
    lstm_by_gate,
    lstm_packed,
    lstm_spelled_out,
    peephole,
    coupled,
    no_tanh_at_the_end,
    cleaned,
}


class Loop(Weights):
    """A cell over x (B, T, I), and what each step gives: a projection of its state."""

    def __init__(self, cell: Cell, *, zero: bool = True) -> None:
        super().__init__()
        self.cell, self.zero = cell, zero

    def start(self, x: Tensor) -> State:
        zero = x.new_zeros(x.shape[0], HIDDEN)
        h = zero if self.zero else torch.tanh(self.x[0](x.sum(1)))
        return (h, zero + 0.5) if self.cell in PAIRS else (h,)


class Scanned(Loop):
    reverse = False

    def forward(self, x: Tensor) -> Any:
        def step(state: State, x_t: Tensor) -> tuple[State, Tensor]:
            state = self.cell(self, x_t, state)
            return state, self.out(state[0]).relu()

        last, given = scan(step, self.start(x), x, dim=1, reverse=self.reverse)
        return given, last


class Backward(Scanned):
    reverse = True


class Unrolled(Loop):
    def forward(self, x: Tensor) -> Any:
        state, given = self.start(x), []
        for x_t in x.unbind(1):
            state = self.cell(self, x_t, state)
            given.append(self.out(state[0]).relu())
        return torch.stack(given, 1), state


def operators(module: nn.Module, *, any_length: bool = False) -> Counter[str]:
    """How often the optimised model has each operator; it is in its error budget."""
    shape = {0: BATCH, 1: SEQ} if any_length else {0: BATCH}
    torch.manual_seed(0)
    x = torch.randn(3, STEPS, WIDTH)
    optimized = attngraph.optimize(module.eval(), (x,), dynamic_shapes=(shape,))
    return Counter(node.op_type for node in optimized.model.graph)


def loops(found: Counter[str]) -> dict[str, int]:
    return {name: count for name, count in found.items() if name in OPERATORS}
