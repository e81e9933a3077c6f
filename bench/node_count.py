"""ONNX nodes per layer of the lowered model, from the growth between two depths.

python -m bench.node_count
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from itertools import product
from typing import Any

import torch

from attngraph.compiling.pipeline import pipeline
from attngraph.export.lowering.lower import lower
from attngraph.frontend.capture import capture
from attngraph.passes import run
from bench.compile_time import hidden_of, llama
from bench.harness import options_of
from bench.machine import write


def _bert(layers: int) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """BERT-base but for its depth and vocabulary: hidden 768, 12 heads."""
    from transformers import BertConfig, BertModel

    config = BertConfig(num_hidden_layers=layers, vocab_size=1000)
    args = (torch.randint(0, 1000, (2, 16)), torch.ones(2, 16, dtype=torch.int64))
    return hidden_of(BertModel(config, add_pooling_layer=False)), args


def _llama(layers: int) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    module, args, _ = llama(layers)
    return module, args


_MODELS = {"BERT-base": _bert, "Llama": _llama}


def count(name: str, layers: int, target: str) -> tuple[int, dict[str, int]]:
    """(all nodes, nodes by op) of the ONNX graph for a target."""
    module, args = _MODELS[name](layers)
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq", max=512)}
    graph = capture(module, args, dynamic_shapes=(dims, dims)).graph
    run(graph, pipeline(part=target == "cpu", experts=target == "cpu"))
    nodes = list(lower(graph, target=target).graph)
    return len(nodes), dict(Counter(node.op_type for node in nodes))


def main() -> None:
    options_of(__doc__)
    warnings.simplefilter("ignore")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    results: list[dict[str, Any]] = []
    for name, target in product(_MODELS, ("cuda", "cpu")):
        (few, few_ops), (many, many_ops) = count(name, 2, target), count(name, 12, target)
        by_op = {op: (n - few_ops.get(op, 0)) / 10 for op, n in many_ops.items()}
        result: dict[str, Any] = {
            "model": name,
            "target": target,
            "nodes": many,
            "per_layer": (many - few) / 10,
            "per_layer_by_op": {op: n for op, n in sorted(by_op.items()) if n},
        }
        print(f"{name} for {target}: {many} nodes, {result['per_layer']:g} per layer")
        results.append(result)
    print(write("node_count", {"models": results}))


if __name__ == "__main__":
    main()
