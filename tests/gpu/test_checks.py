"""The checks themselves, which need no GPU: what they would say of what a GPU might show."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.checks import NAMES, examine, faults, kernels_of, why_not
from tests.gpu.run import main

GOOD: dict[str, Any] = {
    "parity": {"passed": True, "same_on_device": True},
    "dispatch": {
        "provider": "CUDAExecutionProvider",
        "expected": [{"op": "Attention", "kernel": "Flash"}],
        "attention_on": ["CUDAExecutionProvider"],
        "kernels": [["Attention", "FLASH_ATTENTION"]],
    },
}


def _changed(part: str, **values: Any) -> dict[str, Any]:
    return {**GOOD, part: {**GOOD[part], **values}}


def test_nothing_is_said_where_all_is_well() -> None:
    assert faults(GOOD) == []


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (_changed("parity", passed=False, error=0.5, budget=0.1), "error 0.5 over its budget 0.1"),
        (_changed("parity", same_on_device=False), "tensors on the device"),
        (_changed("dispatch", kernels=[["Attention", "MATH"]]), "ran on MATH, and the table says"),
        (_changed("dispatch", kernels=[]), "0 runs of Attention were logged, not 1"),
        (_changed("dispatch", attention_on=["CPUExecutionProvider"]), "1 attentions on CPU"),
        (_changed("dispatch", attention_on=[]), "taken apart"),
        ({**GOOD, "compile": {"failed": "LoweringError: x"}}, "compile: LoweringError: x"),
    ],
)
def test_each_fault_is_a_sentence(found: dict[str, Any], said: str) -> None:
    (sentence,) = faults(found)
    assert said in sentence


def test_kernels_are_read_from_the_log() -> None:
    log = "Operator=Attention Node=n DataType=fp16 SdpaKernel=FLASH_ATTENTION\nnoise\n"
    assert kernels_of(log) == [["Attention", "FLASH_ATTENTION"]]


@pytest.mark.machine
@pytest.mark.parametrize("name", ["mha", "encoder, padding ignored"])
def test_a_model_is_examined_where_there_is_no_gpu_too(name: str) -> None:
    """On the CPU provider, whose dispatch isn't logged: all the rest must work."""
    assert name in NAMES
    found = examine(name, "fp32", "cpu")
    assert faults(found, kernels=False) == []
    assert found["parity"]["passed"]
    assert found["dispatch"]["attention_on"]
    assert found["dispatch"]["memcpy"] == 0


@pytest.mark.skipif(not why_not(), reason="there is a GPU")
def test_make_gpu_says_that_cuda_is_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    assert main([str(tmp_path / "out")]) == 1
    assert "CUDA is missing" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
