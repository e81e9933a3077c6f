"""The steps of `attngraph.optimize`, one at a time, to look at what is between them.

graph = attngraph.capture(model, args)
attngraph.passes.run(graph, "canonicalize,fuse-attention")
onnx = attngraph.export.to_onnx(graph)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attngraph.frontend import capture as frontend
from attngraph.ir import Graph


def capture(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> Graph:
    """Traces a module as it is at inference; `dynamic_shapes` is
    `torch.export.export`'s, where a name may stand for a Dim.

    Raises CaptureError where torch.export can't trace it, and UsageError where the inputs don't
    fit.
    """
    return frontend.capture(module, args, kwargs=kwargs, dynamic_shapes=dynamic_shapes).graph
