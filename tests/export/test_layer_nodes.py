"""What a transformer layer costs in ONNX nodes once its projections, norms and biases are fused."""

from __future__ import annotations

from collections import Counter

from attngraph import passes
from attngraph.export.lower import lower
from attngraph.frontend.capture import capture
from tests.models import CASES

PIPELINE = (
    "canonicalize,cse,constant-fold,canonicalize,dce,fuse-attention,canonicalize,cse,dce,"
    "merge-projections,fuse-norms,fuse-activations,canonicalize,dce"
)


def test_a_bert_layer_is_ten_nodes() -> None:
    built = next(case for case in CASES if case.name == "bert-sdpa").build()
    graph = capture(built.module, built.args, dynamic_shapes=built.dynamic_shapes).graph
    passes.run(graph, PIPELINE)
    layer = [
        node.op_type
        for node in lower(graph).graph
        if ".encoder.layer.1." in node.metadata_props["attngraph.loc"]
    ]
    assert Counter(layer) == {
        "MatMul": 4,
        "Add": 1,
        "Split": 1,
        "Attention": 1,
        "SkipLayerNormalization": 2,
        "BiasGelu": 1,
    }
