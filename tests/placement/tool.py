"""The real CUDA provider's placement and dispatch on a machine without a GPU.

The tool (`cuda_placement/placement.py`, see its README) loads a model with onnxruntime's own CUDA
provider over a CUDA runtime that does nothing. It lives beside the repository, in ../shared, or
where ATTNGRAPH_CUDA_PLACEMENT says.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

ROOT = Path(__file__).parents[2]
VARIABLE = "ATTNGRAPH_CUDA_PLACEMENT"
SDPA_KERNELS = {
    "Flash": {"FLASH_ATTENTION"},
    "memory-efficient": {"EFFICIENT_ATTENTION"},
    "unfused": {"MATH"},
    "cuDNN": {"CUDNN_FLASH_ATTENTION"},
    "memory-efficient or unfused": {"EFFICIENT_ATTENTION", "MATH"},
    "TensorRT or memory-efficient": {
        *("TRT_FUSED_ATTENTION", "TRT_FLASH_ATTENTION", "EFFICIENT_ATTENTION")
    },
}
"""What onnxruntime's log calls the kernels of the table."""


@dataclass(frozen=True)
class Tool:
    """The tool's folder, and where its fake libraries were built."""

    folder: Path
    built: Path

    def __call__(self, model: Path, *options: str) -> dict[str, Any]:
        """What the tool says of a model; fails where the model has no CUDA session."""
        command = [sys.executable, str(self.folder / "placement.py"), str(model), "--json"]
        done = subprocess.run(
            [*command, *options],
            capture_output=True,
            text=True,
            env={**os.environ, "CUDA_PLACEMENT_BUILD": str(self.built), "PYTHON": sys.executable},
            check=False,
        )
        assert done.stdout, done.stderr
        said: dict[str, Any] = json.loads(done.stdout)
        return said


def build(built: Path) -> Tool:
    """The tool, its libraries built; skips with the reason where that can't be."""
    folder = Path(os.environ.get(VARIABLE, "") or ROOT.parent / "shared" / "cuda_placement")
    if not (folder / "placement.py").is_file():
        pytest.skip(f"there is no placement tool in {folder}; {VARIABLE} may name its folder")
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip(f"onnxruntime {onnxruntime.__version__} was built without CUDA")
    missing = [
        name for name in ("bash", "gcc", "readelf", "nm", "strings") if not shutil.which(name)
    ]
    if missing:
        pytest.skip(f"the placement tool's libraries can't be built without {', '.join(missing)}")
    done = subprocess.run(
        ["bash", str(folder / "build.sh"), str(built)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": sys.executable},
        check=False,
    )
    if done.returncode:
        pytest.skip(f"the placement tool's libraries can't be built: {done.stderr.strip()[-300:]}")
    return Tool(folder, built)
