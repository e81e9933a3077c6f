"""ONNX nodes per layer of the saved model, from the growth between two depths.

python -m bench.node_count
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from attngraph.compiler import optimize
from bench.compile_time import llama
from bench.machine import write


def _bert(layers: int) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """BERT-base but for its depth and vocabulary: hidden 768, 12 heads."""
    from transformers import BertConfig, BertModel

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = BertConfig(num_hidden_layers=layers, vocab_size=1000)
            self.model = BertModel(config, add_pooling_layer=False)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.model(input_ids, attention_mask).last_hidden_state
            return hidden

    args = (torch.randint(0, 1000, (2, 16)), torch.ones(2, 16, dtype=torch.int64))
    return Hidden().eval(), args


def _llama(layers: int) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    module, args, _ = llama(layers)
    return module, args


_MODELS = {"BERT-base": _bert, "Llama": _llama}


def count(name: str, layers: int) -> tuple[int, dict[str, int]]:
    """(all nodes, nodes by op) of the saved file."""
    import onnx

    module, args = _MODELS[name](layers)
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq", max=512)}
    optimized = optimize(module, args, dynamic_shapes=(dims, dims), verify="off")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        optimized.save(path)
        nodes = onnx.load(path).graph.node
    return len(nodes), dict(Counter(node.op_type for node in nodes))


def main() -> None:
    warnings.simplefilter("ignore")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    results: list[dict[str, Any]] = []
    for name in _MODELS:
        (few, few_ops), (many, many_ops) = count(name, 2), count(name, 12)
        by_op = {op: (n - few_ops.get(op, 0)) / 10 for op, n in many_ops.items()}
        result: dict[str, Any] = {
            "model": name,
            "nodes": many,
            "per_layer": (many - few) / 10,
            "per_layer_by_op": {op: n for op, n in sorted(by_op.items()) if n},
        }
        print(f"{name}: {many} nodes at 12 layers, {result['per_layer']:g} per layer")
        results.append(result)
    print(write("node_count", {"models": results}))


if __name__ == "__main__":
    main()
