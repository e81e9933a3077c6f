"""What a transformer layer costs in ONNX nodes: fused, its projections merged, nothing copied."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from attngraph import passes
from attngraph.export.lower import lower
from attngraph.frontend.capture import capture
from attngraph.pipeline import pipeline
from tests.models import CASES

_LAYER = re.compile(r"\.(?:layers?|h)\.1\.")


def _layer(name: str) -> list[str]:
    """The ONNX operators of the model's second layer."""
    built = next(case for case in CASES if case.name == name).build()
    graph = capture(built.module, built.args, dynamic_shapes=built.dynamic_shapes).graph
    passes.run(graph, pipeline())
    nodes = lower(graph).graph
    return [node.op_type for node in nodes if _LAYER.search(node.metadata_props["attngraph.loc"])]


def test_a_bert_layer_is_ten_nodes() -> None:
    assert Counter(_layer("bert-sdpa")) == {
        "MatMul": 4,
        "Add": 1,
        "Split": 1,
        "Attention": 1,
        "SkipLayerNormalization": 2,
        "BiasGelu": 1,
    }


@pytest.mark.parametrize("name", ["llama-sdpa", "llama-eager"])
def test_a_llama_layer_is_fourteen_nodes(name: str) -> None:
    assert Counter(_layer(name)) == {
        "MatMul": 4,
        "Split": 2,
        "RotaryEmbedding": 2,
        "Attention": 1,
        "SkipSimplifiedLayerNormalization": 2,
        "Sigmoid": 1,
        "Mul": 2,
    }


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@pytest.mark.parametrize("model", ["bert", "gpt2", "llama", "vit"])
def test_no_layout_op_from_the_projections_to_the_output(model: str, kind: str) -> None:
    layer = _layer(f"{model}-{kind}")
    assert layer.count("Attention") == 1
    assert not {"Transpose", "Reshape", "Expand", "Concat"} & set(layer)
