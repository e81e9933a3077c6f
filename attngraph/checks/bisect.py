"""Names the first node that diverges, once a result is out of its error budget.

Passes first: the pipeline is run again on the captured graph, pass by pass, and each graph is
evaluated. If none is to blame, the ONNX model is run with every value as an output and the
optimisations of onnxruntime off, against the interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir
import torch

from attngraph.errors import AttngraphError
from attngraph.export.files.save import to_session
from attngraph.export.lowering.lower import value_names
from attngraph.ir import Graph, Node, Value, clone, interpret
from attngraph.optimized import Optimized
from attngraph.passes import Pass, run


def diverges(actual: Any, expected: Any) -> bool:
    """Whether half of the dtype's digits are lost, at the scale of the whole tensor."""
    if not isinstance(actual, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return bool(actual != expected)
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return True
    if not expected.is_floating_point():
        return not torch.equal(actual, expected)
    if expected.numel() == 0:
        return False
    finite = torch.isfinite(expected)
    if not torch.equal(finite, torch.isfinite(actual)):
        return True
    scale = float(expected[finite].abs().max()) if bool(finite.any()) else 0.0
    error = torch.where(finite, actual.double() - expected.double(), 0.0).abs().max()
    return float(error) > math.sqrt(torch.finfo(expected.dtype).eps) * scale


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, on the scale of the whole tensor; for integers and bools the share of
    elements that differ, and 1 where shapes or what is finite differ.
    """
    if actual.shape != expected.shape:
        return 1.0
    if not expected.is_floating_point() or not actual.is_floating_point():
        return float((actual != expected).double().mean()) if expected.numel() else 0.0
    finite = torch.isfinite(expected)
    if not torch.equal(finite, torch.isfinite(actual)):
        return 1.0
    if not bool(finite.any()):
        return 0.0
    off = (actual[finite].double() - expected[finite].double()).abs().max()
    return float(off) / (float(expected[finite].abs().max()) or 1.0)


def _evaluate(graph: Graph, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    values: dict[str, Any] = {}

    def observe(value: Value, result: Any) -> None:
        values[value.name] = result

    return interpret(graph, inputs, observe=observe), values


def _first(graph: Graph, values: dict[str, Any], expected: dict[str, Any]) -> Node | None:
    for node in graph:
        for value in node.outputs:
            if value.name not in values or value.name not in expected:
                continue
            if diverges(values[value.name], expected[value.name]):
                return node
    return None


def _place(node: Node) -> str:
    return f"%{node.outputs[0].name} = {node.op}, from {node.loc}"


def blame(
    captured: Graph,
    passes: Sequence[Pass],
    optimised: Graph,
    result: Optimized,
    inputs: Sequence[torch.Tensor],
    rows: Mapping[int, torch.Tensor],
) -> str:
    """A sentence that names the first pass or node to diverge from the captured graph.

    `rows` maps the position of an output to those of its rows that count, if not all do.
    """

    def counted(outputs: Sequence[Any]) -> list[Any]:
        return [value[rows[at]] if at in rows else value for at, value in enumerate(outputs)]

    expected, reference = _evaluate(captured, inputs)
    graph = clone(captured)
    for item in passes:
        run(graph, [item])
        outputs, values = _evaluate(graph, inputs)
        pairs = zip(counted(outputs), counted(expected), strict=True)
        if any(diverges(a, b) for a, b in pairs):
            node = _first(graph, values, reference)
            where = f" at {_place(node)}" if node is not None else ""
            return f"The pass {item.name} is the first to diverge{where}."
    if result.buffers is not None:
        return "The passes agree with eager; it is the ONNX form with a static cache that diverges."
    _, values = _evaluate(optimised, inputs)
    try:
        lowered = _all_values(result, inputs)
    except AttngraphError as error:
        return f"The passes agree with eager; the ONNX model can't be taken apart: {error}"
    node = _first(optimised, lowered, values)
    if node is None:
        return "No value loses half of its digits at one node: small errors add up."
    told = f"The first ONNX value to diverge is {_place(node)}"
    if _is_tied(node, lowered, values):
        return (
            f"{told}: the numbers agree and their places do not, for some are equal, and of these "
            "torch may take any. Where that decides the result, take the first of them: "
            "torch.sort(…, stable=True)."
        )
    return f"{told}."


def _is_tied(node: Node, values: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether the first output, numbers, agrees, and the second, where they stand, doesn't."""
    if len(node.outputs) != 2 or node.outputs[1].dtype.is_floating_point:
        return False
    name = node.outputs[0].name
    return name in values and name in expected and not diverges(values[name], expected[name])


def _all_values(result: Optimized, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every ONNX value that stands for an IR value, by the IR value's name."""
    wanted = {name: value.name for value, name in value_names(result.graph).items()}
    model = onnx_ir.from_proto(onnx_ir.to_proto(result.model))
    graph = model.graph
    present = {value.name for value in graph.outputs}
    for node in graph:
        for value in node.outputs:
            if value.name in wanted and value.name not in present and value.type is not None:
                graph.outputs.append(value)
    with to_session(model, result.target, graph_optimization="off") as session:
        outputs = session.run(inputs)
        found = zip(session.output_names, outputs, strict=True)
        return {wanted[name]: output for name, output in found if name in wanted}
