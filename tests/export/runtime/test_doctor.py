"""The doctor names what doesn't fit, with the command that fixes it."""

from __future__ import annotations

import dataclasses
import re
from importlib import metadata
from pathlib import Path

import onnxruntime
from packaging.specifiers import SpecifierSet

from attngraph.export.kernels.choice import is_known
from attngraph.export.runtime.doctor import Environment, Finding, diagnose

PROJECT = Path(__file__).parents[3] / "pyproject.toml"
HEALTHY = Environment(
    packages={"torch": "2.13.0", "onnxruntime-gpu": "1.31.1"},
    providers=("CUDAExecutionProvider", "CPUExecutionProvider"),
    onnxruntime_cuda="13.0",
    torch_cuda="13.0",
    not_loaded=(),
    driver=True,
)


def findings(**changes: object) -> list[Finding]:
    found = diagnose(dataclasses.replace(HEALTHY, **changes))
    return [finding for finding in found if finding.level != "ok"]


def test_a_healthy_machine_has_nothing_to_fix() -> None:
    assert findings() == []
    assert {f.subject for f in diagnose(HEALTHY)} >= {"torch", "target cpu", "CUDA libraries"}


def test_both_onnxruntimes_are_a_problem() -> None:
    (found,) = findings(packages={"onnxruntime": "1.30.0", "onnxruntime-gpu": "1.31.1"})
    assert found.level == "problem"
    assert found.fix is not None
    assert "uninstall -y onnxruntime onnxruntime-gpu" in found.fix
    assert "onnxruntime-gpu==1.31.1" in found.fix


def test_an_onnxruntime_that_nothing_can_be_compiled_for_is_a_problem() -> None:
    for name, version, fix in (
        ("onnxruntime", "1.24.1", "1.32.*"),
        ("onnxruntime", "1.30.0", "1.32.*"),
        ("onnxruntime", "1.33.0", "1.32.*"),
        ("onnxruntime-gpu", "1.32.0", "1.31.*"),
    ):
        (found,) = findings(packages={name: version})
        assert found.level == "problem"
        assert found.message.startswith(f"onnxruntime {version} runs files, and compiles none")
        assert found.fix == f'pip install "{name}=={fix}"'


def test_pip_installs_no_onnxruntime_but_those_that_compile() -> None:
    """What pyproject.toml allows is what the kernel table knows, in each of its lines."""
    text = PROJECT.read_text("utf-8")
    allowed = re.findall(r"onnxruntime(-gpu)?[^<>=;\"]*([<>=][^;\"]*)", text)
    assert len(allowed) == 3
    for gpu, text in allowed:
        range_ = SpecifierSet(text)
        for minor in range(20, 40):
            known = is_known(f"1.{minor}.1", "cuda" if gpu else "cpu")
            assert (f"1.{minor}.1" in range_) is known, text


def test_missing_libraries_are_named_with_the_pinned_extra() -> None:
    why = "cannot open shared object file: No such file or directory"
    (found,) = findings(
        not_loaded=(f"libcublasLt.so.13: {why}", f"/a/b/libcurand.so.10: {why}", "odd")
    )
    assert "can't load libcublasLt.so.13, libcurand.so.10, odd;" in found.message
    assert "CUDA 13.0" in found.message
    assert found.fix == 'pip install "onnxruntime-gpu[cuda,cudnn]==1.31.1"'


def test_a_cpu_wheel_can_be_exchanged() -> None:
    (found,) = findings(
        packages={"onnxruntime": "1.31.1"},
        providers=("CPUExecutionProvider",),
        onnxruntime_cuda=None,
        driver=False,
    )
    assert found.subject == "target cuda"
    assert found.fix is not None
    assert found.fix.startswith("pip uninstall -y onnxruntime && pip install")


def test_a_broken_install_a_missing_driver_and_another_cuda_are_said() -> None:
    assert findings(providers=("CUDAExecutionProvider",))[0].level == "problem"
    assert [f.subject for f in findings(driver=False)] == ["NVIDIA driver"]
    (found,) = findings(torch_cuda="12.8")
    assert found.fix is not None
    assert found.fix.endswith("/cu130")
    assert findings(torch_cuda=None) == []


def test_this_machine_can_be_diagnosed() -> None:
    found = {finding.subject: finding for finding in diagnose()}
    assert found["target cpu"].level == "ok"
    assert found["torch"].message == metadata.version("torch")
    assert onnxruntime.__version__ in {finding.message for finding in found.values()}
