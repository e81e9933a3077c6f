"""The placement tool, built once."""

from __future__ import annotations

import pytest

from tests.placement.tool import Tool, build


@pytest.fixture(scope="session")
def placement(tmp_path_factory: pytest.TempPathFactory) -> Tool:
    return build(tmp_path_factory.mktemp("cuda_placement"))
