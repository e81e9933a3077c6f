"""Every model of the suite, lowered for CUDA: its attention runs there, and nothing is copied."""

from __future__ import annotations

from pathlib import Path

import pytest

from attngraph.compiling.compiler import Model, analyse
from attngraph.export.files.save import save
from attngraph.export.formats import Precision
from attngraph.export.kernels import choose_all
from attngraph.export.kernels.table import PACKED_ROWS, PRIMITIVE, RESTORED_ROWS
from attngraph.export.lowering.lower import lower
from attngraph.export.precision import DTYPES, Plan, convert
from attngraph.export.target import parse_target
from attngraph.options import Options
from tests.models import CASES, Case
from tests.placement.tool import Tool

TARGET = parse_target("cuda:sm80")
# onnxruntime turns Gather(table, Range) into a Slice, and copies its bounds from the device: once,
# before the first layer. Experts split rows where counting them says, and `Split` reads its sizes
# on the CPU.
COPIES = {"nanogpt": 4, "gpt-oss": 11}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention_is_on_cuda(
    case: Case, precision: Precision, placement: Tool, tmp_path: Path
) -> None:
    built = case.build()
    model = Model(built.module, None, built.args, {}, built.dynamic_shapes)
    graph, _ = analyse(model, Options(str(TARGET)))
    if precision != "fp32":
        graph = convert(graph, Plan(DTYPES[precision])).graph
    kernels = choose_all(graph, TARGET)
    save(lower(graph, target=TARGET, kernels=kernels), tmp_path / "model.onnx")
    said = placement(tmp_path / "model.onnx", "--sm", str(TARGET.sm))
    fused = sum(choice.form != PRIMITIVE for choice in kernels.values())
    assert [node["ep"] for node in said["attention"]] == ["CUDAExecutionProvider"] * fused
    assert said["decomposed_attention"] == 0
    assert said["memcpy"] == COPIES.get(case.name, 0), said["off_cuda"]
    # the arithmetic of sizes belongs on the CPU; nothing that computes on tensors does
    products = {"MatMul", "Gemm", "FusedMatMul", "Softmax", "LayerNormalization"}
    off = {node["op"].partition(":")[2] for node in said["off_cuda"]}
    assert not off & products


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_packed_attention_is_on_cuda(precision: Precision, placement: Tool, tmp_path: Path) -> None:
    """Without its padding, an encoder has the op for packed rows where that has a fast kernel."""
    built = next(case for case in CASES if case.name == "encoder").build()
    model = Model(built.module, None, built.args, {}, built.dynamic_shapes)
    graph, _ = analyse(model, Options(str(TARGET), ignore_padded_rows=True))
    if precision != "fp32":
        graph = convert(graph, Plan(DTYPES[precision])).graph
    kernels = choose_all(graph, TARGET)
    form = PACKED_ROWS if precision == "fp16" else RESTORED_ROWS
    assert [choice.form for choice in kernels.values()] == [form] * built.sites
    save(lower(graph, target=TARGET, kernels=kernels), tmp_path / "model.onnx")
    said = placement(tmp_path / "model.onnx", "--sm", str(TARGET.sm))
    assert [node["ep"] for node in said["attention"]] == ["CUDAExecutionProvider"] * built.sites
    assert said["decomposed_attention"] == 0
    assert said["memcpy"] == 0, said["off_cuda"]
