"""What a GPU must show, as findings: what is wrong with a model in a precision, in sentences."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import onnxruntime
import torch

from tests.gpu.worker import MARK, PACKED
from tests.models import CASES
from tests.placement.tool import SDPA_KERNELS

ROOT = Path(__file__).parents[2]
PRECISIONS = ("fp16", "bf16", "fp32")
NAMES = (*(case.name for case in CASES), f"encoder{PACKED}", f"bert-sdpa{PACKED}")
"""What is examined: the models of the suite, and two encoders without their padding."""
PATIENCE = 300.0
_KERNEL = re.compile(r"Operator=(\w+) (?:Node=.*? )?DataType=.*?SdpaKernel=(\w+)")


def why_not() -> str:
    """Why nothing can be checked here; empty where there is a GPU that both can use."""
    if not torch.cuda.is_available():
        return f"CUDA is missing: torch {torch.__version__} finds no CUDA device"
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return f"CUDA is missing: onnxruntime {onnxruntime.__version__} was built without it"
    return ""


def target() -> str:
    """This machine's, such as cuda:sm90."""
    major, minor = torch.cuda.get_device_capability()
    return f"cuda:sm{major}{minor}"


def examine(case: str, precision: str, on: str) -> dict[str, Any]:
    """Everything about one model in one precision, in a process of its own; see `faults`."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "found.json", Path(folder) / "log"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, "-m", "tests.gpu.worker", case, precision, on, str(out)]
        ended = "it did not end in time"
        with log.open("wb") as file:
            try:
                done = subprocess.run(
                    command,
                    stdout=file,
                    stderr=file,
                    env=environment,
                    cwd=ROOT,
                    check=False,
                    timeout=PATIENCE,
                )
                ended = "" if done.returncode == 0 else f"its process ended ({done.returncode})"
            except subprocess.TimeoutExpired:
                pass
        found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
        text = log.read_text(errors="replace")
        if "failed" not in found.get("dispatch", {"failed": ""}):
            found["dispatch"]["kernels"] = kernels_of(text.partition(MARK)[2])
        if ended:
            found["process"] = {"failed": f"{ended}: {text.strip()[-300:]}"}
    return found


def kernels_of(log: str) -> list[list[str]]:
    """[operator, kernel] of each attention that ran, in order."""
    return [list(pair) for pair in _KERNEL.findall(log)]


def faults(found: dict[str, Any], *, kernels: bool = True) -> list[str]:
    """What is wrong in what `examine` found, nothing if all is well."""
    wrong = [f"{step}: {said['failed']}" for step, said in found.items() if "failed" in said]
    parity, dispatch = found.get("parity", {}), found.get("dispatch", {})
    if parity.get("passed") is False:
        wrong.append(f"parity: error {parity['error']} over its budget {parity['budget']}")
    if parity.get("same_on_device") is False:
        wrong.append("parity: tensors on the device give another result than those on the host")
    if not kernels or "failed" in dispatch or not dispatch:
        return wrong
    off = [provider for provider in dispatch["attention_on"] if provider != dispatch["provider"]]
    if off:
        wrong.append(f"placement: {len(off)} attentions on {', '.join(sorted(set(off)))}")
    if len(dispatch["attention_on"]) < len(dispatch["expected"]):
        wrong.append("placement: an attention was taken apart into other operators")
    return wrong + _unexpected_kernels(dispatch)


def _unexpected_kernels(dispatch: dict[str, Any]) -> list[str]:
    """The table's kernel against the one dispatched, attention by attention of each operator."""
    wrong = []
    for op in sorted({site["op"] for site in dispatch["expected"]}):
        expected = [site["kernel"] for site in dispatch["expected"] if site["op"] == op]
        used = [kernel for operator, kernel in dispatch["kernels"] if operator == op]
        if len(used) != len(expected):
            wrong.append(
                f"kernels: {len(used)} runs of {op} were logged, not {len(expected)} "
                f"({', '.join(used) or 'none'})"
            )
            continue
        wrong += [
            f"kernels: {op} ran on {kernel}, and the table says {name}"
            for name, kernel in zip(expected, used, strict=True)
            if kernel not in SDPA_KERNELS.get(name, {name})
        ]
    return wrong
