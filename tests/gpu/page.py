"""What was seen on a GPU, as docs/onnxruntime.md has it."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from bench.machine import RESULTS, told
from tests.gpu.checks import PRECISIONS

SUITE, KERNELS = RESULTS / "gpu_suite.json", RESULTS / "gpu_kernels.json"


def page() -> str:
    """Parity and kernels of the models, and the operators that differ from PyTorch's."""
    suite = json.loads(SUITE.read_text())
    lines = [
        "| precision | models right | largest error ÷ budget | attentions by kernel |",
        "| --- | --- | --- | --- |",
    ]
    lines += [_precision(name, suite["results"][name]) for name in PRECISIONS]
    lines += ["", told(suite["measured_on"]), ""]
    kernels = json.loads(KERNELS.read_text())
    same = sum(len(dtypes.split()) for dtypes in kernels["same"].values())
    known, other = kernels["differs, as known"], kernels["DIFFERS"]
    lines += [
        f"Of {same + len(known) + len(other)} cases of operators that ran, {same} were PyTorch's "
        f"results, {len(known)} differ as on the CPU, and these differ on CUDA alone:",
        "",
        "| what | dtypes | CUDA's |",
        "| --- | --- | --- |",
    ]
    differing: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(other, key=lambda row: (row["case"], row["dtype"])):
        differing.setdefault(row["case"], []).append(row)
    for case, rows in differing.items():
        dtypes = ", ".join(row["dtype"] for row in rows)
        lines.append(f"| {case} | {dtypes} | {_example(rows[0]['detail'])} |")
    refused = Counter(row["dtype"] for row in kernels["refused"])
    counts = ", ".join(f"{count} in {dtype}" for dtype, count in sorted(refused.items()))
    lines += ["", f"Refused when the file is opened or run: {counts}."]
    if lost := kernels.get("lost"):
        lines += [f"Not seen, as their process ended: {', '.join(lost)}."]
    return "\n".join(lines) + "\n"


def _precision(name: str, models: dict[str, dict[str, Any]]) -> str:
    right = sum(not found["faults"] for found in models.values())
    parity = [found["parity"] for found in models.values() if "error" in found["parity"]]
    part = max(found["error"] / found["budget"] for found in parity)
    ran = Counter(
        f"{op} {kernel}" for found in models.values() for op, kernel in found["dispatch"]["kernels"]
    )
    counts = ", ".join(f"{count} {what}" for what, count in sorted(ran.items()))
    return f"| {name} | {right} of {len(models)} | {part:.2f} | {counts} |"


def _example(detail: str) -> str:
    """Its first wrong element."""
    _, _, examples = detail.rpartition(" elements: ")
    return examples.split(", ")[0].split(" (")[0]
