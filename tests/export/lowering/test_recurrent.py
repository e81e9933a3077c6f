"""nn.RNN, nn.LSTM and nn.GRU: one ONNX op per layer, at any length, packed sequences included."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree

import attngraph
from attngraph.errors import CaptureError
from attngraph.export.lowering.lower import lower
from attngraph.ir import interpret, parse
from tests.export.lowered import run, session_of

pytestmark = pytest.mark.wide

BATCH, SEQ = Dim("batch"), Dim("seq", min=2, max=64)
OPERATORS = {nn.RNN: "RNN", nn.LSTM: "LSTM", nn.GRU: "GRU"}


def operators(module: nn.Module, args: tuple[Any, ...], dynamic_shapes: Any = None) -> Counter[str]:
    """How often the optimised model, which is in its error budget, has each ONNX operator."""
    optimized = attngraph.optimize(module, args, dynamic_shapes=dynamic_shapes)
    return Counter(node.op_type for node in optimized.model.graph)


@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_stack_is_one_op_per_layer_at_any_length(
    kind: type[nn.RNNBase], batch_first: bool, bidirectional: bool
) -> None:
    module = kind(4, 6, 2, batch_first=batch_first, bidirectional=bidirectional)
    shape = {0: BATCH, 1: SEQ} if batch_first else {0: SEQ, 1: BATCH}
    found = operators(module, (torch.randn(3, 5, 4),), (shape,))
    assert found[OPERATORS[kind]] == 2
    assert not {"Loop", "Scan", "MatMul", "Gemm"} & found.keys()
    assert found["Shape"] == 1  # that of the input, whose length is checked


@pytest.mark.parametrize("kind", OPERATORS)
def test_a_given_state_is_used(kind: type[nn.RNNBase]) -> None:
    state = torch.randn(2, 3, 6)
    hx = (state, torch.randn(2, 3, 6)) if kind is nn.LSTM else state
    found = operators(kind(4, 6, 2, bias=False), (torch.randn(5, 3, 4), hx))
    assert found[OPERATORS[kind]] == 2


def test_relu_cells_and_sequences_without_a_batch() -> None:
    assert operators(nn.RNN(4, 6, nonlinearity="relu"), (torch.randn(5, 4),))["RNN"] == 1
    assert operators(nn.GRU(4, 6), (torch.randn(5, 4),), ({0: SEQ},))["GRU"] == 1


class Packed(nn.Module):
    """The usual way round padding: pack, run, unpack."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.layers = kind(4, 6, 2, batch_first=True, bidirectional=True)
        self.options = options

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, state: Any = None) -> Any:
        lengths = lengths.clamp(max=x.shape[1])
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, final = self.layers(packed, state)
        options = {"total_length": x.shape[1], **self.options}
        return *pad_packed_sequence(y, batch_first=True, **options), final


@pytest.mark.parametrize("kind", OPERATORS)
def test_packed_sequences_go_in_as_lengths(kind: type[nn.RNNBase]) -> None:
    args = (torch.randn(3, 5, 4), torch.tensor([3, 5, 2]))
    found = operators(Packed(kind), args, ({0: BATCH, 1: SEQ}, {0: BATCH}))
    assert found[OPERATORS[kind]] == 2


def test_packed_sequences_with_a_state_and_another_padding_value() -> None:
    args = (torch.randn(3, 5, 4), torch.tensor([3, 5, 2]), torch.randn(4, 3, 6))
    assert operators(Packed(nn.GRU, padding_value=7.0), args)["GRU"] == 2
    assert operators(Packed(nn.GRU, total_length=8), args)["GRU"] == 2


@pytest.mark.parametrize("lengths", [[3, 5, 2], [3, 4, 2]], ids=["whole", "shorter"])
def test_as_many_steps_as_the_longest_sequence_has(lengths: list[int]) -> None:
    """A run has fewer than the axis where no sequence is as long."""
    module = Packed(nn.GRU, total_length=None).eval()
    args = (torch.randn(3, 5, 4), torch.tensor(lengths))
    shapes = ({0: BATCH, 1: SEQ}, {0: BATCH})
    compiled = attngraph.optimize(module, args, dynamic_shapes=shapes)
    for longest, steps in ((7, 7), (4, 7), (2, 2), (1, 6)):
        asked = torch.randn(2, steps, 4), torch.tensor([1, longest])
        found, expected = compiled(*asked), module(*asked)
        assert found[0].shape == (2, longest, 12)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_sequences_that_have_to_be_sorted_stay_so_at_other_sizes() -> None:
    class Sorted(Packed):
        def forward(self, x: torch.Tensor, lengths: torch.Tensor, state: Any = None) -> Any:
            packed = pack_padded_sequence(x, lengths, batch_first=True)
            return pad_packed_sequence(self.layers(packed)[0], batch_first=True)[0]

    module = Sorted(nn.GRU).eval()
    args = (torch.randn(2, 5, 4), torch.tensor([5, 3]))
    shapes = ({0: BATCH, 1: SEQ}, {0: BATCH})
    compiled = attngraph.optimize(module, args, dynamic_shapes=shapes)
    asked = torch.randn(4, 8, 4), torch.tensor([7, 7, 2, 1])
    torch.testing.assert_close(compiled(*asked), module(*asked), rtol=1e-5, atol=1e-5)


def test_projections_are_refused() -> None:
    with pytest.raises(CaptureError, match="proj_size"):
        attngraph.optimize(nn.LSTM(4, 6, proj_size=3), (torch.randn(5, 3, 4),))


class Steps(nn.Module):
    """A cell of torch.nn in a Python loop over a fixed number of steps."""

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: torch.Tensor) -> Any:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state


@pytest.mark.parametrize(
    "cell",
    [nn.LSTMCell(4, 6), nn.GRUCell(4, 6), nn.RNNCell(4, 6), nn.RNNCell(4, 6, nonlinearity="relu")],
)
def test_cells_in_a_loop(cell: nn.RNNCellBase) -> None:
    found = operators(Steps(cell), (torch.randn(3, 5, 4),), ({0: BATCH},))
    assert found[type(cell).__name__.removesuffix("Cell")] == 1


@pytest.mark.parametrize("directions", [1, 2])
def test_a_gru_that_resets_first_agrees_with_onnxruntime(directions: int) -> None:
    sizes = {"weight": (18, 4), "recurrence": (18, 6), "bias": (36,)}
    lines = [
        f"  parameter %{name} : f32[{directions}, {', '.join(map(str, shape))}]\n"
        for name, shape in sizes.items()
    ]
    text = (
        "graph @main {\n  input %x : f32[5, 3, 4]\n  input %lengths : i64[3]\n"
        + "".join(lines)
        + "  %y, %h = attn.recurrent(%x, none, none, %weight, %recurrence, %bias, %lengths) "
        f'{{cell = "gru_reset_first"}} : f32[5, 3, {6 * directions}], f32[{directions}, 3, 6]\n'
        '  return %y as "y", %h as "h"\n}\n'
    )
    torch.manual_seed(0)
    weights = {name: torch.randn(directions, *shape) / 2 for name, shape in sizes.items()}
    graph = parse(text, weights)
    args = [torch.randn(5, 3, 4), torch.tensor([5, 2, 3])]
    found = run(session_of(lower(graph)), args)
    for one, other in zip(found, interpret(graph, args), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_layers_are_themselves_again_after_a_capture() -> None:
    before = (nn.LSTM.forward, torch._VF.lstm_cell, torch._VF._pack_padded_sequence)
    attngraph.capture(nn.LSTM(4, 6), (torch.randn(5, 3, 4),))
    with pytest.raises(CaptureError):
        attngraph.capture(nn.LSTM(4, 6, proj_size=3), (torch.randn(5, 3, 4),))
    after = (nn.LSTM.forward, torch._VF.lstm_cell, torch._VF._pack_padded_sequence)
    assert before == after


class AfterAttention(nn.Module):
    """A layer over weights that are NaN in the steps that a mask hides."""

    def __init__(self, kind: Any, *, packed: bool) -> None:
        super().__init__()
        self.layers, self.packed = kind(4, 3, bidirectional=True, batch_first=True), packed

    def forward(self, x: torch.Tensor, seen: torch.Tensor, lengths: torch.Tensor) -> Any:
        weights = x.masked_fill(seen[..., None] == 0, -torch.inf).softmax(-1)
        if not self.packed:
            return self.layers(weights)
        lengths = lengths.clamp(max=x.shape[1])
        packed = pack_padded_sequence(weights, lengths, batch_first=True, enforce_sorted=False)
        y, final = self.layers(packed)
        return *pad_packed_sequence(y, batch_first=True, total_length=x.shape[1]), final


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("kind", OPERATORS)
def test_nan_stays_nan_from_the_step_on_that_has_it(kind: type[nn.RNNBase], packed: bool) -> None:
    torch.manual_seed(0)
    model = AfterAttention(kind, packed=packed).eval()
    x, lengths = torch.randn(4, 5, 4), torch.tensor([5, 3, 2, 4])
    dims = {0: BATCH, 1: SEQ}
    found = attngraph.optimize(
        model,
        (x, torch.ones(4, 5, dtype=torch.int64), lengths),
        dynamic_shapes=(dims, dims, {0: BATCH}),
    )
    seen = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 1], [1, 0, 1, 1, 1], [0, 1, 1, 1, 0]])
    given = (x, seen, lengths)
    with torch.no_grad():
        expected = model(*given)
    assert any(bool(each.isnan().any()) for each in pytree.tree_leaves(expected))
    torch.testing.assert_close(
        pytree.tree_leaves(found(*given)), pytree.tree_leaves(expected), equal_nan=True
    )
