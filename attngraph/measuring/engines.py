"""The engines: what each prepares, and how it is called."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attngraph.errors import AttngraphError
from attngraph.export.parity.reference import flatten_outputs
from attngraph.export.runtime.session import Session
from attngraph.measuring import exporters
from attngraph.measuring.exporters import Export, NotFor
from attngraph.measuring.job import Job

Call = Callable[[], Any]
Outputs = Callable[[Any], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Engine:
    """`export` writes the ONNX file that it runs, from the file of the engine `base`.

    Without `export` it runs the module in torch, or the file of its base. One that is `quantized`
    leaves the model's numbers: it is timed where it is named, and its error is told, with no
    budget.
    """

    name: str
    title: str
    export: Export | None = None
    base: str = ""
    quantized: bool = False

    def file(self, folder: Path) -> Path:
        return folder / f"{self.name}.onnx"


INT8 = {"weights": "int8", "activations": "int8"}
OURS, PACKED, OPENVINO = "attngraph", "attngraph-packed", "openvino"
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
    Engine(OPENVINO, "torch.onnx.export in OpenVINO", base="onnx"),
    Engine(OURS, "attngraph", exporters.ours()),
    Engine(PACKED, "attngraph --ignore-padded-rows", exporters.ours(ignore_padded_rows=True)),
    Engine(
        "onnx-int8",
        "torch.onnx.export, onnxruntime's quantize_dynamic",
        exporters.quantize_dynamic,
        "onnx",
        quantized=True,
    ),
    Engine(
        "attngraph-int8",
        "attngraph --weights int8 --activations int8",
        exporters.ours(**INT8),
        quantized=True,
    ),
    Engine(
        "attngraph-int8-packed",
        "attngraph --weights int8 --activations int8 --ignore-padded-rows",
        exporters.ours(ignore_padded_rows=True, **INT8),
        quantized=True,
    ),
)
BY_NAME = {engine.name: engine for engine in ENGINES}


def open_engine(engine: Engine, job: Job, folder: Path) -> tuple[Call, Outputs, str]:
    """A call of the model on the job's inputs, how to read the tensors that it returns, a note.

    A call returns when its result is there. Raises NotFor where the engine can't run here.
    """
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    if engine.name == OPENVINO:
        return _openvino(BY_NAME[engine.base].file(folder), job, folder), tuple, ""
    if engine.export is None:
        return (*_torch(engine.name == "compile", job), "")
    path = job.onnx if engine.name == OURS and job.onnx is not None else engine.file(folder)
    call, note = _onnx(path, job, folder)
    return call, tuple, note


def _onnx(path: Path, job: Job, folder: Path) -> tuple[Call, str]:
    """Runs of a file; on CUDA as a CUDA graph where shapes are static and onnxruntime takes it, as
    torch.compile has one there.
    """
    given = job.placed(job.inputs(folder))
    if not (job.static and job.device == "cuda"):
        return _runs(job.session(path), given), ""
    try:
        return _replays(path, job, given), "a CUDA graph"
    except AttngraphError as error:  # copies or sizes on the CPU can't be recorded
        note = f"no CUDA graph: {error}"
    # By now the session that failed is gone, and with it what it was recording.
    return _runs(job.session(path), given), note


def _replays(path: Path, job: Job, given: list[torch.Tensor]) -> Call:
    call = _runs(job.session(path, cuda_graph=True), given)
    call()
    return call


def _runs(session: Session, given: list[torch.Tensor]) -> Call:
    """On the inputs that all engines get, in the dtypes that the file takes."""
    names = session.input_names
    inputs = [each.to(session.input_dtype(n)) for n, each in zip(names, given, strict=True)]
    return lambda: session.run(inputs)


def _openvino(path: Path, job: Job, folder: Path) -> Call:
    """Runs of a file in OpenVINO, in float32: on some CPUs it would choose bfloat16 by itself."""
    if job.device != "cpu" or job.precision != "fp32":
        raise NotFor("it is measured on the CPU in float32 only")
    try:
        openvino: Any = importlib.import_module("openvino")
    except ImportError as error:
        raise NotFor(f"it isn't installed ({error}): pip install openvino") from error
    hints = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": job.threads or torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
    }
    core = openvino.Core()
    request = core.compile_model(core.read_model(path), "CPU", hints).create_infer_request()
    given = {at: tensor.numpy() for at, tensor in enumerate(job.inputs(folder))}

    def call() -> tuple[torch.Tensor, ...]:
        found = request.infer(given, share_inputs=True)
        return tuple(torch.from_numpy(each.copy()) for each in found.to_tuple())

    return call


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
