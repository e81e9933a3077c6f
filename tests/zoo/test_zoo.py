"""Every example compiles, is right at three lengths, and becomes what its entry says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import onnx_ir
import pytest
import torch

import attngraph
from examples.ladder import build_rung
from examples.positions import build_way
from examples.zoo import ENTRIES, Entry


def _nodes(graph: onnx_ir.Graph) -> Iterator[onnx_ir.Node]:
    for node in graph:
        yield node
        for held in node.attributes.values():
            if held.type == onnx_ir.AttributeType.GRAPH:
                yield from _nodes(held.as_graph())


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_an_example_becomes_what_its_entry_says(entry: Entry) -> None:
    module, args, shapes = entry.build()
    optimized = attngraph.optimize(module, args, dynamic_shapes=shapes)
    parity = optimized.report.parity
    assert parity is not None
    assert parity.passed
    found = [site.mask if site.status == "fused" else site.code for site in optimized.report.sites]
    assert len(found) == len(entry.sites)
    for told, expected in zip(found, entry.sites, strict=True):
        assert told.startswith(expected)
    counts = Counter(node.op_type for node in _nodes(optimized.model.graph))
    assert all(counts[operator] == count for operator, count in entry.operators)


def _run(built: Any, x: torch.Tensor) -> torch.Tensor:
    module, args, shapes = built
    result: torch.Tensor = attngraph.optimize(module, args, dynamic_shapes=shapes)(x)
    return result


@pytest.mark.parametrize("rung", ["self", "head-by-head", "packed"])
def test_self_attention_is_equivariant_to_permutations(rung: str) -> None:
    x, order = torch.randn(2, 9, 48), torch.randperm(9)
    run = build_rung(rung)
    torch.testing.assert_close(_run(run, x[:, order]), _run(run, x)[:, order])


@pytest.mark.parametrize("way", ["sinusoidal", "rotary", "t5"])
def test_positions_break_the_equivariance(way: str) -> None:
    x, order = torch.randn(2, 9, 48), torch.arange(9).flip(0)
    run = build_way(way)
    moved, straight = _run(run, x[:, order]), _run(run, x)[:, order]
    assert (moved - straight).abs().max() > 1e-3
