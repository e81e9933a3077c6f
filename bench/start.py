"""Time to the first answer of a large file: a session is opened, and runs once.

    python -m bench.start [--layers 3 20] [--rounds 7] [--anyway]

The files are those of a Llama in float32, of 1.1 GB at 3 layers and 4.1 GB at 20: attngraph's and
`torch.onnx.export`'s of the same module, their weights beside them. Each answer is that of a
process of its own, which has imported onnxruntime; the files are in memory from a run before, and
the processes take turns.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from attngraph.measuring.load import before
from bench.harness import in_process, option, options_of
from bench.machine import write
from bench.memory import LAYERS

ENGINES = {"attngraph": "attngraph", "plain": "torch.onnx.export"}


def prepare(folder: str, kind: str) -> int:
    """Writes a file and its input; returns the bytes."""
    import torch

    from attngraph.compiling.compiler import optimize
    from bench.memory import llama

    torch.manual_seed(0)
    module, (ids,), dims = llama()
    module = module.float().eval()
    file = Path(folder) / f"{kind}.onnx"
    if kind == "attngraph":
        optimize(module, (ids,), dynamic_shapes=dims, verify="off").save(file)
    else:
        with torch.no_grad():
            torch.onnx.export(module, (ids,), file, dynamic_shapes=dims, dynamo=True, verbose=False)
    return sum(path.stat().st_size for path in Path(folder).glob(f"{kind}.onnx*"))


def answer(file: str) -> dict[str, float]:
    """Seconds until the session is there, and until its first outputs are."""
    import numpy
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    start = time.perf_counter()
    session = onnxruntime.InferenceSession(file, options, ["CPUExecutionProvider"])
    opened = time.perf_counter()
    ids = numpy.arange(2 * 16, dtype=numpy.int64).reshape(2, 16)
    session.run(None, {session.get_inputs()[0].name: ids})
    return {"session": opened - start, "first": time.perf_counter() - start}


def _measured(layers: int, rounds: int) -> dict[str, Any]:
    os.environ[LAYERS] = str(layers)
    with tempfile.TemporaryDirectory() as folder:
        sizes = {kind: in_process(prepare, folder=folder, kind=kind) for kind in ENGINES}
        files = {kind: str(Path(folder) / f"{kind}.onnx") for kind in ENGINES}
        for file in files.values():
            in_process(answer, file=file)
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in ENGINES}
        for round_ in range(rounds):
            for kind in sorted(found, reverse=round_ % 2 == 1):
                found[kind].append(in_process(answer, file=files[kind]))
    pairs = list(zip(found["plain"], found["attngraph"], strict=True))
    ratios = {part: [b[part] / a[part] for a, b in pairs] for part in ("session", "first")}
    return {"layers": layers, "bytes": sizes, "seconds": found, "ratios": ratios}


def main() -> None:
    options = options_of(
        __doc__,
        layers=[3, 20],
        rounds=7,
        anyway=option(False, "on a busy machine too, where nothing is written"),
    )
    load = before()
    if not (load.is_trusted or options.anyway):
        raise SystemExit(f"{load} Nothing was measured.")
    rows = []
    for layers in options.layers:
        row = _measured(layers, options.rounds)
        rows.append(row)
        told = [f"{part} {statistics.median(all_):.2f}" for part, all_ in row["ratios"].items()]
        print(f"{row['bytes']['attngraph'] / 1e9:.1f} GB: {', '.join(told)} × plain", flush=True)
    if load.is_trusted:
        print(write("start", {"rows": rows}))


if __name__ == "__main__":
    main()
