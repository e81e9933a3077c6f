"""The kernel table says of CUDA what the real provider's dispatch does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attngraph.export.files.save import save
from attngraph.export.kernels import Choice, Facts, Form
from attngraph.export.kernels.choice import candidates
from attngraph.export.kernels.facts import (
    BIAS,
    BOOL,
    CAUSAL,
    LENGTHS,
    PACKED,
    SINKS,
    SOFTCAP,
    WINDOW,
)
from attngraph.export.kernels.table import (
    ATTENTION,
    GROUPED,
    MULTI_HEAD,
    NONPAD,
    PACKED_ROWS,
    PADDED,
    RESTORED_ROWS,
    WITH_NORMS,
    WITH_ROTARY,
)
from attngraph.export.lowering.lower import lower
from attngraph.export.target import Target
from attngraph.export.tuning.timing import site_graph
from tests.placement.tool import SDPA_KERNELS, Tool

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
FACTS = Facts(
    dtype=F16,
    heads=4,
    groups=4,
    head_size=64,
    value_size=64,
    batch=(2, 2),
    queries=(128, 128),
    keys=(128, 128),
    square=True,
    aligned_keys=True,
    features=frozenset(),
    positive_scale=True,
)
ODD = {"queries": (127, 127), "keys": (127, 127), "aligned_keys": False}
NARROW = {"head_size": 60, "value_size": 60}
NEAR = {"window": 32}
SITES: list[tuple[Form, int, tuple[str, ...], dict[str, Any]]] = [
    (ATTENTION, 80, (), {}),
    (ATTENTION, 75, (), {}),
    (ATTENTION, 90, (CAUSAL,), {}),
    (ATTENTION, 80, (CAUSAL, SOFTCAP), {"dtype": BF16}),
    (ATTENTION, 80, (CAUSAL,), {"groups": 2}),
    (ATTENTION, 80, (CAUSAL,), {"square": False, "keys": (256, 256)}),
    (ATTENTION, 80, (BOOL,), {}),
    (ATTENTION, 80, (BIAS,), {}),
    (ATTENTION, 80, (BOOL,), ODD),
    (ATTENTION, 80, (), {"value_size": 32}),
    (ATTENTION, 80, (), NARROW),
    (ATTENTION, 80, (), {"dtype": F32}),
    (ATTENTION, 80, (), {"dtype": F32, "groups": 2}),
    (ATTENTION, 80, (BOOL,), {"dtype": F32, **ODD}),
    (PADDED, 80, (), NARROW),
    (PADDED, 80, (BOOL,), NARROW),
    (PADDED, 80, (), {"dtype": F32, **NARROW}),
    (GROUPED, 80, (CAUSAL,), {"groups": 2}),
    (GROUPED, 75, (CAUSAL,), {"groups": 2}),
    (GROUPED, 90, (CAUSAL,), {"groups": 2}),
    (GROUPED, 80, (CAUSAL, WINDOW), {"groups": 2, **NEAR}),
    (GROUPED, 75, (CAUSAL, WINDOW), {"groups": 2, **NEAR}),
    (GROUPED, 90, (CAUSAL, WINDOW), {"groups": 2, **NEAR}),
    (GROUPED, 90, (CAUSAL, SOFTCAP), {"groups": 2}),
    (GROUPED, 80, (CAUSAL, SINKS), {"groups": 2, "dtype": BF16}),
    (GROUPED, 90, (SINKS,), {"groups": 2}),
    (WITH_ROTARY, 80, (CAUSAL,), {"groups": 2, "rotary_features": 64}),
    (WITH_ROTARY, 75, (CAUSAL,), {"groups": 2, "rotary_features": 32}),
    (WITH_ROTARY, 90, (CAUSAL,), {"groups": 2, "rotary_features": 64}),
    (WITH_ROTARY, 80, (), {"rotary_features": 64, **ODD}),
    (WITH_ROTARY, 90, (CAUSAL, WINDOW, SINKS), {"groups": 2, "rotary_features": 64, **NEAR}),
    (
        WITH_NORMS,
        80,
        (CAUSAL,),
        {"groups": 2, "rotary_features": 64, "normed": True, "dtype": BF16},
    ),
    (WITH_NORMS, 75, (CAUSAL, WINDOW), {"rotary_features": 64, "normed": True, **NEAR}),
    (WITH_NORMS, 90, (CAUSAL,), {"groups": 2, "rotary_features": 64, "normed": True}),
    (ATTENTION, 80, (LENGTHS,), {}),
    (ATTENTION, 80, (CAUSAL, WINDOW), {**NEAR, **ODD}),
    (ATTENTION, 80, (CAUSAL, SINKS), {}),
    (NONPAD, 80, (LENGTHS,), ODD),
    (NONPAD, 75, (LENGTHS,), {}),
    (NONPAD, 90, (LENGTHS,), {"groups": 2, "dtype": BF16}),
    (NONPAD, 80, (LENGTHS,), {"square": False, "queries": (64, 64)}),
    (NONPAD, 80, (LENGTHS,), {"dtype": F32}),
    (NONPAD, 80, (LENGTHS,), {"dtype": F32, "groups": 2}),
    (NONPAD, 80, (LENGTHS,), NARROW),
    (MULTI_HEAD, 80, (), {}),
    (MULTI_HEAD, 90, (), {}),
    (MULTI_HEAD, 80, (), {"dtype": F32}),
    (PACKED_ROWS, 80, (PACKED,), {}),
    (PACKED_ROWS, 90, (PACKED,), ODD),
    (PACKED_ROWS, 75, (PACKED,), {}),
    (PACKED_ROWS, 75, (PACKED,), {"head_size": 128, "value_size": 128}),
    (PACKED_ROWS, 80, (PACKED,), {"value_size": 32}),
    (PACKED_ROWS, 80, (PACKED,), NARROW),
    (PACKED_ROWS, 80, (PACKED,), {"dtype": F32}),
    (PACKED_ROWS, 80, (PACKED,), {"dtype": F32, "queries": (255, 255), "keys": (255, 255)}),
    (PACKED_ROWS, 80, (PACKED,), {"dtype": F32, "queries": (256, 256), "keys": (256, 256)}),
    (RESTORED_ROWS, 80, (PACKED,), {"dtype": BF16}),
    (RESTORED_ROWS, 90, (PACKED,), {"dtype": BF16, **ODD}),
    (RESTORED_ROWS, 75, (PACKED,), ODD),
    (RESTORED_ROWS, 80, (PACKED,), {"groups": 2}),
    (RESTORED_ROWS, 80, (PACKED,), {"value_size": 32}),
    (RESTORED_ROWS, 80, (PACKED,), NARROW),
    (RESTORED_ROWS, 80, (PACKED,), {"dtype": F32, **ODD}),
    (RESTORED_ROWS, 80, (PACKED,), {"dtype": F32, "groups": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "sm", "features", "changes"),
    SITES,
    ids=lambda value: value.name if isinstance(value, Form) else None,
)
def test_the_table_names_the_kernel(
    form: Form,
    sm: int,
    features: tuple[str, ...],
    changes: dict[str, Any],
    placement: Tool,
    tmp_path: Path,
) -> None:
    facts = replace(FACTS, features=frozenset(features), **changes)
    target = Target("cuda", sm)
    (expected,) = (c for c in candidates(facts, target, (1, 31)) if c.form == form)
    assert not expected.refused
    graph = site_graph(facts, facts.queries[0])
    (node,) = (node for node in graph if "attention" in node.op)
    path = tmp_path / "site.onnx"
    save(lower(graph, target=target, kernels={node: Choice(form, expected.kernel)}), path)
    said = placement(path, "--sm", str(sm), "--run")
    assert said["run"]["error"] is None
    (attention,) = said["attention"]
    assert attention["ep"] == "CUDAExecutionProvider"
    assert {*attention["kernels"]} <= SDPA_KERNELS[expected.kernel]
    assert attention["kernels"]
