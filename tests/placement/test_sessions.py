"""Our own sessions over the real CUDA provider, whose kernels do nothing here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.opening import OPENS
from tests.kernels.table import CASES
from tests.placement.tool import ROOT, Tool


@pytest.mark.slow
def test_a_session_opens_with_all_its_nodes_on_cuda(placement: Tool, tmp_path: Path) -> None:
    """What torch and onnxruntime hand each other needs a torch with CUDA: see tests/gpu."""
    command = [sys.executable, "-m", "tests.gpu.opening", "cuda:sm90", str(tmp_path / "found")]
    environment = {**os.environ, "CUDA_PLACEMENT_BUILD": str(placement.built), "FAKE_SM": "90"}
    environment["PYTHONPATH"] = str(ROOT)
    run = ["bash", str(placement.folder / "run.sh"), *command]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found").read_text())
    assert [found[precision][OPENS] for precision in ("fp16", "bf16", "fp32")] == ["", "", ""]


NOT_IN_BFLOAT16 = {
    "logit": "torchlib's function takes no bfloat16",
    "gelu": "no kernel takes a scalar",
    "gelu-tanh": "no kernel takes a scalar",
    "grouped_mm": "its groups' ends are computed, and nothing is computed here",
}
"""Cases that don't run on CUDA in bfloat16, and why."""


@pytest.mark.slow
@pytest.mark.parametrize("share", range(6))
def test_every_operator_has_a_form_in_bfloat16(placement: Tool, tmp_path: Path, share: int) -> None:
    """Where it has no kernel it is computed in float32, or onnxruntime wouldn't open the file."""
    cases = list(CASES)[share::6]
    found = tmp_path / "found.json"
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels", *cases, "--dtype", "bf16"]
    command += ["--target", "cuda:sm90", "--results", str(found)]
    environment = {**os.environ, "CUDA_PLACEMENT_BUILD": str(placement.built), "FAKE_SM": "90"}
    environment["PYTHONPATH"] = str(ROOT)
    run = ["bash", str(placement.folder / "run.sh"), *command]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr  # 1 where a result differs, as all do here
    refused = {
        row["case"]: row["detail"] for row in json.loads(found.read_text()).get("refused", [])
    }
    assert refused.keys() <= NOT_IN_BFLOAT16.keys(), refused
