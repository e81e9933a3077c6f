"""The op table: how a call becomes inputs and attributes, and comes back as a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attngraph.errors import IRError
from attngraph.ir import Graph, TensorType
from attngraph.ir.ops import (
    REQUIRED,
    attribute,
    call,
    flatten_call,
    input_of,
    op_def,
    op_name,
    registered_ops,
)

aten = torch.ops.aten


def _seeded(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


X, Y = _seeded(2, 4), _seeded(2, 4) + 1
CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.add.Tensor, (X, Y), {"alpha": 2}),
    (aten.cat.default, ([X, Y, X], -1), {}),
    (aten.stack.default, ([X, Y],), {}),
    (aten.index.Tensor, (X, [None, torch.tensor([0, 3])]), {}),
    (aten.layer_norm.default, (X, [4], None, Y[0]), {"eps": 1e-3}),
    (aten.linear.default, (X, Y), {}),
    (aten.topk.default, (X, 2), {"largest": False}),
    (aten.clamp.default, (X, None, 0.5), {}),
    (aten.full.default, ([2, 3], 7), {"dtype": torch.int32}),
    (aten.arange.start_step, (1, 9, 2), {}),
    (aten.split_with_sizes.default, (X, [1, 3], 1), {}),
    (aten.scaled_dot_product_attention.default, (X, Y, Y), {"is_causal": True}),
]


@pytest.mark.parametrize(
    ("function", "args", "kwargs"), CALLS, ids=lambda c: getattr(c, "name", "")
)
def test_a_call_flattens_and_comes_back(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    definition = op_def(op_name(function))
    inputs, attrs = flatten_call(definition, args, kwargs)
    assert all(value is None or isinstance(value, Tensor) for value in inputs)
    assert not any(isinstance(value, Tensor) for value in attrs.values())
    expected = function(*args, **kwargs)
    expected = expected if isinstance(expected, (tuple, list)) else [expected]
    results = call(definition, inputs, attrs)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_several_lists_keep_their_lengths() -> None:
    lstm = torch.nn.LSTM(4, 3, 1)
    state = [torch.zeros(1, 2, 3), torch.ones(1, 2, 3)]
    weights = [p.detach() for p in lstm.parameters()]
    args = (_seeded(5, 2, 4), state, weights, True, 1, 0.0, False, False, False)
    definition = op_def("aten.lstm.input")
    inputs, attrs = flatten_call(definition, args, {})
    assert (attrs["hx"], attrs["params"]) == (2, 4)
    expected = aten.lstm.input(*args)
    assert all(map(torch.equal, call(definition, inputs, attrs), expected))


def test_defaults_are_not_stored_and_still_read() -> None:
    _, attrs = flatten_call(op_def("aten.softmax.int"), (X, -1, None), {})
    assert attrs == {"dim": -1}
    graph = Graph()
    x = graph.add_input("x", TensorType(torch.float32, (2, 4)))
    node = graph.create("aten.add.Tensor", [x, x], types=[x.type])
    assert attribute(node, "alpha") == 1
    with pytest.raises(IRError, match="has no argument 'beta'"):
        attribute(node, "beta")
    with pytest.raises(IRError, match="lacks its attribute 'dim'"):
        attribute(graph.create("aten.softmax.int", [x], types=[x.type]), "dim")
    assert op_def("aten.softmax.int").arg("dim").default is REQUIRED


def test_one_is_not_a_default_of_true() -> None:
    _, attrs = flatten_call(op_def("aten.add.Tensor"), (X, Y), {"alpha": True})
    assert attrs == {"alpha": True}


def test_inputs_are_found_by_name() -> None:
    graph = Graph()
    x, y = (graph.add_input(name, TensorType(torch.float32, (2, 4))) for name in "xy")
    cat = graph.create("aten.cat", [x, y], types=[x.type])
    assert input_of(cat, "tensors") == [x, y]
    norm = graph.create("aten.layer_norm", [x, None, y], {"normalized_shape": [4]}, types=[x.type])
    assert input_of(norm, "weight") is None
    assert input_of(norm, "bias") is y
    assert input_of(graph.create("aten.linear", [x, y], types=[x.type]), "bias") is None


@pytest.mark.parametrize("name", ["aten.no_such_op", "aten.add.NoOverload", "nowhere.op", "add"])
def test_an_unknown_op_is_named(name: str) -> None:
    with pytest.raises(IRError, match=f"{name} is not an operator of torch or of attngraph"):
        op_def(name)


def test_the_number_of_outputs_is_known_where_it_is_fixed() -> None:
    assert op_def("aten.relu").outputs == 1
    assert op_def("aten.topk").outputs == 2
    assert op_def("aten.chunk").outputs is None
    assert op_def("attn.attention").outputs is None


def test_a_reference_is_an_op_by_its_signature() -> None:
    definition = registered_ops()["attn.attention"]
    kinds = [(arg.name, arg.kind, arg.optional) for arg in definition.args[:5]]
    assert kinds[2:] == [
        ("value", "tensor", False),
        ("bias", "tensor", True),
        ("mask", "tensor", True),
    ]
    assert definition.arg("heads").default is REQUIRED
    assert definition.arg("causal").default is False
    with pytest.raises(IRError, match=r"attn\.attention lacks its attribute 'heads'"):
        call(definition, [_seeded(1, 2, 4)] * 3, {})


def test_ops_that_ask_for_packed_tensors_get_them() -> None:
    across = X.t()
    views: dict[str, dict[str, Any]] = {
        "aten.view": {"size": [8]},
        "aten.view.dtype": {"dtype": torch.int16},
    }
    for name, attrs in views.items():
        (result,) = call(op_def(name), [across], attrs)
        (expected,) = call(op_def(name), [across.contiguous()], attrs)
        assert torch.equal(result, expected)
    (result,) = call(op_def("aten.view_as_complex"), [_seeded(2, 3).t()], {})
    assert result.shape == (3,)
