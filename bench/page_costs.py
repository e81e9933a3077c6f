"""The part of docs/benchmarks.md on what compiling and starting cost: time and memory."""

from __future__ import annotations

import statistics
from typing import Any

from attngraph.measuring.load import Load
from bench.machine import measured_on, read, was_measured

_PEAKS = ("peak_mib", "anonymous_mib")


def memory() -> list[str]:
    if not was_measured("memory"):
        return []
    result = read("memory")
    lines = [
        "## Memory",
        "",
        f"From a safetensors file of {result['parameters'] / 1e9:.2f} B parameters in float16 "
        f"({result['parameters'] * 2 / 1e9:.2f} GB) to the saved ONNX file: the peak of the "
        "process's resident set, which counts pages of mapped files too. The parameters would take "
        f"{result['parameters'] * 4 / 1e9:.2f} GB in float32, which is what onnxruntime's CPU "
        "provider computes in: it holds them so while the outputs are verified.",
        "",
    ]
    lines += [
        f"- `--verify {row['verify']}`: {row['peak_mib'] * 1.048576 / 1e3:.2f} GB"
        for row in result["rows"]
    ]
    return [*lines, "", measured_on(result), ""]


def checkpoint() -> list[str]:
    """A large checkpoint's folder, where it was measured."""
    if not was_measured("checkpoint"):
        return []
    result = read("checkpoint")
    lines = [
        "### A large checkpoint",
        "",
        f"A Llama-shaped folder of {result['parameters'] / 1e9:.2f} B parameters in float16, in "
        "shards, by `attngraph optimize --verify off`. Memory is the peak of the process's "
        "resident set, pages of mapped files among it, and without these. The time is that of the "
        "command until its files are on the disk over that of `cp -r` of the folder, which take "
        "turns, both from a cold cache: the median, then the least and the most.",
        "",
        "| weights | memory | without mapped files | time ÷ copy | CPU time | written |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in result["rows"]:
        runs, ratios = row["compile"], row["ratios"]
        most = {name: max(run[name] for run in runs) * 1.048576e-3 for name in _PEAKS}
        loads = [run["others"] for run in (*runs, *row["copy"])]
        load = Load(None if None in loads else max(loads))
        time = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        cells = [
            row["weights"],
            *(f"{gigabytes:.2f} GB" for gigabytes in most.values()),
            time if load.is_trusted else f"not measured: others took {load.others or 0:.0%}",
            f"{statistics.median(run['cpu_s'] for run in runs):.0f} s",
            f"{runs[0]['written_bytes'] / 1e9:.2f} GB",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", measured_on(result), ""]


def soak() -> list[str]:
    """What hours of work in one process hold, where it was measured."""
    if not was_measured("soak"):
        return []
    result = read("soak")
    before, after = result["mib"]
    return [
        "## Long work in one process",
        "",
        f"In {result['seconds'] / 60:.0f} minutes of {result['calls']:,} calls of an encoder and "
        f"{result['generations']:,} runs of generations with either cache, at changing sizes, the "
        f"resident set went from {before:.1f} to {after:.1f} MiB "
        f"({after / before - 1:+.2%}).",
        "",
        measured_on(result),
        "",
        *_many_compiles(),
    ]


def _many_compiles() -> list[str]:
    if not was_measured("many_compiles"):
        return []
    result = read("many_compiles")
    mib = result["mib"]
    return [
        f"Over {result['compiles']:,} compiles in one process, no two of one model, the resident "
        f"set was {', '.join(f'{each:.1f}' for each in mib)} MiB after each quarter of them "
        f"({mib[-1] / mib[0] - 1:+.2%} from the first on).",
        "",
        measured_on(result),
        "",
    ]


def start() -> list[str]:
    """Time to the first answer of large files, where it was measured."""
    if not was_measured("start"):
        return []
    result = read("start")
    lines = [
        "## Time to the first answer",
        "",
        "Of a Llama in float32: the seconds until a session of onnxruntime is made and has run "
        "once, each time in a process of its own. The ratios are attngraph's over those of the "
        "file of `torch.onnx.export`, the median over the rounds.",
        "",
        "| file | torch.onnx.export | attngraph | ratio | of the session alone |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in result["rows"]:
        first = {kind: [run["first"] for run in runs] for kind, runs in row["seconds"].items()}
        ratios = [statistics.median(row["ratios"][part]) for part in ("first", "session")]
        cells = [
            f"{row['bytes']['attngraph'] / 1e9:.1f} GB",
            _spread(first["plain"]),
            _spread(first["attngraph"]),
            *(f"{ratio:.2f}" for ratio in ratios),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", measured_on(result), ""]


def static_sizes() -> list[str]:
    result = read("static_sizes")
    lines = [
        "",
        "### With static sizes",
        "",
        "CPU seconds of capture and of the passes, once, in a process of its own.",
        "",
        "| model | capture | passes | passes ÷ capture | fused |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in result["rows"]:
        seconds = [f"{row[f'{stage}_cpu_s']:.1f}" for stage in ("capture", "passes")]
        cells = [row["model"], *seconds, f"{row['ratio']:.2f}", str(row["fused"])]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", measured_on(result)]


def compile_time() -> list[str]:
    result = read("compile_time")
    rows = result["rows"]
    first, last = rows[-2:] if len(rows) > 1 else rows * 2
    growth = {
        kind: statistics.median(last["cpu_s"][kind]) / statistics.median(first["cpu_s"][kind])
        for kind in ("attngraph", "export")
    }
    lines = [
        "## Time from module to saved ONNX",
        "",
        "A Llama of hidden size 256 with a padding mask, dynamic batch and sequence, without "
        "parity. CPU seconds of a process of its own; the median, then the least and the most. "
        "Verification is what `--verify final` takes more, and eager's two runs, in float32 and "
        "float64, those of the model on all that it is checked on.",
        "",
        "| layers | torch.export alone | attngraph | ratio | ONNX nodes | fused | verification | "
        "÷ attngraph | ÷ eager's two runs |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        checked = row.get("verification")
        cells = [
            str(row["layers"]),
            _spread(row["cpu_s"]["export"]),
            _spread(row["cpu_s"]["attngraph"]),
            f"{row['ratio']:.2f}",
            str(row["nodes"]),
            str(row["fused"]),
            *(["not measured", "", ""] if checked is None else _verification(checked)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    times = f"{last['layers'] / first['layers']:g}"
    lines += [
        "",
        f"From {first['layers']} to {last['layers']} layers ({times} ×) attngraph's time grows "
        f"{growth['attngraph']:.2f} ×, and that of torch.export alone {growth['export']:.2f} ×.",
        "",
        measured_on(result),
    ]
    return lines


def _verification(found: dict[str, Any]) -> list[str]:
    ratios = [f"{found[name]:.2f}" for name in ("to_compile", "to_eager")]
    return [_spread(found["cpu_s"]), *ratios]


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} s ({min(values):.1f} to {max(values):.1f})"
