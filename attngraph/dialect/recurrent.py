"""`attn.recurrent`: one layer of an RNN, LSTM or GRU over a whole sequence.

It is an operator of torch as well (`torch.ops.attn.recurrent`), so that torch.export keeps a layer
as one node: torch itself takes a recurrent layer apart into its time steps, which fixes the length.
"""

from __future__ import annotations

import torch

from attngraph.ir.ops import op
from attngraph.ir.traits import RECURRENCE

# Where each of ONNX's gates stands in torch's weights: LSTM i o f c of i f g o, GRU z r h of r z n.
_ORDER = {"rnn_tanh": (0,), "rnn_relu": (0,), "gru": (1, 0, 2), "lstm": (0, 3, 1, 2)}
RESET_FIRST = "gru_reset_first"


def gate_order(weight: torch.Tensor, cell: str, *, inverse: bool = False) -> torch.Tensor:
    """torch's (gates·H, …) weight in ONNX's order of gates; `inverse` goes the other way."""
    order = _ORDER[cell]
    if inverse:
        order = tuple(order.index(gate) for gate in range(len(order)))
    parts = weight.chunk(len(order), 0)
    return torch.cat([parts[gate] for gate in order], 0) if len(order) > 1 else weight


def _fake(x: torch.Tensor, *others: torch.Tensor | None, cell: str) -> list[torch.Tensor]:
    _, _, _, recurrence, *_ = others
    assert recurrence is not None
    directions, _, hidden = recurrence.shape
    steps, batch, _ = x.shape
    states = 2 if cell == "lstm" else 1
    final = [x.new_empty((directions, batch, hidden)) for _ in range(states)]
    return [x.new_empty((steps, batch, directions * hidden)), *final]


def _run(
    x: torch.Tensor,
    h0: torch.Tensor | None,
    c0: torch.Tensor | None,
    weight: torch.Tensor,
    recurrence: torch.Tensor,
    bias: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    *,
    cell: str,
) -> list[torch.Tensor]:
    """Through torch.nn's own kernels, which take packed sequences sorted by length."""
    if cell == RESET_FIRST:
        return _reset_first(x, h0, weight, recurrence, bias, lengths)
    flat: list[torch.Tensor] = []
    for direction in range(weight.shape[0]):
        flat += [
            gate_order(matrix[direction], cell, inverse=True) for matrix in (weight, recurrence)
        ]
        if bias is not None:
            halves = bias[direction].chunk(2)
            flat += [gate_order(half, cell, inverse=True) for half in halves]
    shared = (flat, bias is not None, 1, 0.0, False, weight.shape[0] == 2)
    kernel = getattr(torch._C._VariableFunctions, cell)
    zeros = x.new_zeros((recurrence.shape[0], x.shape[1], recurrence.shape[2]))
    states = [h0, c0] if cell == "lstm" else [h0]
    initial = [zeros if state is None else state for state in states]
    if lengths is None:
        return list(kernel(x, initial if cell == "lstm" else initial[0], *shared, False))
    descending, order = torch.sort(lengths, descending=True)
    back = torch.argsort(order)
    initial = [state[:, order] for state in initial]
    pack, pad = torch._pack_padded_sequence, torch._pad_packed_sequence
    data, sizes = pack(x[:, order], descending.cpu(), False)
    outputs = list(kernel(data, sizes, initial if cell == "lstm" else initial[0], *shared))
    outputs[0] = pad(outputs[0], sizes, False, 0.0, x.shape[0])[0]
    return [output[:, back] for output in outputs]


def _reset_first(
    x: torch.Tensor,
    h0: torch.Tensor | None,
    weight: torch.Tensor,
    recurrence: torch.Tensor,
    bias: torch.Tensor | None,
    lengths: torch.Tensor | None,
) -> list[torch.Tensor]:
    """torch has no kernel for it: step by step, in ONNX's order of gates, z r h."""
    (directions, _, hidden), (steps, batch, _) = recurrence.shape, x.shape
    outputs, finals = [], []
    for direction in range(directions):
        both = None if bias is None else bias[direction].reshape(2, -1).sum(0)
        given = torch.nn.functional.linear(x, weight[direction], both)
        gates, candidate = recurrence[direction][: 2 * hidden], recurrence[direction][2 * hidden :]
        h = x.new_zeros((batch, hidden)) if h0 is None else h0[direction]
        made = x.new_zeros((steps, batch, hidden))
        for step in reversed(range(steps)) if direction else range(steps):
            z, r = (given[step, :, : 2 * hidden] + h @ gates.T).sigmoid().chunk(2, -1)
            new = torch.tanh(given[step, :, 2 * hidden :] + (r * h) @ candidate.T)
            after = new + z * (h - new)
            valid = torch.ones(batch, 1) if lengths is None else (lengths > step)[:, None]
            h = torch.where(valid.bool(), after, h)
            made[step] = torch.where(valid.bool(), after, 0)
        outputs.append(made)
        finals.append(h)
    return [torch.cat(outputs, -1), torch.stack(finals)]


@op("attn.recurrent", [RECURRENCE], outputs=None)
def recurrent(
    x: torch.Tensor,
    h0: torch.Tensor | None,
    c0: torch.Tensor | None,
    weight: torch.Tensor,
    recurrence: torch.Tensor,
    bias: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    *,
    cell: str,
) -> list[torch.Tensor]:
    """One recurrent layer, in both directions if D = 2, as ONNX's RNN, LSTM and GRU define it.

    x (T, B, I), h0 and c0 (D, B, H), zero where absent, weight (D, G·H, I), recurrence
    (D, G·H, H), bias (D, 2·G·H): the input's and then the recurrence's. G is the number of gates:
    1, 3 in a GRU (z r h), 4 in an LSTM (i o f c).
    `cell` is "rnn_tanh", "rnn_relu", "lstm" (Hochreiter and Schmidhuber 1997; only it has c0) or
    "gru" (the reset gate applied after the matrix product, as in torch) or "gru_reset_first"
    (before it: Cho et al. 2014; the halves of its bias are summed).
    lengths (B,) counts each sequence's valid steps, at least 1: what lies beyond gives 0, and the
    backward direction starts at the last valid step.

    Returns y (T, B, D·H), the last h (D, B, H), and for "lstm" the last c (D, B, H).
    """
    operator = torch.ops.attn.recurrent.default
    outputs: list[torch.Tensor] = operator(x, h0, c0, weight, recurrence, bias, lengths, cell=cell)
    return outputs


torch.library.define("attn::recurrent", torch.library.infer_schema(recurrent, mutates_args=()))
torch.library.register_fake("attn::recurrent", _fake)
torch.library.impl("attn::recurrent", "CompositeExplicitAutograd", _run)
