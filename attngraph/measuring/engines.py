"""The engines, each as what it prepares and how it is called."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attngraph.errors import AttngraphError
from attngraph.export.reference import flatten_outputs
from attngraph.measuring import exporters
from attngraph.measuring.exporters import NotFor
from attngraph.measuring.job import Job

Call = Callable[[], Any]
Outputs = Callable[[Any], tuple[torch.Tensor, ...]]
Export = Callable[[Job, Path, Path], None]


@dataclass(frozen=True)
class Engine:
    """`export` writes the ONNX file that it runs, from the file of the engine `base`.

    Without `export` it runs the module in torch.
    """

    name: str
    title: str
    export: Export | None = None
    base: str = ""

    def file(self, folder: Path) -> Path:
        return folder / f"{self.name}.onnx"


OURS, PACKED = "attngraph", "attngraph-packed"
ENGINES: tuple[Engine, ...] = (
    Engine("eager", "eager PyTorch"),
    Engine("compile", "torch.compile"),
    Engine("onnx", "torch.onnx.export", exporters.torch_export),
    Engine(
        "onnx-optimizer",
        "torch.onnx.export, onnxruntime.transformers.optimizer",
        exporters.transformers_optimizer,
        "onnx",
    ),
    Engine(
        "onnx-fusions",
        "torch.onnx.export, onnxscript's optimize_for_ort",
        exporters.onnxscript_fusions,
        "onnx",
    ),
    Engine("transformers", "transformers' ONNX exporter", exporters.transformers_exporter),
    Engine(OURS, "attngraph", exporters.attngraph),
    Engine(PACKED, "attngraph --ignore-padded-rows", exporters.attngraph_packed),
)
BY_NAME = {engine.name: engine for engine in ENGINES}


def open_engine(engine: Engine, job: Job, folder: Path) -> tuple[Call, Outputs]:
    """A call of the model on the job's inputs, and how to read the tensors that it returns.

    A call returns when its result is there. Raises NotFor where the engine can't run here.
    """
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    if engine.export is None:
        return _torch(engine.name == "compile", job)
    path = job.onnx if engine.name == OURS and job.onnx is not None else engine.file(folder)
    return _onnx(path, job, folder), tuple


def _onnx(path: Path, job: Job, folder: Path) -> Call:
    """Runs of a file; on CUDA as a CUDA graph where shapes are static and onnxruntime takes it, as
    torch.compile has one there.
    """
    session = job.session(path)
    inputs = [
        tensor.to(job.device, session.input_dtype(name))
        for name, tensor in zip(session.input_names, job.inputs(folder), strict=True)
    ]
    if job.static and job.device == "cuda":
        with contextlib.suppress(AttngraphError):  # copies or sizes on the CPU can't be recorded
            graph = job.session(path, cuda_graph=True)
            graph.run(inputs)
            return lambda: graph.run(inputs)
    return lambda: session.run(inputs)


def _torch(compiled: bool, job: Job) -> tuple[Call, Outputs]:
    if compiled and job.device == "cpu" and not _compiler():
        raise NotFor("on the CPU it needs a C++ compiler, and there is none (g++ or $CXX)")
    model = job.ready()
    assert model.module is not None
    run: Any = model.module
    if compiled:
        mode = "reduce-overhead" if job.device == "cuda" else None
        run = torch.compile(model.module, mode=mode)
    args, kwargs = model.args, dict(model.kwargs)

    def call() -> Any:
        with torch.inference_mode():
            result = run(*args, **kwargs)
        if job.device == "cuda":
            torch.cuda.synchronize()
        return result

    return call, lambda result: tuple(tensor for _, tensor in flatten_outputs(result))


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "")) or shutil.which("g++") or shutil.which("clang++")
