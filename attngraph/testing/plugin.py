"""Fixtures for pytest: put `pytest_plugins = ["attngraph.testing.plugin"]` into conftest.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attngraph.compiling.compiler import optimize
from attngraph.testing import assert_parity


@pytest.fixture
def onnx_parity(tmp_path: Path) -> Callable[..., Path]:
    """A function that compiles a module, holds the file against it, and returns the file's path.

    It takes what `attngraph.optimize` does. A module out of its error budget fails the test.
    """

    def compiled(module: Any, args: tuple[Any, ...], **options: Any) -> Path:
        made, path = optimize(module, args, **options), tmp_path / "model.onnx"
        made.save(path)
        shapes, kwargs = options.get("dynamic_shapes"), options.get("kwargs")
        target = options.get("target", "cpu")
        assert_parity(module, path, args, kwargs, dynamic_shapes=shapes, target=target)
        return path

    return compiled
