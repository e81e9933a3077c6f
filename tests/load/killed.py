"""What test_kills kills: writes one model after the other, each with a file of its weights."""

from __future__ import annotations

from multiprocessing.synchronize import Event

import onnx_ir as ir
import torch

import attngraph
from attngraph.export.files.save import save

WIDTH = 256
# Once, in the server that the processes are forked from.
MODEL = attngraph.optimize(
    torch.nn.Linear(WIDTH, WIDTH), (torch.randn(2, WIDTH),), verify="off"
).model


def write_on_and_on(path: str, first: int, started: Event) -> None:
    """Models whose large weights are all `first`, `first + 1` …, which their metadata says too."""
    count = first
    while True:
        for value in MODEL.graph.initializers.values():
            if value.const_value is not None and value.const_value.size >= WIDTH:
                filled = torch.full(value.const_value.shape.numpy(), float(count))
                value.const_value = ir.Tensor(filled.numpy(), name=value.name)
        MODEL.metadata_props["count"] = str(count)
        save(MODEL, path, external_above=0)
        started.set()
        count += 1
