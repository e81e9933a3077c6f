"""Time from module to saved ONNX, against `torch.export.export` alone, by number of layers.

    python -m bench.compile_time [--layers 8 16 32 64] [--repeat 3]

Each measurement has a process of its own, and the kinds take turns; from 64 layers on they do
so once less often. The figure is the ratio of the medians of CPU seconds: it hardly depends on what
else the machine does, which wall time does.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

from attngraph.options import Verify
from bench.harness import in_process, options_of
from bench.machine import write

_MANY = 64  # layers, of which a run takes half a minute


def hidden_of(model: Any, **how: Any) -> Any:
    """A model of transformers as a module of ids and mask that gives the last hidden states."""
    import torch

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            output = self.model(input_ids, attention_mask=attention_mask, **how)
            hidden: torch.Tensor = output.last_hidden_state
            return hidden

    return Hidden().eval()


def llama(layers: int) -> tuple[Any, tuple[Any, ...], Any]:
    """A Llama of hidden size 256 with a padding mask, dynamic in batch and sequence."""
    import torch
    from transformers import LlamaModel

    from bench.workloads import llama_config

    model = LlamaModel(llama_config(256, layers, (8, 4), 512, 1000))
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq")}
    args = (torch.randint(0, 1000, (2, 16)), torch.ones(2, 16, dtype=torch.int64))
    return hidden_of(model, use_cache=False), args, (dims, dims)


def measure(kind: str, layers: int) -> dict[str, Any]:
    """One measurement in this process: kind is "export", "attngraph" or "verified"."""
    warnings.simplefilter("ignore")
    import torch

    from attngraph.compiling.compiler import optimize
    from attngraph.export.parity.reference import Reference

    eager_s, run = 0.0, Reference.__call__

    def reference(*given: Any, **named: Any) -> Any:
        nonlocal eager_s
        start = time.process_time()
        found = run(*given, **named)
        eager_s += time.process_time() - start
        return found

    module, args, shapes = llama(layers)
    wall, cpu = time.perf_counter(), time.process_time()
    result: dict[str, Any] = {}
    if kind == "export":
        with torch.no_grad():
            torch.export.export(module, args, dynamic_shapes=shapes, strict=False)
    else:
        verify: Verify = "final" if kind == "verified" else "off"
        with (
            tempfile.TemporaryDirectory() as folder,
            patch.object(Reference, "__call__", reference),
        ):
            optimized = optimize(module, args, dynamic_shapes=shapes, verify=verify)
            optimized.save(Path(folder) / "model.onnx")
        report = optimized.report
        result = {"stages": report.timings, "nodes": report.nodes_after, "fused": report.fused}
        result["eager_cpu_s"] = eager_s
    cpu_seconds = time.process_time() - cpu
    return {"cpu_s": cpu_seconds, "wall_s": time.perf_counter() - wall, **result}


def main() -> None:
    options = options_of(__doc__, layers=[8, 16, 32, 64], repeat=3)
    rows = []
    for layers in options.layers:
        runs: dict[str, list[dict[str, Any]]] = {"export": [], "attngraph": [], "verified": []}
        for _ in range(max(1, options.repeat - (layers >= _MANY))):
            for kind, found in runs.items():
                found.append(in_process(measure, kind=kind, layers=layers))
        seconds = {kind: [run["cpu_s"] for run in found] for kind, found in runs.items()}
        medians = {kind: statistics.median(values) for kind, values in seconds.items()}
        ratio = medians["attngraph"] / medians["export"]
        last = runs["attngraph"][-1]
        checked = [max(0.0, each - medians["attngraph"]) for each in seconds.pop("verified")]
        eager = statistics.median(run["eager_cpu_s"] for run in runs["verified"])
        verification = {
            "cpu_s": checked,
            "to_compile": statistics.median(checked) / medians["attngraph"],
            "to_eager": statistics.median(checked) / eager,
        }
        rows.append(
            {
                "layers": layers,
                "cpu_s": seconds,
                "ratio": ratio,
                "verification": verification,
                "nodes": last["nodes"],
                "fused": last["fused"],
                "stages_wall_s": last["stages"],
            }
        )
        spent = ", ".join(f"{kind} {median:.1f} s" for kind, median in medians.items())
        print(
            f"{layers} layers: {ratio:.2f} × torch.export.export ({spent}); verification "
            f"{verification['to_compile']:.2f} × attngraph, {verification['to_eager']:.2f} × eager",
            flush=True,
        )
    print(write("compile_time", {"rows": rows}))


if __name__ == "__main__":
    main()
