"""What verification holds of a large model at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.machine

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_verification_holds_a_large_models_weights_once(dtype: str, tmp_path: Path) -> None:
    """Once: mapped while the model itself runs, then in float32 in onnxruntime's hands.

    Beside them lies one operator's weight, in float64 and perhaps twice: a fifth of these twenty in
    float32. The rest of the bound is for what isn't weights.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.parity.peak", str(tmp_path / "weights"), dtype],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rise_mib"] <= 1.5 * found["single_mib"], found
