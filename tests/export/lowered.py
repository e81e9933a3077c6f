"""Lowers IR texts and runs them in onnxruntime beside the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime
import torch
from torch.utils import _pytree as pytree

from attngraph import dialect
from attngraph.export.lowering.lower import lower
from attngraph.frontend.capture import capture
from attngraph.ir import Graph, interpret, parse
from attngraph.ir.dims import substitute

assert dialect  # importing it registers the attn ops

DIMS = """
  dim batch = 2 in 1..
  dim seq = 5 in 1..
  dim keys = 7 in 1..
"""
SIZES = (
    {"batch": 2, "seq": 5, "keys": 7},
    {"batch": 1, "seq": 1, "keys": 3},
    {"batch": 3, "seq": 8, "keys": 4},
)


def graph_of(body: str, weights: Mapping[str, torch.Tensor] | None = None) -> Graph:
    """A graph from its lines, over the dims batch, seq and keys."""
    return parse(f"graph @test {{{DIMS}{body}\n}}", weights)


def random_inputs(graph: Graph, sizes: Mapping[str, int], seed: int = 0) -> list[torch.Tensor]:
    """Floats from a normal distribution, integers in 0…4, bools half true."""
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for value in graph.inputs:
        shape = substitute(list(value.shape), sizes)
        if value.dtype.is_floating_point:
            inputs.append(torch.randn(shape, generator=generator).to(value.dtype))
        elif value.dtype == torch.bool:
            inputs.append(torch.rand(shape, generator=generator) < 0.5)
        else:
            inputs.append(torch.randint(0, 5, shape, generator=generator).to(value.dtype))
    return inputs


def session_of(model: ir.Model, *, optimize: bool = True) -> onnxruntime.InferenceSession:
    """A checked model on the CPU provider."""
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    if not optimize:
        level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.graph_optimization_level = level
    return onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def run(
    session: onnxruntime.InferenceSession, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Outputs of a session whose inputs are all read; unread ones are left out."""
    names = [argument.name for argument in session.get_inputs()]
    feeds = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
    return [torch.from_numpy(array) for array in session.run(None, feeds)]


def check(
    body: str,
    weights: Mapping[str, torch.Tensor] | None = None,
    *,
    inputs: Sequence[torch.Tensor] | None = None,
    sizes: Sequence[Mapping[str, int]] = SIZES,
) -> ir.Model:
    """Asserts that onnxruntime and the interpreter agree, at several sizes; returns the model."""
    graph = graph_of(body, weights)
    model = lower(graph)
    session = session_of(model)
    for size in sizes if inputs is None else ({},):
        given = random_inputs(graph, size) if inputs is None else inputs
        expected = interpret(graph, given)
        for actual, wanted in zip(run(session, given), expected, strict=True):
            assert_same(actual, wanted, str(size))
    return model


def assert_same(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Equal shape and dtype; integers exact, floats within 32 roundings of the largest element."""
    expected = torch.as_tensor(expected)
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} instead of {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape} instead of {expected.shape}"
    if not expected.dtype.is_floating_point:
        assert torch.equal(actual, expected), f"{what}: {actual} instead of {expected}"
        return
    finite = expected[expected.isfinite()]
    scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
    tolerance = 32 * torch.finfo(expected.dtype).eps * scale
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance, equal_nan=True, msg=what)


def module(function: Callable[..., Any], count: int) -> torch.nn.Module:
    """The function as a module with as many inputs, each of its own name."""
    names = ", ".join(f"x{i}" for i in range(count))
    space: dict[str, Any] = {"f": function, "Module": torch.nn.Module}
    exec(f"class Case(Module):\n    def forward(self, {names}): return f({names})", space)
    made: torch.nn.Module = space["Case"]()
    return made


def agrees(
    function: Callable[..., Any],
    *runs: Sequence[torch.Tensor],
    shapes: tuple[Any, ...] | None = None,
) -> None:
    """Asserts that the lowered function gives what eager does in runs, the first of them traced."""
    model = module(function, len(runs[0]))
    session = session_of(lower(capture(model, tuple(runs[0]), dynamic_shapes=shapes).graph))
    for given in runs:
        found = pytree.tree_leaves(model(*given))
        expected = [each for each in found if isinstance(each, torch.Tensor)]
        for actual, wanted in zip(run(session, given), expected, strict=True):
            assert_same(actual, wanted, f"{[tuple(each.shape) for each in given]}")


def op_types(model: ir.Model) -> list[str]:
    """The model's operators in order."""
    return [node.op_type for node in model.graph]
