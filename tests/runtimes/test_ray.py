"""A sweep on a Ray cluster loses nothing where a worker dies."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.runtimes.conftest import Record, ray_folder

ROOT = Path(__file__).parents[2]
SPEC = """
[[models]]
name = "gpt"
factory = "examples.nanogpt:build"

[[models]]
name = "vit"
factory = "examples.vit:build"

[[variants]]
name = "plain"

[[variants]]
name = "exact"
exact = true

[[variants]]
name = "int8"
weights = "int8"
"""


def test_a_worker_that_is_killed_midway(tmp_path: Path, record: Record) -> None:
    spec, out = tmp_path / "spec.toml", tmp_path / "out"
    spec.write_text(SPEC)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ray_folder()}",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    line = [sys.executable, "-m", "tests.runtimes.run_ray", str(spec), str(out)]
    ran = subprocess.run(line, env=environment, cwd=ROOT, capture_output=True, text=True)
    said = re.search(r"code 0 of Ray (\S+)", ran.stdout)
    assert said is not None, ran.stdout + ran.stderr
    records = json.loads((out / "sweep.json").read_text())["records"]
    names = {
        f"{model}/{variant}" for model in ("gpt", "vit") for variant in ("plain", "exact", "int8")
    }
    assert {each["task"] for each in records if each["outcome"] == "right"} == names
    assert {str(path.parent.relative_to(out)) for path in out.rglob("model.onnx")} == names
    record(f"ray {said[1]}", "GPT-2, ViT", "a sweep on two workers, one killed midway")
