"""The transformers that others pin, beside ours: a tiny model of each head compiles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.runtimes import run_heads
from tests.runtimes.conftest import Record, optimum_python

REPOSITORY = Path(__file__).parents[2]
PACKAGES = (
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "requests",
    "charset_normalizer",
    "idna",
    "urllib3",
    "certifi",
)
"""transformers 4.57 and what ours doesn't bring for it."""


def test_a_model_of_each_head(tmp_path: Path, record: Record) -> None:
    python = optimum_python()
    assert python is not None
    for name in PACKAGES:
        found = list(python.parents[1].glob(f"lib/python*/site-packages/{name}*"))
        assert found, name
        for item in found:
            (tmp_path / item.name).symlink_to(item)
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{tmp_path}"}
    command = [sys.executable, "-W", "ignore", run_heads.__file__]
    ran = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    version, *passed = ran.stdout.splitlines()
    assert version.startswith("4.57.")
    assert passed == [*run_heads.FORWARDS, *(f"folder of {name}" for name in run_heads.FOLDERS)]
    record(f"transformers {version}", "a tiny model of each head", "compiles, with parity")
