"""One model in one precision on a GPU: `python -m tests.gpu.worker CASE PRECISION TARGET OUT.json`.

Started by `examine`, which reads from the log what this process can't be told: the attention
kernels that onnxruntime dispatched to.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch

import attngraph
from attngraph.errors import ParityError
from attngraph.export.kernels import Choice, choose_all, facts_of
from attngraph.export.kernels.choice import candidates, version_of
from attngraph.export.kernels.table import PRIMITIVE
from attngraph.export.parity.samples import DTYPE
from attngraph.export.runtime.providers import preload_cuda
from attngraph.export.runtime.tensors import to_ort
from attngraph.export.target import Target, parse_target
from attngraph.ir import DimInfo, Graph, Node
from attngraph.optimized import Optimized
from tests.models import CASES
from tests.models.kit import Built

ATTENTION = (
    *("Attention", "GroupQueryAttention", "MultiHeadAttention"),
    "PackedMultiHeadAttention",
)
PACKED = ", padding ignored"
"""What the name of a case ends in that is compiled with --ignore-padded-rows."""
MARK = "--- the run whose kernels are read ---"


def parity(optimized: Optimized, built: Built) -> dict[str, Any]:
    """The parity that the compiler measured, and whether tensors on the device give the same."""
    found = optimized.report.parity
    assert found is not None
    names = optimized.session.input_names
    inputs = [
        tensor.to(optimized.session.input_dtype(name))
        for name, tensor in zip(names, built.args, strict=True)
    ]
    host = optimized.run(inputs)
    device = "cuda" if optimized.target.provider == "cuda" else "cpu"
    bound = optimized.run([tensor.to(device) for tensor in inputs])
    same = all(
        near.device.type == device and torch.equal(far, near.cpu())
        for far, near in zip(host, bound, strict=True)
    )
    figures = found.to_dict()
    del figures["outputs"]
    return {**figures, "same_on_device": same}


def dispatch(optimized: Optimized, built: Built) -> dict[str, Any]:
    """What the table expects, and where onnxruntime placed the nodes; one run, for the log."""
    choices = choose_all(optimized.graph, optimized.target)
    sizes = _sizes(optimized.graph, built)
    expected = [
        {
            "op": choice.form.op.rpartition(".")[2],
            "kernel": _kernel(node, choice, sizes, optimized.target),
        }
        for node, choice in choices.items()
        if choice.form != PRIMITIVE
    ]
    with tempfile.TemporaryDirectory() as folder:
        model, final = Path(folder) / "model.onnx", Path(folder) / "final.onnx"
        optimized.save(model)
        # Set as late as this, so that no earlier session logs its kernels too.
        os.environ["ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO"] = "1"
        os.write(1, f"{MARK}\n".encode())
        session = _logging_session(model, final, optimized.target)
        names = optimized.session.input_names
        feeds = _feeds(optimized, names, built)
        session.run_with_ort_values(None, feeds)
        nodes = onnx.load(final, load_external_data=False).graph.node
        memcpy = sum(node.op_type.startswith("Memcpy") for node in nodes)
    placed = [
        (subgraph.ep_name, node.op_type)
        for subgraph in session.get_provider_graph_assignment_info()
        for node in subgraph.get_nodes()
    ]
    wanted = optimized.target.execution_provider
    off = sorted({op for provider, op in placed if provider != wanted})
    attention = [provider for provider, op in placed if op in ATTENTION]
    return {
        "expected": expected,
        "attention_on": attention,
        "elsewhere": off,
        "memcpy": memcpy,
        "provider": wanted,
    }


def _sizes(graph: Graph, built: Built) -> dict[str, DimInfo]:
    """Each dim as what it is in the run: its size alone."""
    found = {}
    for value, tensor in zip(graph.inputs, built.args, strict=True):
        for dim, size in zip(value.shape, tensor.shape, strict=True):
            if not isinstance(dim, int) and str(dim) in graph.dims:
                found[str(dim)] = DimInfo(low=size, high=size, hint=size)
    return {**graph.dims, **found}


def _kernel(node: Node, choice: Choice, sizes: Mapping[str, DimInfo], target: Target) -> str:
    """The kernel that the table names for a site of these very sizes."""
    facts = facts_of(node, sizes)
    (queries, _), (keys, _) = facts.queries, facts.keys
    known = replace(facts, square=queries == keys, aligned_keys=keys % 4 == 0)
    version = version_of(onnxruntime.__version__)
    found = {one.form: one.kernel for one in candidates(known, target, version)}
    return found[choice.form]


def _logging_session(model: Path, final: Path, target: Target) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 0
    options.optimized_model_filepath = str(final)
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    provider_options = {"use_tf32": "0"} if target.provider == "cuda" else {}
    if target.provider == "cuda":
        preload_cuda()
    providers = [(target.execution_provider, provider_options)]
    session = onnxruntime.InferenceSession(model, options, providers=providers)
    assert session.get_providers()[0] == target.execution_provider, session.get_providers()
    return session


def _feeds(
    optimized: Optimized, names: tuple[str, ...], built: Built
) -> dict[str, onnxruntime.OrtValue]:
    return {
        name: to_ort(tensor.to(optimized.session.input_dtype(name)).contiguous())
        for name, tensor in zip(names, built.args, strict=True)
    }


def main(name: str, precision: str, target: str, out: Path) -> None:
    warnings.simplefilter("ignore")
    assert precision in DTYPE
    plain = name.removesuffix(PACKED)
    built = next(case for case in CASES if case.name == plain).build()
    found: dict[str, Any] = {}

    def step(what: str, work: Callable[[], dict[str, Any]]) -> None:
        try:
            found[what] = work()
        except Exception as error:  # whatever fails: the other steps' results are kept
            found[what] = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        out.write_text(json.dumps(found))

    optimized: list[Optimized] = []

    def compiled() -> dict[str, Any]:
        start = time.perf_counter()
        build = functools.partial(
            attngraph.optimize,
            built.module,
            built.args,
            dynamic_shapes=built.dynamic_shapes,
            target=str(parse_target(target)),
            precision=precision,
            ignore_padded_rows=name != plain,
        )
        try:
            optimized.append(build())
        except ParityError as error:  # its placement and kernels are of use all the same
            found["parity"] = {"failed": str(error)}
            optimized.append(build(verify="off"))
        return {"seconds": time.perf_counter() - start}

    step("compile", compiled)
    if optimized:
        if "parity" not in found:
            step("parity", lambda: parity(optimized[0], built))
        step("dispatch", lambda: dispatch(optimized[0], built))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
