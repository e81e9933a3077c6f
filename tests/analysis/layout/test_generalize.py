"""Shapes that are read with unknowns in the place of large sizes, against the ops at small ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attngraph.analysis.layout.generalize import RULES, generalized
from attngraph.ir import Builder, Graph, TensorType
from attngraph.ir.dims import substitute
from attngraph.ir.ops import call, op_def

_S, _T, _F = 30, 42, 64  # large sizes: each becomes an unknown

# (op, attributes, shapes of the operands, which begin with "index" for integers, whether any size
# of a result stays unknown)
SAMPLES: list[tuple[Any, ...]] = [
    ("aten.relu", {}, [(2, _S)], True),
    ("aten.add.Tensor", {}, [(2, _S, _F), (_F,)], True),
    ("aten.layer_norm", {"normalized_shape": [_F]}, [(2, _S, _F), (_F,), (_F,)], True),
    ("aten.permute", {"dims": [0, -1, 1]}, [(2, _S, _F)], True),
    ("aten.transpose.int", {"dim0": -1, "dim1": 0}, [(2, _S, _F)], True),
    ("aten.t", {}, [(_S, _F)], True),
    ("aten.mT", {}, [(2, _S, _F)], True),
    ("aten.reshape", {"shape": [2, _S, 4, 16]}, [(2, _S, _F)], True),
    ("aten.reshape", {"shape": [2 * _S, _F]}, [(2, _S, _F)], True),
    ("aten.view", {"size": [2 * _S, _F]}, [(2, _S, _F)], True),
    ("aten.unflatten.int", {"dim": -1, "sizes": [2, 32]}, [(_S, _F)], True),
    ("aten.unsqueeze", {"dim": 1}, [(_S, _F)], True),
    ("aten.expand", {"size": [4, _S, _F]}, [(_S, 1)], True),
    ("aten.select.int", {"dim": 1, "index": -1}, [(2, _S, _F)], True),
    ("aten.select.int", {"dim": 1, "index": 20}, [(2, _S, 4)], False),
    ("aten.select_scatter", {"dim": 0, "index": 2}, [(_S, _F), (_F,)], True),
    ("aten.slice_scatter", {"dim": 0, "start": 2, "end": 4}, [(5, _F), (2, _F)], True),
    ("aten.slice_scatter", {"dim": 0, "start": 2, "end": 22}, [(_S,), (20,)], False),
    ("aten.unbind.int", {"dim": 0}, [(3, _S, _F)], True),
    ("aten.slice.Tensor", {"dim": 1, "start": 1, "end": _S}, [(2, _S)], True),
    ("aten.slice.Tensor", {"dim": 1, "start": 0, "end": _S - 1}, [(2, _S)], True),
    ("aten.slice.Tensor", {"dim": 1, "start": 0, "end": 20}, [(2, _S)], True),
    ("aten.slice.Tensor", {"dim": 1, "start": 9, "end": 29}, [(2, _S)], False),
    ("aten.split_with_sizes", {"split_sizes": [32, 32], "dim": 1}, [(_S, _F)], True),
    ("aten.split.Tensor", {"split_size": 32, "dim": 1}, [(_S, _F)], True),
    ("aten.chunk", {"chunks": 2, "dim": 1}, [(_S, _F)], True),
    ("aten.cat", {"dim": 1}, [(2, _S), (2, _T)], True),
    ("aten.stack", {"dim": 1}, [(2, _S), (2, _S)], True),
    ("aten.repeat_interleave.self_int", {"repeats": 3, "dim": 0}, [(_S, 2)], True),
    ("aten.matmul", {}, [(2, _S, _F), (_F, _T)], True),
    ("aten.mm", {}, [(_S, _F), (_F, _T)], True),
    ("aten.bmm", {}, [(2, _S, _F), (2, _F, _T)], True),
    ("aten.linear", {}, [(2, _S, _F), (_T, _F), (_T,)], True),
    ("aten.addmm", {}, [(_T,), (_S, _F), (_F, _T)], True),
    ("aten.baddbmm", {}, [(2, 1, _T), (2, _S, _F), (2, _F, _T)], True),
    ("aten.einsum", {"equation": "bsf,tf->bst"}, [(2, _S, _F), (_T, _F)], True),
    ("aten.sum.dim_IntList", {"dim": [1], "keepdim": True}, [(2, _S, _F)], True),
    ("aten.amax", {"dim": [-1]}, [(_S, _F)], True),
    ("aten.max.dim", {"dim": 0}, [(_S, _F)], True),
    ("aten.embedding", {}, [(_T, _F), ("index", 2, _S)], True),
    ("aten.index_select", {"dim": 1}, [(2, _F), ("index", _S)], True),
    ("aten.gather", {"dim": 1}, [(_S, 5), ("index", _S, _T)], True),
    ("aten.index.Tensor", {}, [(5, _F), ("index", _S)], True),
    ("aten.scaled_dot_product_attention", {}, [(2, 4, _S, 8), (2, 4, _T, 8), (2, 4, _T, 8)], True),
    (
        "attn.attention",
        {"heads": 4, "kv_heads": 2, "scale": 1.0},
        [(2, _S, 80), (2, _T, 40), (2, _T, 40)],
        True,
    ),
    (
        "attn.linear_attention",
        {"heads": 2, "kv_heads": 2, "scale": 1.0},
        [(2, 5, 80), (2, 5, 80), (2, 5, 40)],
        True,
    ),
    (
        "attn.generalized_delta_rule",
        {"heads": 2, "scale": 1.0},
        [(2, 5, 80), (2, 5, 80), (2, 5, 40), (2, 5, 80), (2, 5, 80)],
        True,
    ),
    (
        "attn.masked_softmax",
        {"queries": _S, "causal": True},
        [(2, 4, 5, _T), (1, 4, _S, _T), (2, 1, 1, _T)],
        True,
    ),
    ("attn.rotary", {"heads": 4}, [(2, _S, 32), (2, _S, 4), (2, _S, 4)], True),
    ("aten.conv2d", {"stride": [8, 8]}, [(2, 3, 160, 160), (20, 3, 8, 8)], True),
    ("aten.conv1d", {"padding": [3], "groups": 48}, [(2, 48, _S), (48, 1, 4), (48,)], True),
    ("attn.causal_conv", {"dilation": 2}, [(2, 48, _S), (48, 1, 4)], True),
    ("aten.cumsum", {"dim": 1}, [(2, _S)], True),
    ("aten.view_as_complex", {}, [(_S, 2)], True),
    ("aten.arange", {"end": _S}, [], True),
    ("aten.full", {"size": [2, _S], "fill_value": 1.0}, [], True),
    ("aten.new_zeros", {"size": [2, _S]}, [(3,)], True),
    ("aten.std.correction", {"dim": [1], "keepdim": True}, [(2, _S, _F)], True),
    ("aten.norm.ScalarOpt_dim", {"p": 2.0, "dim": [1]}, [(2, _S, _F)], True),
    ("aten.scatter.value", {"dim": 1, "value": 1.0}, [(2, _S), ("index", 2, _S)], False),
    ("aten.roll", {"shifts": [1], "dims": [0]}, [(_S,)], False),
    ("aten.constant_pad_nd", {"pad": [1, 1]}, [(_S,)], False),
]


def _drawn(shape: Any) -> torch.Tensor:
    if shape and shape[0] == "index":
        return torch.zeros(shape[1:], dtype=torch.int64)
    return torch.zeros(shape)


@pytest.mark.parametrize(
    ("op", "attrs", "shapes", "free"), SAMPLES, ids=[f"{s[0]}-{s[1]}" for s in SAMPLES]
)
def test_a_node_has_the_shapes_that_are_read(
    op: str, attrs: dict[str, Any], shapes: list[Any], free: bool
) -> None:
    """At several sizes of the unknowns, with the attributes that follow them."""
    operands, graph = list(map(_drawn, shapes)), Graph()
    leaves = [graph.add_input("x", TensorType(t.dtype, tuple(t.shape))) for t in operands]
    node = Builder(graph).node(op, *leaves, **attrs)
    found = generalized(leaves, [node], [], [], [])
    if found is None:
        assert not free
        return
    unknown = [value for value in node.outputs if any(map(_is_unknown, found.shapes[value]))]
    assert bool(unknown) == free
    for least in (3, 4, 7):
        sizes = {name: least + 2 * at for at, name in enumerate(found.infos)}
        inputs = [
            operand.new_zeros([int(substitute(dim, sizes)) for dim in found.shapes[leaf]])
            for operand, leaf in zip(operands, leaves, strict=True)
        ]
        written = {**node.attrs, **_at(found.attrs.get(node, {}), sizes)}
        results = call(op_def(op), inputs, written)
        for value, result in zip(node.outputs, results, strict=True):
            assert tuple(result.shape) == substitute(found.shapes[value], sizes)


def _at(attrs: Any, sizes: dict[str, int]) -> dict[str, Any]:
    return {name: substitute(value, sizes) for name, value in attrs.items()}


def _is_unknown(dim: Any) -> bool:
    return not isinstance(dim, int)


def test_every_rule_that_reads_shapes_has_a_sample() -> None:
    given = {sample[0] for sample in SAMPLES}
    alike = [{op for op, rule in RULES.items() if rule is kept} for kept in set(RULES.values())]
    assert not [ops for ops in alike if ops.isdisjoint(given)]
