"""Folders of tiny checkpoints, and copies of them to be broken."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.checkpoints.models import saved


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    for name in ("bert", "bert-mlm", "llama"):
        saved(root / name, name, half=name == "llama")
    return root


@pytest.fixture
def bert(folders: Path, tmp_path: Path) -> Path:
    """A copy of a folder, to be broken."""
    return Path(shutil.copytree(folders / "bert", tmp_path / "bert"))
