"""All that a GPU can tell, in one call: `make gpu OUT=dir`.

    python -m tests.gpu.run OUT [--steps suite bench] [--quick] [--at-once 8]

`suite` compiles every model of the parity suite in float32 (TF32 off), float16 and bfloat16, and
checks parity, placement, and the attention kernels dispatched against the kernel table:
OUT/suite.json. `bench` times the workloads of bench/ against eager PyTorch and torch.compile:
OUT/speed_*.json.
Each result is written as it comes, so that what was found stays when a later step fails.
The exit code is 1 where anything was wrong, and where CUDA is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from bench.machine import describe
from tests.gpu.checks import PRECISIONS, ROOT, examine, faults, target, why_not
from tests.models import CASES

STEPS = ("suite", "bench")
_ENGINES = ("eager", "compile", "onnx", "attngraph")
_QUICK = 3


def suite(out: Path, quick: bool, at_once: int) -> int:
    """The number of models and precisions with a fault."""
    cases = [case.name for case in CASES][: _QUICK if quick else None]
    results: dict[str, dict[str, Any]] = {precision: {} for precision in PRECISIONS}
    wrong = 0
    with ThreadPoolExecutor(at_once) as pool:
        jobs = {pool.submit(examine, c, p, target()): (c, p) for p in PRECISIONS for c in cases}
        for job in as_completed(jobs):
            case, precision = jobs[job]
            found = job.result()
            found["faults"] = faults(found)
            wrong += bool(found["faults"])
            results[precision][case] = found
            _write(out / "suite.json", {"target": target(), "results": results})
            for fault in found["faults"]:
                print(f"{case} in {precision}: {fault}", flush=True)
    print(f"suite: {len(jobs) - wrong} of {len(jobs)} are right", flush=True)
    return wrong


def bench(out: Path, quick: bool) -> int:
    """The number of precisions in which a workload failed."""
    wrong = 0
    for precision in PRECISIONS:
        command = [sys.executable, "-m", "bench.speed", "--target", target(), "--static"]
        command += ["--precision", precision, "--results", str(out), "--at-once", "4"]
        command += ["--layers", "0", "--engine", *_ENGINES, *(["--quick"] if quick else [])]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        wrong += subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode != 0
    return wrong


def _write(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps({"measured_on": describe(), **found}, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--quick", action="store_true", help="three models, tiny workloads")
    parser.add_argument("--at-once", type=int, default=8, help="models examined at a time")
    options = parser.parse_args(arguments)
    if missing := why_not():
        print(f"{missing}; run make gpu on a machine with a GPU.", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    wrong = 0
    if "suite" in options.steps:
        wrong += suite(options.out, options.quick, options.at_once)
    if "bench" in options.steps:
        wrong += bench(options.out.resolve(), options.quick)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
