"""Int8 weights and activations against onnxruntime's `quantize_dynamic`: time, with error beside.

    python -m bench.quantized [--only bert_padded …] [--kinds random …] [--layers 4] [--rounds 7]
        [--threads 1] [--anyway]

Models with random weights as they are, with queries and keys 4 times as large (`peaked`), and with
norms that make a few features 20 times as large (`outliers`). Errors are the rms of the first
output's difference from the module in float64 over that output's, on other inputs than the file was
compiled with. Engines run in processes of their own and take turns. Ratios are medians over the
rounds, of CPU time, which other processes disturb far less than they do a clock. A machine that is
busy to begin with is measured with `--anyway` only, and the page says so. Rows of an earlier record
that aren't measured anew stay beside the new ones, with the commit that they are of.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from attngraph.measuring.load import before
from bench import workloads
from bench.harness import in_process, in_turns, option, options_of
from bench.machine import describe, read, was_measured, write

WORKLOADS = ("bert_padded", "vit", "t5", "llama_prefill")
KINDS = ("random", "peaked", "outliers")
NAIVE, FLOAT, OURS = "quantize_dynamic", "attngraph", "attngraph int8"
ENGINES = {"plain": "torch.onnx.export", "naive": NAIVE, "float": FLOAT, "int8": OURS}
_PEAK, _OUTLIER, _RARE = 4.0, 20.0, 97
_SCORES = ("query", "key", "q_proj", "k_proj", "SelfAttention.q", "SelfAttention.k")
_NORMS = ("LayerNorm", "RMSNorm", "T5LayerNorm")


@torch.no_grad()
def _built(workload: str, kind: str) -> workloads.Built:
    torch.manual_seed(0)
    module, args, dims = getattr(workloads, workload)()
    for name, part in module.named_modules():
        weight = getattr(part, "weight", None)
        if kind == "peaked" and isinstance(part, torch.nn.Linear) and name.endswith(_SCORES):
            part.weight.mul_(_PEAK)
        if kind == "outliers" and type(part).__name__.endswith(_NORMS) and weight is not None:
            weight[::_RARE] *= _OUTLIER
    return module, args, dims


def _others(args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Other inputs of the same shapes; masks stay."""
    random = torch.Generator().manual_seed(1)
    found = []
    for tensor in args:
        if tensor.is_floating_point():
            found.append(torch.randn(tensor.shape, generator=random))
        elif int(tensor.max()) > 1:
            found.append(torch.randint(int(tensor.max()), tensor.shape, generator=random))
        else:
            found.append(tensor)
    return tuple(found)


def prepare(folder: str, workload: str, kind: str) -> dict[str, str]:
    """Writes each engine's file, inputs and the exact output; which engines failed, and why."""
    import attngraph
    from attngraph.measuring.exporters import quantized_dynamically

    module, args, dims = _built(workload, kind)
    place, failed = Path(folder), dict[str, str]()
    options: dict[str, Any] = {"weights": "int8", "activations": "int8"}
    optimize = attngraph.optimize

    def plain(file: Path) -> None:
        torch.onnx.export(module, args, file, dynamic_shapes=dims, dynamo=True, verbose=False)

    make: dict[str, Callable[[Path], None]] = {
        "plain": plain,
        "naive": lambda file: quantized_dynamically(place / "plain.onnx", file),
        "float": lambda f: optimize(module, args, dynamic_shapes=dims, verify="off").save(f),
        "int8": lambda f: optimize(module, args, dynamic_shapes=dims, **options).save(f),
    }
    for name, made in make.items():
        try:
            with torch.no_grad():
                made(place / f"{name}.onnx")
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:200]
    given = _others(args)
    with torch.no_grad():
        wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in given]
        exact, *_ = torch.utils._pytree.tree_leaves(module.double()(*wide))
    torch.save({"given": given, "exact": exact}, place / "data.pt")
    return failed


def block_of(folder: str, engine: str, threads: int) -> Callable[[], dict[str, float]]:
    """A call: CPU and clock milliseconds, and the error of its output."""
    from attngraph.export.runtime.session import Session
    from attngraph.export.target import parse_target

    data = torch.load(Path(folder) / "data.pt")
    path = Path(folder) / f"{engine}.onnx"
    session = Session.open(path, parse_target("cpu"), threads=threads)
    exact = data["exact"]
    session.run(data["given"])

    def block() -> dict[str, float]:
        clock, cpu = time.perf_counter(), time.process_time()
        found, *_ = session.run(data["given"])
        passed = {"ms": time.perf_counter() - clock, "cpu_ms": time.process_time() - cpu}
        off = float((found.double() - exact).norm() / exact.norm())
        return {**{name: 1e3 * taken for name, taken in passed.items()}, "error": off}

    return block


def measured(workload: str, kind: str, rounds: int, threads: int) -> dict[str, Any]:
    """Of each engine its times, its error, and naive quantization's time over its own."""
    with tempfile.TemporaryDirectory() as folder:
        failed = in_process(prepare, folder=folder, workload=workload, kind=kind)
        engines = {
            name: {"folder": folder, "engine": name, "threads": threads}
            for name in ENGINES
            if name not in failed
        }
        found = in_turns(block_of, engines, rounds, failed=failed)
    rows: dict[str, Any] = {}
    for name, blocks in found.items():
        rows[ENGINES[name]] = {
            "ms": [each["ms"] for each in blocks],
            "cpu_ms": [each["cpu_ms"] for each in blocks],
            "error": blocks[0]["error"],
        }
    reasons = {ENGINES[name]: why for name, why in failed.items()}
    return {"engines": rows, "failed": reasons}


def ratio(row: dict[str, Any], theirs: str, ours: str = OURS) -> float | None:
    """The median, over the rounds, of the CPU time of `theirs` over that of `ours`."""
    engines = row["engines"]
    if theirs not in engines or ours not in engines:
        return None
    pairs = zip(engines[theirs]["cpu_ms"], engines[ours]["cpu_ms"], strict=True)
    return float(statistics.median(a / b for a, b in pairs))


def kept_rows(
    earlier: dict[str, Any], told: dict[str, Any], here: dict[str, Any]
) -> list[dict[str, Any]]:
    """An earlier record's rows, with their commits, if they were measured in the same way: as many
    layers and threads on the same processor, of packages of the same versions.
    """
    where = earlier["measured_on"]
    same = [earlier[name] == told[name] for name in ("layers", "threads")]
    same += [where[name] == here[name] for name in ("processor", "cores", "packages")]
    return [{"commit": where["commit"], **row} for row in earlier["rows"]] if all(same) else []


def in_place(
    kept: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """These rows, and the earlier ones of other workloads and kinds, in the order of both lists."""
    found = {(row["workload"], row["kind"]): row for row in (*kept, *rows)}
    order = [(workload, kind) for workload in WORKLOADS for kind in KINDS]
    return [found[each] for each in order if each in found]


def main() -> None:
    options = options_of(
        __doc__,
        only=option([], choices=list(WORKLOADS)),
        kinds=option([], choices=list(KINDS)),
        layers=4,
        rounds=7,
        threads=1,
        anyway=False,
    )
    load = before()
    if not (load.is_trusted or options.anyway):
        raise SystemExit(f"{load} Nothing was measured.")
    os.environ["BENCH_LAYERS"] = str(options.layers)
    rows: list[dict[str, Any]] = []
    told = {"layers": options.layers, "threads": options.threads, "others": load.others}
    here = describe()
    earlier = read("quantized") if was_measured("quantized") else None
    kept = [] if earlier is None else kept_rows(earlier, told, here)
    if earlier is not None and kept:  # the page says of all rows how busy the machine was
        told["others"] = max(told["others"], earlier["others"])
    for workload in options.only or WORKLOADS:
        for kind in options.kinds or KINDS:
            row = measured(workload, kind, options.rounds, options.threads)
            rows.append({"workload": workload, "kind": kind, "commit": here["commit"], **row})
            errors = {name: f"{each['error']:.2%}" for name, each in row["engines"].items()}
            ratios = [f"{ratio(row, name) or 0:.2f} × {name}" for name in (NAIVE, FLOAT)]
            print(f"{workload}, {kind}: {errors}, {', '.join(ratios)} {row['failed']}", flush=True)
            write("quantized", {**told, "rows": in_place(kept, rows)})


if __name__ == "__main__":
    main()
