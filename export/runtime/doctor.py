"""What is installed here, what doesn't fit together, and the command that fixes it."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import onnxruntime
import torch

from attngraph.export.kernels.choice import is_known
from attngraph.export.kernels.table import RELEASES
from attngraph.export.kernels.weight_only import FORMS, cost_on_cpu
from attngraph.export.runtime.providers import installed, preload_cuda
from attngraph.export.target import Provider

_PACKAGES = ("torch", "numpy", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "onnxruntime-gpu")
_LIBRARY = re.compile(r"^(?:.*/)?(?P<name>[^:/]+?\.(?:so[.\d]*|dll))\b")


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis; `fix` is a shell command, where one helps."""

    level: Literal["ok", "warning", "problem"]
    subject: str
    message: str
    fix: str | None = None


@dataclass(frozen=True)
class Environment:
    """The facts the diagnosis rests on. `not_loaded` are errors about CUDA libraries."""

    packages: Mapping[str, str]
    providers: tuple[str, ...]
    onnxruntime_cuda: str | None
    torch_cuda: str | None
    not_loaded: tuple[str, ...]
    driver: bool


def diagnose(environment: Environment | None = None) -> list[Finding]:
    """Diagnose this machine, or given facts. Loads the CUDA libraries if they are there."""
    facts = probe() if environment is None else environment
    return [*_packages(facts), *_cpu(facts), *_cuda(facts)]


def probe() -> Environment:
    """The facts of this process's Python environment."""
    found = {name: version for name in _PACKAGES if (version := installed(name))}
    providers = tuple(onnxruntime.get_available_providers())
    built_for: Any = getattr(onnxruntime, "cuda_version", None)
    cuda = "CUDAExecutionProvider" in providers
    return Environment(
        packages=found,
        providers=providers,
        onnxruntime_cuda=str(built_for) if built_for else None,
        torch_cuda=torch.version.cuda,
        not_loaded=tuple(preload_cuda()) if cuda else (),
        driver=cuda and _loads("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"),
    )


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _packages(facts: Environment) -> Iterator[Finding]:
    for name, version in facts.packages.items():
        yield Finding("ok", name, version)
    gpu = facts.packages.get("onnxruntime-gpu")
    name = "onnxruntime-gpu" if gpu else "onnxruntime"
    used = facts.packages.get(name)
    provider: Provider = "cuda" if gpu else "cpu"
    if used is not None and not is_known(used, provider):
        known = RELEASES[provider]
        yield Finding(
            "problem",
            name,
            f"onnxruntime {used} runs files, and compiles none: the kernel table knows {known}.",
            f'pip install "{name}=={known.newest}"',
        )
    if gpu and "onnxruntime" in facts.packages:
        yield Finding(
            "problem",
            "onnxruntime",
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files, "
            "so which one runs is chance.",
            f'pip uninstall -y onnxruntime onnxruntime-gpu && pip install "onnxruntime-gpu=={gpu}"',
        )


def _cpu(facts: Environment) -> Iterator[Finding]:
    if "CPUExecutionProvider" in facts.providers:
        yield Finding("ok", "target cpu", "CPUExecutionProvider is ready.")
        yield Finding("ok", "--weights on cpu", " ".join(map(cost_on_cpu, FORMS)))
    else:
        yield Finding(
            "problem",
            "target cpu",
            "onnxruntime has no CPUExecutionProvider: the installation is broken.",
            "pip install --force-reinstall --no-deps onnxruntime",
        )


def _cuda(facts: Environment) -> Iterator[Finding]:
    gpu = facts.packages.get("onnxruntime-gpu")
    pin = f"=={gpu}" if gpu else ""
    install = f'pip install "onnxruntime-gpu[cuda,cudnn]{pin}"'
    if "CUDAExecutionProvider" not in facts.providers:
        replace = "pip uninstall -y onnxruntime && " if "onnxruntime" in facts.packages else ""
        yield Finding(
            "warning",
            "target cuda",
            "The installed onnxruntime was built without CUDA; --target cuda can't be used.",
            replace + install,
        )
        return
    built = facts.onnxruntime_cuda or "an unknown CUDA"
    major = built.split(".")[0]
    if facts.not_loaded:
        names = (_LIBRARY.match(line) for line in facts.not_loaded)
        missing = ", ".join(
            dict.fromkeys(
                match["name"] if match else line
                for match, line in zip(names, facts.not_loaded, strict=True)
            )
        )
        yield Finding(
            "warning",
            "target cuda",
            f"onnxruntime was built for CUDA {built} and can't load {missing}; "
            "--target cuda can't be used.",
            install,
        )
    else:
        yield Finding("ok", "CUDA libraries", f"all that onnxruntime needs for CUDA {built} load.")
    if not facts.driver:
        yield Finding(
            "warning",
            "NVIDIA driver",
            "There is no NVIDIA driver here: a model for --target cuda can be built only on a "
            "machine that has one, because it is checked by running it.",
        )
    if facts.torch_cuda and facts.torch_cuda.split(".")[0] != major:
        yield Finding(
            "warning",
            "torch",
            f"torch was built for CUDA {facts.torch_cuda} and onnxruntime for {built}: both load "
            "their own libraries into one process, under the same names where cuDNN is concerned.",
            f"pip install torch --index-url https://download.pytorch.org/whl/cu{_wheel(built)}",
        )


def _wheel(cuda: str) -> str:
    """PyTorch's name for a CUDA version: 13.0 is 130."""
    return "".join(cuda.split(".")[:2])
