"""The ONNX file that each engine runs.

Each function writes `file`, or raises its tool's error; `base` is the file it starts from.
"""

from __future__ import annotations

import importlib
import inspect
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attngraph.compiling.compiler import compile_model
from attngraph.errors import CaptureError
from attngraph.measuring.job import Job
from attngraph.options import Options, Verify

Export = Callable[[Job, Path, Path], None]


class NotFor(Exception):
    """The tool doesn't take such a model; the message says why."""


def ours(**options: Any) -> Export:
    """This compiler with options; to ignore padded rows is for jobs that name their mask."""

    def export(job: Job, base: Path, file: Path) -> None:
        if "ignore_padded_rows" in options and job.padding is None:
            raise NotFor("the workload has no padding that could be ignored")
        _compile(job, file, **options)

    return export


def _compile(job: Job, file: Path, **options: Any) -> None:
    # Parity is judged as every engine's is. In halves, what stays in float32 is found by it, and
    # outliers and codes of rounded linears are decided on what is checked.
    decides = job.precision != "fp32" or "activations" in options
    verify: Verify = "final" if decides else "off"
    chosen = Options(target=job.target, precision=job.precision, verify=verify, **options)
    try:
        compiled = compile_model(job.model(), chosen)
    except (
        CaptureError
    ):  # a trace at other sizes than the sample's is only taken where it's checked
        if chosen.verify == "final":
            raise
        compiled = compile_model(job.model(), replace(chosen, verify="final"))
    compiled.save(file)


def torch_export(job: Job, base: Path, file: Path) -> None:
    """`torch.onnx.export`, its default exporter."""
    model = job.ready()
    exported = model.program if job.precision == "fp32" and model.program else model.module
    assert exported is not None
    with torch.no_grad():
        torch.onnx.export(
            exported,
            tuple(model.args),
            file,
            kwargs=dict(model.kwargs),
            dynamic_shapes=model.dynamic_shapes,
            dynamo=True,
            verbose=False,
        )


def quantize_dynamic(job: Job, base: Path, file: Path) -> None:
    """onnxruntime's `quantize_dynamic` with its defaults, after what it asks to run before."""
    if job.device != "cpu" or job.precision != "fp32":
        raise NotFor("it is for float32 models on the CPU")
    quantized_dynamically(base, file)


def quantized_dynamically(base: Path, file: Path) -> None:
    """Writes the file that `quantize_dynamic` makes of another."""
    import onnx
    from onnxruntime.quantization import quant_pre_process, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder:
        whole, prepared = Path(folder) / "whole.onnx", Path(folder) / "prepared.onnx"
        onnx.save(onnx.load(base), whole)  # it takes no weights beside the file
        quant_pre_process(str(whole), str(prepared), skip_symbolic_shape=True)
        quantize_dynamic(prepared, file)


def transformers_optimizer(job: Job, base: Path, file: Path) -> None:
    """`onnxruntime.transformers.optimizer` on the file of `torch.onnx.export`."""
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import MODEL_TYPES, optimize_model

    config = getattr(job.model().module, "config", None)
    kind = getattr(config, "model_type", "")
    kind = kind if kind in MODEL_TYPES else "bert"
    optimized = optimize_model(
        str(base),
        model_type=kind,
        num_heads=getattr(config, "num_attention_heads", 0),
        hidden_size=getattr(config, "hidden_size", 0),
        optimization_options=FusionOptions(kind),
        opt_level=0,
        use_gpu=job.device == "cuda",
    )
    optimized.save_model_to_file(str(file), use_external_data_format=_large(base))


def onnxscript_fusions(job: Job, base: Path, file: Path) -> None:
    """`onnxscript.rewriter.ort_fusions.optimize_for_ort` on the file of `torch.onnx.export`."""
    import onnx_ir
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    optimized, _ = optimize_for_ort(onnx_ir.load(base))
    onnx_ir.save(optimized, file, external_data=f"{file.name}.data")


def transformers_exporter(job: Job, base: Path, file: Path) -> None:
    """`transformers.exporters`, with its fusions for the provider. For models of transformers."""
    try:
        tool: Any = importlib.import_module("transformers.exporters.exporter_onnx")
        pretrained: Any = importlib.import_module("transformers").PreTrainedModel
    except ImportError as error:
        raise NotFor(f"there is no ONNX exporter in the installed transformers: {error}") from error
    model = job.ready()
    if not isinstance(model.module, pretrained):
        raise NotFor("it takes models of transformers only")
    bound = inspect.signature(model.module.forward).bind(*model.args, **model.kwargs)
    config = tool.OnnxConfig(dynamic=model.dynamic_shapes is not None, ort_fusions=job.device)
    exporter = tool.OnnxExporter()
    exported = exporter.export(model.module, dict(bound.arguments), config=config)
    exporter.save_program(exported.program, file)


def _large(file: Path) -> bool:
    """Whether the weights go beside the file, as they must from 2 GiB on."""
    return file.with_name(f"{file.name}.data").exists()
