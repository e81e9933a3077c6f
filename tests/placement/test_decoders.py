"""A decoder with a static cache, lowered for CUDA: its attention runs there, in the buffers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from attngraph.compiling.pipeline import pipeline
from attngraph.decoding.compile import buffers_of, of_causal_lm
from attngraph.export.files.save import save
from attngraph.export.formats import Precision
from attngraph.export.kernels import choose_all
from attngraph.export.kernels.table import SHARED
from attngraph.export.lowering.emission.buffers import require_in_place
from attngraph.export.lowering.lower import lower
from attngraph.export.precision import DTYPES, Plan, convert
from attngraph.export.target import parse_target
from attngraph.frontend.families.cache import find_layout
from attngraph.frontend.model import Model, trace
from attngraph.passes import run
from tests.models.kit import VOCABULARY
from tests.placement.tool import Tool

TARGET = parse_target("cuda:sm80")


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_attention_is_on_cuda(
    precision: Precision, layers: int, placement: Tool, tmp_path: Path
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    module = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=256,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=layers,
            intermediate_size=128,
            vocab_size=VOCABULARY,
        )
    ).eval()
    captured = trace(of_causal_lm(Model(module, None, (), {}, None, "llama")))
    layout = find_layout(captured.graph, None, "llama")
    captured.graph.dims[layout.past] = replace(captured.graph.dims[layout.past], low=0)
    buffers = buffers_of(captured.graph, replace(layout, max_length=64))
    assert buffers is not None
    run(captured.graph, pipeline())
    graph = convert(captured.graph, Plan(DTYPES[precision])).graph
    require_in_place(graph, buffers, "llama")
    kernels = choose_all(graph, TARGET, static=True)
    assert {choice.form for choice in kernels.values()} == {SHARED}
    model = lower(graph, target=TARGET, kernels=kernels, buffers=buffers)
    save(model, tmp_path / "model.onnx")
    said = placement(tmp_path / "model.onnx", "--sm", str(TARGET.sm))
    assert [node["ep"] for node in said["attention"]] == ["CUDAExecutionProvider"] * layers
    assert said["decomposed_attention"] == 0
    # What is computed of lengths on the CPU is wanted there: nothing is copied between the two.
    assert said["memcpy"] == 0, said["off_cuda"]
