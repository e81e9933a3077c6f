"""Our own sessions over the real CUDA provider, whose kernels do nothing here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.opening import OPENS
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
