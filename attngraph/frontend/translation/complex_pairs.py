"""Complex numbers among a model's inputs and outputs: the file has them as pairs of reals."""

from __future__ import annotations

from attngraph.ir.builder import Builder
from attngraph.ir.graph import Graph
from attngraph.ir.types import TensorType


def take_pairs(graph: Graph) -> list[str]:
    """Has the graph take and return complex numbers as pairs of reals, and says so.

    ONNX computes on real numbers; what is between inputs and outputs a pass splits.
    """
    notes = []
    build = Builder(graph, next(iter(graph), None))
    for value in graph.inputs:
        if not value.dtype.is_complex:
            continue
        readers = value.users
        value.type = TensorType(value.dtype.to_real(), (*value.shape, 2))
        made = build("aten.view_as_complex", value)
        for node in readers:
            graph.set_inputs(node, [made if each is value else each for each in node.inputs])
        graph.set_outputs([made if each is value else each for each in graph.outputs])
        notes.append(
            f"Input {value.name} is complex: the file takes torch.view_as_real of it, with the "
            "real and the imaginary parts along one more axis of 2."
        )
    build.at(None)
    outputs = list(graph.outputs)
    for place, value in enumerate(outputs):
        if value.dtype.is_complex:
            outputs[place] = build("aten.view_as_real", build("aten.resolve_conj", value))
            notes.append(
                f"Output {graph.output_names[place]} is complex: the file returns "
                "torch.view_as_real of it, with one more axis of 2."
            )
    graph.set_outputs(outputs)
    return notes
