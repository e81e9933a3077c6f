"""What is wanted of a GPU, and what was measured of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PER_HEAD, DECODE, COMPILED = 3.0, 3.0, 1.0
"""The per-head model against the fastest other engine, a step of decoding against eager, and every
workload against torch.compile with CUDA graphs: times over attngraph's."""


def of(out: Path) -> list[dict[str, Any]]:
    """Each figure that the files in a folder hold: what, its ratio, and what is wanted of it."""
    found = []
    for path in sorted(out.glob("speed_cuda_*.json")):
        for name, workload in json.loads(path.read_text())["workloads"].items():
            ratios = {
                row["engine"]: row["ratio"]
                for row in workload["rows"]
                if row["ratio"] is not None and not row["engine"].startswith("attngraph")
            }
            what = f"{workload['title']} in {workload['precision']}"
            if "compile" in ratios:
                wanted = COMPILED if workload["precision"] == "fp16" else None
                found.append(_figure(f"{what}, against torch.compile", ratios["compile"], wanted))
            if name == "per_head" and ratios:
                fastest = min(ratios.values())
                found.append(_figure(f"{what}, against the fastest other", fastest, PER_HEAD))
    for path in sorted(out.glob("decode_*.json")):
        decoded = json.loads(path.read_text())
        if decoded["target"].startswith("cuda"):
            wanted = DECODE if decoded["precision"] == "fp16" else None
            what = f"a step of decoding in {decoded['precision']}, against eager with its cache"
            found.append(_figure(what, decoded["ratio"], wanted))
    return found


def _figure(what: str, ratio: float, wanted: float | None) -> dict[str, Any]:
    return {
        "what": what,
        "ratio": ratio,
        "wanted": wanted,
        "met": None if wanted is None else ratio >= wanted,
    }


def told(figure: dict[str, Any]) -> str:
    """As a line: `met` and `missed` only where something is wanted."""
    wanted = "" if figure["wanted"] is None else f" (wanted {figure['wanted']:.1f})"
    mark = {True: "met", False: "missed", None: "figure"}[figure["met"]]
    return f"{mark}: {figure['what']}: {figure['ratio']:.2f} ×{wanted}"
