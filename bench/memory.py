"""Peak resident memory from half-precision safetensors to a saved ONNX file, by stage.

    python -m bench.memory [--layers 18] [--verify off]

The weights are those of a Llama, 0.94 B at 18 layers, in a file that lies beside the output for as
long as it takes. Each measurement has a process of its own; the figure is its VmHWM, which counts
every page of a mapped file that is in memory at that moment too.
"""

from __future__ import annotations

import json
import os
import re
import struct
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attngraph.options import Verify
from bench.harness import in_process, options_of
from bench.machine import write

LAYERS = "ATTNGRAPH_BENCH_LAYERS"
_MEBIBYTE = 1 << 20


def llama() -> tuple[Any, tuple[Any, ...], Any]:
    """The model in float16, as anybody would write it down."""
    import torch
    from transformers import LlamaModel

    from bench.workloads import llama_config

    class Logits(torch.nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.model = LlamaModel(config)
            self.head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            output = self.model(input_ids, use_cache=False)
            logits: torch.Tensor = self.head(output.last_hidden_state)
            return logits

    module = Logits(llama_config(2048, int(os.environ[LAYERS]), (32, 8), 5632, 32000)).half()
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq")}
    return module, (torch.randint(0, 32000, (2, 16)),), (dims,)


def store(path: Path) -> int:
    """Writes random weights for `llama`; returns their number."""
    import torch

    with torch.device("meta"):
        shapes = {name: tuple(value.shape) for name, value in llama()[0].named_parameters()}
    return write_safetensors(path, shapes, torch.Generator().manual_seed(0))


def write_safetensors(path: Path, shapes: Mapping[str, tuple[int, ...]], random: Any) -> int:
    """Writes weights of these shapes in float16, one in memory at a time; returns their number.

    All are drawn from the generator `random`, vectors around 1.
    """
    import torch

    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape in shapes.values():
            if len(shape) == 1:
                values = 1 + 0.1 * torch.randn(shape, generator=random)
            else:
                values = torch.randn(shape, generator=random) * shape[1] ** -0.5
            file.write(values.half().numpy().data)
    return end // 2


def _peak() -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def measure(weights: str, output: str, verify: Verify) -> dict[str, Any]:
    """One measurement in this process: peaks in MiB, as they stood when each stage ended."""
    warnings.simplefilter("ignore")
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    from attngraph.compiling.compiler import Model, compile_model
    from attngraph.frontend.files.load import load
    from attngraph.options import Options
    from attngraph.stages import telling

    torch.set_grad_enabled(False)
    peaks: dict[str, float] = {}
    stage = "import"

    def begins(name: str) -> None:
        nonlocal stage
        peaks[stage] = _peak()
        stage = name

    begins("load")
    model = Model.of(load(Path(weights), factory="bench.memory:llama"))
    with telling(begins):
        optimized = compile_model(model, Options(verify=verify))
    begins("save")
    optimized.save(output)
    begins("end")
    report = optimized.report
    return {
        "verify": verify,
        "peak_mib": _peak(),
        "peak_mib_after": peaks,
        "weights_mib": report.weight_bytes / _MEBIBYTE,
        "timings_wall_s": report.timings,
    }


def _in_process(weights: Path, verify: str) -> dict[str, Any]:
    output = weights.with_name("model.onnx")
    found: dict[str, Any] = in_process(
        measure, weights=str(weights), output=str(output), verify=verify
    )
    for written in weights.parent.glob("model.onnx*"):
        written.unlink()
    return found


def main() -> None:
    options = options_of(__doc__, layers=18, verify=["off", "final"])
    os.environ.update({"HF_HUB_OFFLINE": "1", LAYERS: str(options.layers)})
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "model.safetensors"
        count = store(weights)
        rows = [_in_process(weights, verify) for verify in options.verify]
    for row in rows:
        stages = ", ".join(f"{name} {peak:.0f}" for name, peak in row["peak_mib_after"].items())
        print(f"--verify {row['verify']}: {row['peak_mib']:.0f} MiB ({stages})")
    print(write("memory", {"parameters": count, "rows": rows}))


if __name__ == "__main__":
    main()
