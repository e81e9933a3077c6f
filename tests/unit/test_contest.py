"""What becomes of engines whose file another engine would have written."""

from __future__ import annotations

from typing import Any

import pytest

from attngraph.measuring.contest import Row, _prepare_all
from attngraph.measuring.engines import BY_NAME


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_without_the_file_of_its_base_is_skipped(fails: bool) -> None:
    """OpenVINO, which only runs it, failed with the path of a file that nobody had written."""
    engines = [BY_NAME[name] for name in ("onnx", "onnx-optimizer", "openvino")]
    rows = {engine.name: Row(engine.name, engine.title) for engine in engines}
    prepared: list[str] = []

    def prepare(engine: Any) -> dict[str, Any]:
        prepared.append(engine.name)
        return {"failed": "no function for it"} if fails else {"prepare_cpu_s": 1.0}

    job: Any = None
    _prepare_all(engines, rows, job, prepare, 1)
    if fails:
        assert prepared == ["onnx"]
        assert [row.status for row in rows.values()] == ["failed", "skipped", "skipped"]
        assert "gave no file to start from" in rows["openvino"].reason
    else:
        assert prepared == ["onnx", "onnx-optimizer"]
        assert {row.status for row in rows.values()} == {"timed"}


def test_a_reason_has_no_colours_of_a_terminal() -> None:
    row = Row("onnx", "torch.onnx.export")
    row.told({"failed": "\x1b[96mstep 3/3\x1b[0m failed"})
    assert (row.status, row.reason) == ("failed", "step 3/3 failed")
