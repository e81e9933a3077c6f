"""Each batching rule against its op: run once for each index of an axis, and once for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pytest
import torch

from attngraph.analysis.rows import batching
from attngraph.analysis.rows.batching import batched, resized, rule_of, tracks
from attngraph.analysis.rows.row_wise import linked, row_operands
from attngraph.ir import Builder, Graph, Node, TensorType
from attngraph.ir.ops import call, op_def

_NEW = 5  # the size of a new axis: no dim of a sample has it
_X, _INDEX = (2, 3, 4), "index"

# (op, attributes, shapes of the operands); a shape that begins with "index" is of integers
SAMPLES: list[tuple[Any, ...]] = [
    ("aten.add.Tensor", {}, _X, _X),
    ("aten.add.Tensor", {}, _X, (4,)),
    ("aten.mul.Tensor", {}, (2, 1, 4), (3, 4)),
    ("aten.relu", {}, _X),
    ("aten._to_copy", {"dtype": torch.float32}, _X),
    ("aten.linear", {}, _X, (6, 4), (6,)),
    ("aten.linear", {}, (4,), (6, 4)),
    ("attn.rms_norm", {"eps": 0.1}, _X, (4,)),
    ("attn.bias_gelu", {}, _X, (4,)),
    ("attn.quick_gelu", {}, _X),
    ("aten.layer_norm", {"normalized_shape": [4]}, _X, (4,), (4,)),
    ("aten.layer_norm", {"normalized_shape": [3, 4]}, _X),
    ("aten.rms_norm", {"normalized_shape": [4]}, _X, (4,)),
    ("attn.skip_layer_norm", {"eps": 0.1}, _X, _X, (4,), (4,)),
    ("attn.skip_rms_norm", {"eps": 0.1}, _X, _X, (4,)),
    ("attn.rotary", {"heads": 2}, (2, 3, 8), (2, 3, 2), (2, 3, 2)),
    ("attn.rotary", {"heads": 2}, (2, 3, 8), (1, 3, 2), (1, 3, 2)),
    ("aten.softmax.int", {"dim": 1}, _X),
    ("aten.softmax.int", {"dim": -1}, _X),
    ("aten._softmax", {"dim": 2, "half_to_float": False}, _X),
    ("aten.log_softmax.int", {"dim": 0}, _X),
    ("aten.cumsum", {"dim": 1}, _X),
    ("aten.cat", {"dim": 1}, _X, (2, 6, 4)),
    ("aten.cat", {"dim": -1}, _X, (2, 3, 1)),
    ("aten.glu", {"dim": -1}, _X),
    ("aten.slice.Tensor", {"dim": 1, "start": 1, "end": 3}, _X),
    ("aten.split.Tensor", {"split_size": 2, "dim": -1}, _X),
    ("aten.split_with_sizes", {"split_sizes": [1, 2], "dim": 1}, _X),
    ("aten.chunk", {"chunks": 2, "dim": 2}, _X),
    ("aten.repeat_interleave.self_int", {"repeats": 2, "dim": 1}, _X),
    ("aten.repeat_interleave.self_int", {"repeats": 3, "dim": -1}, _X),
    ("aten.repeat_interleave.self_int", {"repeats": 2}, _X),
    ("aten.flip", {"dims": [0, -1]}, _X),
    ("aten.roll", {"shifts": [1, 2], "dims": [1, -1]}, _X),
    ("aten.roll", {"shifts": [1]}, _X),
    ("aten.repeat", {"repeats": [1, 2, 1]}, _X),
    ("aten.repeat", {"repeats": [2, 1, 1]}, (3, 4)),
    ("aten.select.int", {"dim": 1, "index": 2}, _X),
    ("aten.select.int", {"dim": -1, "index": -1}, _X),
    ("aten.unbind.int", {"dim": 1}, _X),
    ("aten.mean.dim", {"dim": [1], "keepdim": True}, _X),
    ("aten.sum.dim_IntList", {"dim": [0, -1]}, _X),
    ("aten.amax", {"dim": [-1], "keepdim": True}, _X),
    ("aten.amin", {"dim": []}, _X),
    ("aten.prod.dim_int", {"dim": 1}, _X),
    ("aten.linalg_vector_norm", {"dim": [-1], "keepdim": True}, _X),
    ("aten.linalg_vector_norm", {"ord": 1, "dim": [0, 2]}, _X),
    ("aten.logsumexp", {"dim": [1]}, _X),
    ("aten.any.dim", {"dim": 1}, _X),
    ("aten.all.dim", {"dim": -1, "keepdim": True}, _X),
    ("aten.var.correction", {"dim": [-1], "correction": 0}, _X),
    ("aten.std.correction", {"dim": [1], "keepdim": True}, _X),
    ("aten.var.dim", {"dim": [1]}, _X),
    ("aten.std.dim", {"dim": [-1], "keepdim": True}, _X),
    ("aten.max.dim", {"dim": 1}, _X),
    ("aten.min.dim", {"dim": -1, "keepdim": True}, _X),
    ("aten.matmul", {}, _X, (4, 6)),
    ("aten.matmul", {}, _X, (2, 4, 6)),
    ("aten.matmul", {}, (3, 4), (2, 4, 6)),
    ("aten.matmul", {}, (4,), (4, 6)),
    ("aten.matmul", {}, _X, (4,)),
    ("aten.mm", {}, (3, 4), (4, 6)),
    ("aten.bmm", {}, _X, (2, 4, 6)),
    ("aten.einsum", {"equation": "bqd,bkd->bqk"}, _X, (2, 5, 4)),
    ("aten.einsum", {"equation": "bqd, dkq -> kqb"}, _X, (4, 5, 3)),
    ("aten.einsum", {"equation": "btt->bt"}, (2, 3, 3)),
    ("aten.einsum", {"equation": "...d,dk->...k"}, _X, (4, 6)),
    ("aten.einsum", {"equation": "bqd,bqd->bqd"}, _X, (2, 1, 4)),
    ("aten.einsum", {"equation": "bqd,d->bq"}, _X, (4,)),
    ("aten.einsum", {"equation": "bqd->"}, _X),
    ("aten.embedding", {}, (9, 4), (_INDEX, 2, 3)),
    ("aten.index.Tensor", {}, (9, 4, 2), (_INDEX, 3)),
    ("aten.index.Tensor", {}, (9,), (_INDEX, 2, 3)),
    ("aten.pad", {"pad": [1, 2]}, _X),
    ("aten.pad", {"pad": [0, 0, 1, 0]}, _X),
    ("aten.constant_pad_nd", {"pad": [0, -1], "value": 1.0}, _X),
    ("aten.slice_scatter", {"dim": 1, "start": 1, "end": 3}, _X, (2, 2, 4)),
    ("aten.select_scatter", {"dim": 1, "index": 2}, _X, (2, 4)),
    ("aten.select_scatter", {"dim": -1, "index": -1}, _X, (2, 3)),
    ("aten.stack", {"dim": 1}, _X, _X),
    ("aten.stack", {"dim": -1}, (2, 3), (2, 3)),
    ("aten.permute", {"dims": [2, 0, 1]}, _X),
    ("aten.permute", {"dims": [0, -1, 1]}, _X),
    ("aten.transpose.int", {"dim0": -1, "dim1": 0}, _X),
    ("aten.t", {}, (2, 3)),
    ("aten.mT", {}, _X),
    ("aten.numpy_T", {}, (2, 3)),
    ("aten.swapaxes", {"axis0": 1, "axis1": 2}, _X),
    ("aten.swapdims", {"dim0": 0, "dim1": 1}, _X),
    ("aten.movedim.int", {"source": 0, "destination": -1}, _X),
    ("aten.movedim.intlist", {"source": [0, 1], "destination": [1, 2]}, _X),
    ("aten.moveaxis.int", {"source": 2, "destination": 0}, _X),
    ("aten.moveaxis.intlist", {"source": [2], "destination": [1]}, _X),
    ("aten.expand", {"size": [2, 3, 4]}, (2, 1, 4)),
    ("aten.expand", {"size": [2, 3, 4]}, (1, 4)),
    ("aten.reshape", {"shape": [2, 3, 2, 2]}, _X),
    ("aten.reshape", {"shape": [6, 4]}, _X),
    ("aten.reshape", {"shape": [3, 2, 4]}, _X),
    ("aten.reshape", {"shape": [2, 2, 1]}, (2, 2)),
    ("aten.view", {"size": [2, 12]}, _X),
    ("aten._unsafe_view", {"size": [2, 12]}, _X),
    ("aten.view_copy", {"size": [2, 12]}, _X),
    ("aten._reshape_copy", {"size": [2, 12]}, _X),
    ("aten.ravel", {}, _X),
    ("aten.unsqueeze", {"dim": 1}, _X),
    ("aten.squeeze", {}, (2, 1, 4)),
    ("aten.squeeze.dim", {"dim": 1}, (2, 1, 4)),
    ("aten.squeeze.dim", {"dim": 1}, _X),
    ("aten.squeeze.dims", {"dim": [1]}, (2, 1, 4)),
    ("aten.flatten.using_ints", {"start_dim": 1, "end_dim": 2}, _X),
    ("aten.unflatten.int", {"dim": 2, "sizes": [2, 2]}, _X),
    ("aten.view_as", {}, _X, (6, 4)),
    ("aten.reshape_as", {}, _X, (2, 12)),
]
_OVER_ALL = (
    ("aten.amin", {"dim": []}, _X),
    ("aten.repeat_interleave.self_int", {"repeats": 2}, _X),
    ("aten.roll", {"shifts": [1]}, _X),
)
_FIXED_RANK = ("attn.rotary", "attn.skip_layer_norm", "attn.skip_rms_norm")
Tensors = Sequence[torch.Tensor]
each_sample = pytest.mark.parametrize("sample", SAMPLES, ids=str)


def _drawn(shape: Sequence[Any]) -> torch.Tensor:
    if shape[0] == _INDEX:
        return torch.randint(0, 9, shape[1:])
    return torch.randn(*shape, dtype=torch.float64)


def _node(sample: tuple[Any, ...]) -> tuple[Node, list[torch.Tensor]]:
    torch.manual_seed(0)
    op, attrs, *shapes = sample
    operands, graph = list(map(_drawn, shapes)), Graph()
    values = [graph.add_input("x", TensorType(t.dtype, tuple(t.shape))) for t in operands]
    return Builder(graph).node(op, *values, **attrs), operands


def _run(op: str, attrs: Mapping[str, Any], operands: Tensors) -> tuple[torch.Tensor, ...]:
    return call(op_def(op), list(operands), attrs)


def _equal(found: Tensors, wanted: Tensors) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_every_rule_has_a_sample() -> None:
    assert {sample[0] for sample in SAMPLES} >= set(batching._RULES)


@each_sample
def test_an_index_along_a_track_is_computed_by_itself(sample: tuple[Any, ...]) -> None:
    """Changing an operand at one index along a tracked axis changes the results there alone."""
    node, operands = _node(sample)
    before, found = _run(node.op, node.attrs, operands), tracks(node)
    if found is None:
        assert node.op == "aten.matmul"  # with a vector
        return
    assert [len(track) for track in found] == [operand.dim() for operand in operands]
    for position, track in enumerate(found):
        for axis, target in enumerate(track):
            if target is None or operands[position].shape[axis] == 1:
                continue
            assert all(r.shape[target] == operands[position].shape[axis] for r in before)
            changed = [operand.clone() for operand in operands]
            there = changed[position].select(axis, 1)
            there.copy_(there.flip(-1) + 1 if there.is_floating_point() else 8 - there)
            after = _run(node.op, node.attrs, changed)
            for old, new in zip(before, after, strict=True):
                others = torch.tensor([i for i in range(old.shape[target]) if i != 1])
                assert torch.equal(
                    old.index_select(target, others), new.index_select(target, others)
                )


@each_sample
def test_a_new_axis_gives_what_its_indices_give_one_by_one(sample: tuple[Any, ...]) -> None:
    """At every place, in every set of operands for which there is a rule."""
    node, operands = _node(sample)
    rule, tried = rule_of(node), 0
    assert rule is not None
    places = [
        [None, *range(operand.dim() + 1)] if position in rule.carriers(node) else [None]
        for position, operand in enumerate(operands)
    ]
    for behind in product(*places):
        found = batched(node, behind, _NEW)
        if found is None:
            continue
        tried += 1
        columns = [
            [operand] * _NEW if place is None else [_drawn_like(operand) for _ in range(_NEW)]
            for operand, place in zip(operands, behind, strict=True)
        ]
        stacked = [
            column[0] if place is None else torch.stack(column, column[0].dim() - place)
            for column, place in zip(columns, behind, strict=True)
        ]
        single = [_run(node.op, node.attrs, each) for each in zip(*columns, strict=True)]
        wanted = [torch.stack(r, r[0].dim() - found.behind) for r in zip(*single, strict=True)]
        _equal(_run(found.op, found.attrs, stacked), wanted)
    assert (tried == 0) == (node.op in _FIXED_RANK or sample in _OVER_ALL)


def _drawn_like(operand: torch.Tensor) -> torch.Tensor:
    return _drawn((_INDEX, *operand.shape) if operand.dtype == torch.int64 else operand.shape)


@each_sample
def test_a_new_axis_in_front_has_a_rule(sample: tuple[Any, ...]) -> None:
    """As loops have it: the first operand has it, and so have those of the same rank."""
    node, operands = _node(sample)
    rule = rule_of(node)
    assert rule is not None
    carriers = rule.carriers(node)
    rank = operands[carriers[0]].dim()
    behind = [
        rank if at in carriers and operand.dim() == rank else None
        for at, operand in enumerate(operands)
    ]
    longer = ("aten.matmul", {}, (3, 4), (2, 4, 6))
    needs_both = node.op == "aten.select_scatter"  # the second operand lacks an axis
    assert (batched(node, behind, _NEW) is None) == (
        needs_both or node.op in _FIXED_RANK or sample in (*_OVER_ALL, longer)
    )


def _has_rows(sample: tuple[Any, ...]) -> bool:
    return row_operands(_node(sample)[0], (2, 3)) is not None


WITH_ROWS = [sample for sample in SAMPLES if _has_rows(sample)]


def test_many_ops_have_rows() -> None:
    assert len({sample[0] for sample in WITH_ROWS}) > 20


@pytest.mark.parametrize("sample", WITH_ROWS, ids=str)
def test_rows_may_be_chosen_before_or_after(sample: tuple[Any, ...]) -> None:
    """Where the first two axes are rows, three of the six run as the node over (1, 3) of them."""
    node, operands = _node(sample)
    with_rows = row_operands(node, (2, 3))
    assert with_rows is not None
    chosen = torch.tensor([4, 0, 3])
    packed = []
    for value, operand in zip(node.inputs, operands, strict=True):
        table = operand
        if value not in with_rows:
            if operand.dim() < 3:  # read by every row, or along T
                packed.append(operand)
                continue
            table = operand.expand(2, 3, *operand.shape[2:])
        packed.append(table.reshape(6, *operand.shape[2:])[chosen][None])
    op, attrs = resized(node, [1, 3])
    whole = _run(node.op, node.attrs, operands)
    wanted = [result.reshape(6, *result.shape[2:])[chosen][None] for result in whole]
    _equal(_run(op, attrs, packed), wanted)


def test_what_is_random_or_in_place_has_no_rule() -> None:
    node, _ = _node(("aten.dropout", {"p": 0.5, "train": True}, _X))
    assert rule_of(node) is None
    assert batched(node, [3], _NEW) is None


def test_weights_have_no_place_for_a_new_axis() -> None:
    node, _ = _node(("aten.linear", {}, _X, (6, 4)))
    assert batched(node, [1, None], _NEW) is not None
    assert batched(node, [1, 2], _NEW) is None


def test_a_lower_rank_would_be_aligned_with_the_new_axis() -> None:
    """(5, 4) + (3, 4) is no sum of rows: the axis of size 3 stands where the new one is."""
    node, _ = _node(("aten.add.Tensor", {}, (4,), (3, 4)))
    assert batched(node, [1, None], _NEW) is None
    assert batched(node, [1, 1], _NEW) is not None


def test_a_product_along_the_batch_alone_is_not_row_wise() -> None:
    """Row (b, t) of x @ w[b] reads the row and w[b]; a packed row no longer has b at its place."""
    node, _ = _node(("aten.matmul", {}, _X, (2, 4, 6)))
    assert row_operands(node, (2, 3)) is None


def test_groups_that_overlap_are_one() -> None:
    assert linked(["ab", "c", "bd", "ef"]) == [set("abd"), set("c"), set("ef")]
