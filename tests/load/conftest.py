"""A model whose code is importable from the working directory only."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from attngraph.frontend.files.factory import importable_cwd
from tests.load.model_files import SOURCE


@pytest.fixture(autouse=True)
def fixture_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`load_fixture`, importable from the working directory only."""
    (tmp_path / "load_fixture.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    with importable_cwd():
        module = importlib.import_module("load_fixture")
    monkeypatch.setitem(sys.modules, "load_fixture", module)
    return module


@pytest.fixture
def model(fixture_module: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    module: torch.nn.Module = fixture_module.Tied().eval()
    return module


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    return tmp_path / "code-ran"
