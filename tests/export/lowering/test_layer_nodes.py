"""What a transformer layer costs in ONNX nodes: fused, its projections merged, nothing copied."""

from __future__ import annotations

import functools
import re
from collections import Counter

import onnx_ir
import pytest

from attngraph import passes
from attngraph.compiling.pipeline import pipeline
from attngraph.export.lowering.lower import lower
from attngraph.ir import clone
from tests.capture.formula import captured

_LAYER = re.compile(r"\.(?:layers?|h)\.1\.")


@functools.cache
def _nodes(name: str, target: str = "cpu") -> list[onnx_ir.Node]:
    graph = clone(captured(name, True).graph)
    passes.run(graph, pipeline(part=target == "cpu", experts=target == "cpu"))
    return list(lower(graph, target=target).graph)


def _layer(name: str, target: str = "cpu") -> list[str]:
    """The ONNX operators of the model's second layer."""
    nodes = _nodes(name, target)
    layer = [node for node in nodes if _LAYER.search(node.metadata_props.get("attngraph.loc", ""))]
    return [node.op_type for node in layer]


def test_a_bert_layer_is_ten_nodes() -> None:
    """Not on the CPU, whose fused norm is slower than its parts, and whose split is a copy."""
    rest = {"Attention": 1, "BiasGelu": 1}
    on_cuda = {**rest, "MatMul": 4, "Add": 1, "Split": 1, "SkipLayerNormalization": 2}
    assert Counter(_layer("bert-sdpa", "cuda")) == on_cuda
    # The biases of Q, V and the two residuals; that of K is one number for all keys.
    assert Counter(_layer("bert-sdpa")) == {**rest, "MatMul": 6, "Add": 6, "LayerNormalization": 2}


@pytest.mark.parametrize("name", ["llama-sdpa", "llama-eager"])
def test_a_llama_layer_is_fourteen_nodes(name: str) -> None:
    """On the CPU it is seven products instead of four and two splits."""
    rest = {"RotaryEmbedding": 2, "SkipSimplifiedLayerNormalization": 2, "Sigmoid": 1, "Mul": 2}
    on_cuda = {**rest, "MatMul": 4, "Split": 2, "Attention": 1}
    assert Counter(_layer(name, "cuda")) == on_cuda
    assert Counter(_layer(name)) == {**rest, "MatMul": 7, "Attention": 1}


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@pytest.mark.parametrize("model", ["bert", "gpt2", "llama", "vit"])
def test_no_layout_op_from_the_projections_to_the_output(model: str, kind: str) -> None:
    layer = _layer(f"{model}-{kind}")
    assert layer.count("Attention") == 1
    assert not {"Transpose", "Reshape", "Expand", "Concat"} & set(layer)


def test_sequence_first_is_permuted_at_the_ends_only() -> None:
    operators = Counter(node.op_type for node in _nodes("encoder-prenorm"))
    assert operators["Attention"] == 2
    assert operators["Transpose"] == 2


def test_an_output_projection_by_heads_is_one_product() -> None:
    """`bhqd,hde->bqe`, as of the context that the attention packs."""
    operators = Counter(node.op_type for node in _nodes("einsum", "cuda"))
    assert operators["MatMul"] == 8  # four in each of two layers
    assert "Einsum" not in operators
