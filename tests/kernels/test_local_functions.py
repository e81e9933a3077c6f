"""Why an attention of many nodes is no local function of the file: docs/onnxruntime.md.

Fails where onnxruntime has mended it.
"""

from __future__ import annotations

import numpy
import onnxruntime
import pytest
from onnx import TensorProto, helper

pytestmark = pytest.mark.machine

OPSETS = [helper.make_opsetid("", 24), helper.make_opsetid("attngraph", 1)]
NAMES = ("query", "keys", "last")
BODY = [
    helper.make_node("Constant", [], ["zero"], value_ints=[0]),
    helper.make_node("Constant", [], ["one"], value_ints=[1]),
    helper.make_node("Slice", ["keys", "zero", "last", "one"], ["seen"]),
    helper.make_node(
        "Attention", ["query", "seen", "seen"], ["first"], q_num_heads=2, kv_num_heads=2
    ),
    helper.make_node(
        "Attention", ["query", "keys", "keys"], ["second"], q_num_heads=2, kv_num_heads=2
    ),
    helper.make_node("Concat", ["first", "second"], ["result"], axis=1),
]


def _opened(*, function: bool) -> onnxruntime.InferenceSession:
    inputs = [
        *(helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, "tokens", 8]) for n in NAMES[:2]),
        helper.make_tensor_value_info("last", TensorProto.INT64, [1]),
    ]
    outputs = [helper.make_tensor_value_info("result", TensorProto.FLOAT, None)]
    call = helper.make_node("Causal", NAMES, ["result"], domain="attngraph")
    seen = helper.make_tensor_value_info("seen", TensorProto.FLOAT, [1, "seen", 8])
    graph = helper.make_graph(
        [call] if function else BODY,
        "graph",
        inputs,
        outputs,
        value_info=[] if function else [seen],
    )
    functions = [helper.make_function("attngraph", "Causal", NAMES, ["result"], BODY, OPSETS[:1])]
    model = helper.make_model(
        graph, opset_imports=OPSETS, functions=functions if function else [], ir_version=10
    )
    return onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )


def test_onnxruntime_refuses_a_function_with_a_slice_of_keys() -> None:
    tokens = numpy.ones((1, 4, 8), numpy.float32)
    feeds = {"query": tokens, "keys": tokens, "last": numpy.array([2])}
    (found,) = _opened(function=False).run(None, feeds)
    assert found.shape == (1, 8, 8)
    with pytest.raises(Exception, match="Can't merge shape info"):
        _opened(function=True)
