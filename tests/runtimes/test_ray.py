"""Ray: a sweep loses nothing where a worker dies, and replicas of a server answer as one model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnxruntime
import torch

import attngraph
from tests.runtimes.conftest import Record, ray_folder
from tests.runtimes.encoders import MODELS

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


def ran(module: str, *arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """A script in Ray's environment."""
    path = os.pathsep.join(map(str, (*how.pop("path", ()), ROOT, ray_folder())))
    environment = {**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"}
    line = [sys.executable, "-m", f"tests.runtimes.{module}", *arguments]
    return subprocess.run(
        line, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, **how
    )


def test_a_worker_that_is_killed_midway(tmp_path: Path, record: Record) -> None:
    spec, out = tmp_path / "spec.toml", tmp_path / "out"
    spec.write_text(SPEC)
    done = ran("run_ray", str(spec), str(out))
    said = re.search(r"code 0 of Ray (\S+)", done.stdout)
    assert said is not None, done.stdout + done.stderr
    records = json.loads((out / "sweep.json").read_text())["records"]
    names = {
        f"{model}/{variant}" for model in ("gpt", "vit") for variant in ("plain", "exact", "int8")
    }
    assert {each["task"] for each in records if each["outcome"] == "right"} == names
    assert {str(path.parent.relative_to(out)) for path in out.rglob("model.onnx")} == names
    record(f"ray {said[1]}", "GPT-2, ViT", "a sweep on two workers, one killed midway")


def test_the_server_of_the_docs(tmp_path: Path, record: Record) -> None:
    """docs/serving.md as it stands, but for the place of the file."""
    torch.manual_seed(0)
    module, args, shapes = MODELS["BERT"]()
    file = tmp_path / "model.onnx"
    attngraph.optimize(module.eval(), args, dynamic_shapes=shapes, verify="off").save(file)
    text = (ROOT / "docs" / "serving.md").read_text("utf-8")
    code = re.search(r"## Ray Serve\n.*?```python\n(.*?)```", text, re.S)
    assert code is not None
    app = code[1].replace("/models/classifier/model.onnx", str(file))
    assert app != code[1]
    (tmp_path / "app.py").write_text(app)
    rows = [[5, 6, 7], [9, 2], [11, 4], [3, 4, 5, 6, 7, 8]]
    done = ran("run_serve", path=[tmp_path], input=json.dumps(rows))
    said = re.search(r"^found (.*)$", done.stdout, re.M)
    assert said is not None, done.stdout + done.stderr
    found, version = json.loads(said[1])
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for ids, logits in zip(rows, found, strict=True):
        given = torch.tensor([ids])
        feeds = {"input_ids": given.numpy(), "attention_mask": torch.ones_like(given).numpy()}
        (expected,) = session.run(["logits"], feeds)
        torch.testing.assert_close(torch.tensor(logits), torch.tensor(expected[0]))
    record(f"ray {version}", "BERT", "Ray Serve, two replicas")
