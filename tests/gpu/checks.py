"""What a GPU must show, as findings: what is wrong with a model in a precision, in sentences."""

from __future__ import annotations

import json
import os
import re
import signal
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
PATIENCE = 150.0
"""Seconds that one model in one precision may take."""
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


def environment(at_once: int) -> dict[str, str]:
    """That of processes of which so many run at a time: they share the cores."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // at_once, 1)),
    }


def ended(command: list[str], at_once: int, seconds: float | None, log: Any = None) -> int | None:
    """A Python command's exit code; None where it was ended, with all that it had started."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=log,
        stderr=log,
        env=environment(at_once),
        cwd=ROOT,
        process_group=0,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def told_by(
    module: str, *arguments: str, at_once: int = 1, seconds: float = PATIENCE
) -> tuple[dict[str, Any], str]:
    """What a process wrote into the file that its last argument names, and its log.

    `process` in it says how it ended, where that was not well.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "found.json", Path(folder) / "log"
        with log.open("wb") as file:
            code = ended(["-m", module, *arguments, str(out)], at_once, seconds, file)
        found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
        text = log.read_text(errors="replace")
    if code != 0:
        how = "it did not end in time" if code is None else f"its process ended ({code})"
        found["process"] = {"failed": f"{how}: {text.strip()[-300:]}"}
    return found, text


def examine(
    case: str, precision: str, on: str, *, at_once: int = 1, seconds: float = PATIENCE
) -> dict[str, Any]:
    """Everything about one model in one precision, in a process of its own; see `faults`."""
    arguments = "tests.gpu.worker", case, precision, on
    found, text = told_by(*arguments, at_once=at_once, seconds=seconds)
    if "failed" not in found.get("dispatch", {"failed": ""}):
        found["dispatch"]["kernels"] = kernels_of(text.partition(MARK)[2])
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
