"""attngraph: an optimizing compiler from PyTorch attention models to ONNX Runtime.

`optimize` compiles a module; `capture`, `passes.run` and `export.to_onnx` are its steps. They are
loaded on first use, as they bring torch along.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attngraph import export, passes
    from attngraph.api import capture
    from attngraph.compiling.compiler import optimize
    from attngraph.decoding.compile import optimize_decoder
    from attngraph.decoding.compile_multimodal import optimize_multimodal
    from attngraph.decoding.compile_seq2seq import optimize_seq2seq
    from attngraph.decoding.decoder import Decoder
    from attngraph.decoding.multimodal import Multimodal
    from attngraph.decoding.seq2seq import Seq2Seq
    from attngraph.deployment.checkpoint import OptimizedCheckpoint, optimize_checkpoint
    from attngraph.ir import Graph
    from attngraph.optimized import Optimized
    from attngraph.reports.report import Report, Site

    __version__: str

_HOMES = {
    "Decoder": "attngraph.decoding.decoder",
    "Graph": "attngraph.ir",
    "Optimized": "attngraph.optimized",
    "Multimodal": "attngraph.decoding.multimodal",
    "OptimizedCheckpoint": "attngraph.deployment.checkpoint",
    "Report": "attngraph.reports.report",
    "Seq2Seq": "attngraph.decoding.seq2seq",
    "Site": "attngraph.reports.report",
    "capture": "attngraph.api",
    "optimize": "attngraph.compiling.compiler",
    "optimize_checkpoint": "attngraph.deployment.checkpoint",
    "optimize_decoder": "attngraph.decoding.compile",
    "optimize_multimodal": "attngraph.decoding.compile_multimodal",
    "optimize_seq2seq": "attngraph.decoding.compile_seq2seq",
}
_PACKAGES = frozenset({"export", "passes"})

__all__ = [
    "Decoder",
    "Graph",
    "Multimodal",
    "Optimized",
    "OptimizedCheckpoint",
    "Report",
    "Seq2Seq",
    "Site",
    "__version__",
    "capture",
    "export",
    "optimize",
    "optimize_checkpoint",
    "optimize_decoder",
    "optimize_multimodal",
    "optimize_seq2seq",
    "passes",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"attngraph.{name}")
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name == "__version__":
        # importlib.metadata takes a while to import, and few ask for the version.
        from attngraph.versions import own_version

        value = own_version()
    else:
        raise AttributeError(f"module 'attngraph' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
