"""Keeps torch.nn's recurrent layers whole while torch.export traces them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.rnn import PackedSequence

from attngraph.dialect.recurrent import gate_order

_LAYERS = (nn.RNN, nn.LSTM, nn.GRU)


@contextmanager
def recurrent_layers() -> Iterator[None]:
    """Within it, nn.RNN, nn.LSTM and nn.GRU call `attn::recurrent` once per layer.

    Packed sequences stay padded, with their lengths: what torch packs has a size that depends on
    the data. An LSTM with projections is refused. The cells (nn.LSTMCell, …) are written out:
    torch's own kernels of them work in place.
    """
    functions: dict[str, Any] = {
        "_pack_padded_sequence": _pack,
        "_pad_packed_sequence": _pad,
        "lstm_cell": _lstm_cell,
        "gru_cell": _gru_cell,
        "rnn_tanh_cell": _rnn_cell(torch.tanh),
        "rnn_relu_cell": _rnn_cell(torch.relu),
    }
    forwards = {layer: layer.forward for layer in _LAYERS}
    update = nn.RNNBase._update_flat_weights
    for name, function in functions.items():
        setattr(torch._VF, name, function)
    for layer in _LAYERS:
        setattr(layer, "forward", _forward)  # noqa: B010
    # Dynamo, which reads the steps of a scan, would have it change the layer in every step.
    setattr(nn.RNNBase, "_update_flat_weights", lambda layer: None)  # noqa: B010
    try:
        yield
    finally:
        for name in functions:
            delattr(torch._VF, name)
        setattr(nn.RNNBase, "_update_flat_weights", update)  # noqa: B010
        for layer, forward in forwards.items():
            setattr(layer, "forward", forward)  # noqa: B010


def _forward(self: Any, input: Any, hx: Any = None) -> Any:
    """The forward of a torch.nn layer, with one `attn::recurrent` per layer of its stack."""
    if self.proj_size:
        raise ValueError(
            "ONNX has no LSTM with projections (proj_size); project the output of a plain one"
        )
    states = [] if hx is None else [hx] if isinstance(hx, Tensor) else list(hx)
    if isinstance(input, PackedSequence):
        x, sizes, order, back = input
        states = _permuted(states, order)
        y, finals = _stack(self, x, states, _lengths(sizes, _batch_of(x)))
        return PackedSequence(y, sizes, order, back), _result(self, _permuted(finals, back))
    if batched := input.dim() == 3:
        x = input.transpose(0, 1) if self.batch_first else input
    else:
        x, states = input.unsqueeze(1), [state.unsqueeze(1) for state in states]
    self.check_input(x.transpose(0, 1) if self.batch_first else x, None)
    y, finals = _stack(self, x, states, None)
    if not batched:
        return y.squeeze(1), _result(self, [final.squeeze(1) for final in finals])
    return y.transpose(0, 1) if self.batch_first else y, _result(self, finals)


def _result(layer: Any, finals: list[Tensor]) -> Any:
    return tuple(finals) if isinstance(layer, nn.LSTM) else finals[0]


def _permuted(states: list[Tensor], order: Tensor | None) -> list[Tensor]:
    return states if order is None else [state.index_select(1, order) for state in states]


def _stack(
    layer: Any, x: Tensor, states: list[Tensor], lengths: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """Layer upon layer over x (T, B, I); the final states of all of them, concatenated."""
    cell = layer.mode.lower()
    directions = 2 if layer.bidirectional else 1
    step = 4 if layer.bias else 2
    weights = [getattr(layer, name) for name in layer._flat_weights_names]
    cells = [weights[at : at + step] for at in range(0, len(weights), step)]
    finals: list[list[Tensor]] = []
    for first in range(0, len(cells), directions):
        own = cells[first : first + directions]
        matrices = [torch.stack([gate_order(each[at], cell) for each in own]) for at in (0, 1)]
        bias = None
        if layer.bias:
            halves = [[gate_order(each[at], cell) for at in (2, 3)] for each in own]
            bias = torch.stack([torch.cat(pair) for pair in halves])
        initial = [state[first : first + directions] for state in states]
        h0, c0 = [*initial, None, None][:2]
        operator = torch.ops.attn.recurrent.default
        x, *final = operator(x, h0, c0, *matrices, bias, lengths, cell=cell)
        finals.append(final)
    return x, [torch.cat(parts) for parts in zip(*finals, strict=True)]


def _batch_of(x: Tensor) -> int:
    if x.dim() != 3:
        raise ValueError(
            "a PackedSequence that was made before the model can't be an input of it: its size "
            "depends on the data. Pass the padded batch and the lengths, and pack in the model"
        )
    return x.shape[1]


def _lengths(sizes: Tensor, batch: int) -> Tensor:
    """(B,) from the number of sequences that reach each step (T,), longest first."""
    return (sizes[None, :] > torch.arange(batch)[:, None]).sum(1)


def _pack(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Stands in for packing: (T, B, …) as it was, and how many sequences reach each step (T,)."""
    x = x.transpose(0, 1) if batch_first else x
    return x, (lengths[None, :] > torch.arange(x.shape[0])[:, None]).sum(1)


def _pad(
    x: Tensor, sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Stands in for unpacking; steps beyond a sequence's end become `padding_value`.

    Without a `total_length` there are as many steps as the longest sequence has, which only a run
    tells.
    """
    caller = sys._getframe(1).f_locals
    is_longest = "total_length" in caller and caller["total_length"] is None
    lengths = _lengths(sizes, x.shape[1])
    steps, extra = x.shape[0], total_length - x.shape[0]
    valid = torch.arange(steps)[:, None] < lengths[None, :]
    x = torch.where(valid.reshape(*valid.shape, *[1] * (x.dim() - 2)), x, padding_value)
    if is_longest:
        longest = lengths.max().item()
        fits: Any = torch._check
        fits(longest <= steps)
        x = x[:longest]
    elif extra != 0:
        tail = x.new_full((extra, *x.shape[1:]), padding_value)
        x = torch.cat([x, tail])
    return x.transpose(0, 1) if batch_first else x, lengths


def _lstm_cell(
    x: Tensor, states: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
) -> tuple[Tensor, Tensor]:
    hidden, memory = states
    gates = linear(x, w_ih, b_ih) + linear(hidden, w_hh, b_hh)
    enter, forget, candidate, leave = gates.chunk(4, -1)
    memory = torch.sigmoid(forget) * memory + torch.sigmoid(enter) * torch.tanh(candidate)
    return torch.sigmoid(leave) * torch.tanh(memory), memory


def _gru_cell(
    x: Tensor, hidden: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
) -> Tensor:
    reset, update, new = linear(x, w_ih, b_ih).chunk(3, -1)
    hidden_reset, hidden_update, hidden_new = linear(hidden, w_hh, b_hh).chunk(3, -1)
    candidate = torch.tanh(new + torch.sigmoid(reset + hidden_reset) * hidden_new)
    kept = torch.sigmoid(update + hidden_update)
    return candidate + kept * (hidden - candidate)


def _rnn_cell(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def cell(
        x: Tensor, hidden: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
    ) -> Tensor:
        return activation(linear(x, w_ih, b_ih) + linear(hidden, w_hh, b_hh))

    return cell
