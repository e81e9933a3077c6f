"""The interpreter learns dims from its inputs and says which input doesn't fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._sympy.functions import FloorDiv

from attngraph.checks.traced import _typed
from attngraph.errors import IRError
from attngraph.ir import Graph, TensorType, Value, interpret, parse
from attngraph.ir.dims import symbol
from attngraph.ir.interpreter import bind_dims


def _graph(*lines: str) -> Graph:
    return parse("graph @main {\n" + "\n".join(lines) + "\n}")


def test_dims_are_read_off_the_inputs() -> None:
    graph = _graph(
        "dim batch = 3 in 1..",
        "dim seq = 5 in 1..",
        "input %x : f32[batch, seq]",
        "%a = aten.full() {size = [seq, 2 * batch + 1], fill_value = 1.0}",
        "return %a",
    )
    assert interpret(graph, [torch.zeros(3, 5)])[0].shape == (5, 7)
    assert interpret(graph, [torch.zeros(1, 2)])[0].shape == (2, 3)


@pytest.mark.parametrize(
    ("dim", "size", "seq"),
    [
        (symbol("seq"), 4, 4),
        (symbol("seq") + 3, 4, 1),
        (symbol("seq") + 4, 4, 0),
        (2 * symbol("seq"), 8, 4),
    ],
    ids=str,
)
def test_an_expression_is_solved_for_its_one_unknown(dim: Any, size: int, seq: int) -> None:
    sizes: dict[str, int] = {}
    bind_dims(sizes, TensorType(torch.float32, (dim,)), [size], "Input x")
    assert sizes == {"seq": seq}


def test_what_several_sizes_give_tells_none() -> None:
    sizes: dict[str, int] = {}
    dim: Any = FloorDiv(symbol("seq") + 3, 4) - 1
    bind_dims(sizes, TensorType(torch.float32, (dim,)), [2], "Input x")
    assert sizes == {}
    with pytest.raises(IRError, match=r"has shape \[2\] where"):
        bind_dims({"seq": 4}, TensorType(torch.float32, (dim,)), [2], "Input x")


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((3, 5), "has rank 2 where"),
        ((4, 5, 7), "has shape .* where"),
        ((4, 4, 4), "has shape .* where"),
        ((3, 5, 4), "has size 3 where .* needs 2[*]seq"),
    ],
)
def test_an_input_that_does_not_fit_is_named(shape: tuple[int, ...], reason: str) -> None:
    graph = _graph(
        "dim seq = 5 in 1..",
        "input %x : f32[2*seq, 5, 4]",
        "return %x",
    )
    with pytest.raises(IRError, match=f"Input x {reason}"):
        interpret(graph, [torch.zeros(shape)])


def test_two_inputs_must_agree_on_a_dim() -> None:
    graph = _graph("dim seq = 5 in 1..", "input %x : f32[seq]", "input %y : f32[seq]", "return %y")
    with pytest.raises(IRError, match="Input y has shape"):
        interpret(graph, [torch.zeros(3), torch.zeros(4)])
    with pytest.raises(IRError, match="1 inputs were given where 2 are expected"):
        interpret(graph, [torch.zeros(3)])


def test_a_weight_without_data_is_named_and_can_be_given() -> None:
    graph = _graph(
        "input %x : f32[2]",
        "parameter %w : f32[2]",
        "%a = aten.mul.Tensor(%x, %w)",
        "return %a",
    )
    with pytest.raises(IRError, match="%w has no data"):
        interpret(graph, [torch.ones(2)])
    (result,) = interpret(graph, [torch.ones(2)], constants={"w": torch.tensor([2.0, 3.0])})
    assert result.tolist() == [2.0, 3.0]


def test_a_runtime_size_is_known_to_later_nodes() -> None:
    graph = _graph(
        "input %x : i64[6]",
        "%a = aten.nonzero(%x) : i64[u0, 1]",
        "%b = aten.full() {size = [u0 + 1], fill_value = 1} : i64[u0 + 1]",
        "return %b",
    )
    assert interpret(graph, [torch.tensor([0, 1, 1, 0, 0, 1])])[0].shape == (4,)


def test_a_runtime_scalar_is_known_to_later_nodes() -> None:
    graph = _graph(
        "input %x : i64[]",
        "%n = aten.item(%x) : int(u0)",
        "%a = aten.arange() {end = u0} : i64[u0]",
        "return %a",
    )
    assert interpret(graph, [torch.tensor(3)])[0].tolist() == [0, 1, 2]


def test_an_unknown_size_is_an_error_and_not_a_guess() -> None:
    graph = _graph(
        "dim seq = 5 in 1..",
        "input %x : f32[2]",
        "%a = aten.full() {size = [seq], fill_value = 1.0} : f32[seq]",
        "return %a",
    )
    with pytest.raises(IRError, match="size of seq is not known"):
        interpret(graph, [torch.zeros(2)])


def test_the_observer_sees_every_computed_value_in_order() -> None:
    graph = _graph(
        "input %x : f32[4]",
        "%a, %b = aten.split.Tensor(%x) {split_size = 2}",
        "%c = aten.add.Tensor(%a, %b)",
        "return %c",
    )
    seen: list[tuple[str, list[float]]] = []

    def observe(value: Value, result: torch.Tensor) -> None:
        seen.append((value.name, result.tolist()))

    interpret(graph, [torch.tensor([1.0, 2.0, 3.0, 4.0])], observe=observe)
    assert seen == [("a", [1.0, 2.0]), ("b", [3.0, 4.0]), ("c", [4.0, 6.0])]


def test_inputs_and_constants_may_be_returned() -> None:
    graph = _graph("input %x : f32[1]", "constant %w = [2.0] : f32[1]", "return %w, %x, %x")
    assert [t.item() for t in interpret(graph, [torch.ones(1)])] == [2.0, 1.0, 1.0]


def test_an_attention_over_an_empty_batch_is_empty() -> None:
    graph = _graph(
        "dim images = 3 in 0..",
        "input %q : f32[images, 5, 8]",
        "input %mask : bool[images, 1, 5, 5]",
        "%a = attn.attention(%q, %q, %q, none, %mask) {heads = 2, kv_heads = 2, scale = 0.5}",
        "return %a",
    )
    empty = torch.zeros(0, 5, 8), torch.zeros(0, 1, 5, 5, dtype=torch.bool)
    assert interpret(graph, empty)[0].shape == (0, 5, 8)


def test_a_value_of_another_rank_than_its_type_is_told() -> None:
    """A check at other sizes counts it as a graph that isn't the model, as any other shape."""
    graph = parse("graph @main {\n  input %x : f32[2, 3]\n  return %x\n}")
    with pytest.raises(IRError, match=r"%x has shape \[2, 3, 1\], not"):
        _typed({})(graph.inputs[0], torch.zeros(2, 3, 1))
