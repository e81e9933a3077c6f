"""The options of an onnxruntime session, checked before it opens."""

from __future__ import annotations

from typing import Literal

import onnxruntime
import torch

from attngraph.errors import UsageError
from attngraph.export.runtime.provider_options import flag

GraphOptimization = Literal["all", "basic", "off"]

_LEVELS = {
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "off": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
}


def session_options(
    threads: int | None,
    *,
    spinning: bool,
    graph_optimization: GraphOptimization,
    flush_denormals: bool,
) -> onnxruntime.SessionOptions:
    """onnxruntime's options of a session. Raises UsageError for values that they can't take."""
    if threads is not None and (isinstance(threads, bool) or threads < 1):
        raise UsageError(f"threads is {threads!r}; it must be 1 or more, or None for torch's own.")
    if graph_optimization not in _LEVELS:
        known = ", ".join(_LEVELS)
        raise UsageError(f"graph_optimization is {graph_optimization!r}; it can be {known}.")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = _LEVELS[graph_optimization]
    options.intra_op_num_threads = torch.get_num_threads() if threads is None else threads
    options.add_session_config_entry("session.intra_op.allow_spinning", flag(spinning))
    options.add_session_config_entry("session.set_denormal_as_zero", flag(flush_denormals))
    # Threads that spin after a run slow eager torch, which runs next to it in parity checks.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    return options
