"""One decoder file for the first step and for those behind a cache, as optimum merges two.

Its input `use_cache_branch` (1,) says which it is. In the first step what the cross-attentions read
is computed from `encoder_hidden_states` (B, T, H) and given out; behind a cache it is the input,
and what is given out in its place is empty: no step copies it. Only the nodes that read it are
there twice, one in each branch of an `If`, so no weight is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy
import onnx_ir as ir

HIDDEN, USES_CACHE = "encoder_hidden_states", "use_cache_branch"


def merged(decoder: ir.Model, keys: ir.Model, memory: Mapping[str, str]) -> ir.Model:
    """`decoder` with what `keys` computes of HIDDEN, its one input, wherever there is no cache.

    `memory` maps inputs of the decoder to the outputs of `keys` that they are of the first step's.
    Tensors are shared with both.
    """
    model, first = decoder.clone(), keys.clone().graph
    graph = model.graph
    inputs = {str(value.name): value for value in graph.inputs}
    uses_cache = ir.val(USES_CACHE, ir.DataType.BOOL, ir.Shape([1]))
    (hidden,) = first.inputs
    first.inputs.clear()
    graph.inputs.extend((hidden, uses_cache))
    for value in _values(first):
        if value is not hidden:
            value.name = f"first/{value.name}"
    for name, weight in list(first.initializers.items()):
        del first.initializers[name]
        graph.initializers.add(weight)
    start = _first_step(first, uses_cache, memory, inputs)
    graph.insert_before(graph[0], start)
    presents = {inputs[name]: value for name, value in zip(memory, start.outputs, strict=True)}
    for past, present in presents.items():
        assert past.shape is not None
        rows, heads, _, width = past.shape
        past.shape = ir.Shape([rows, heads, "encoder_past", width])
        present.shape = ir.Shape(["encoder_rows", heads, "encoder_present", width])
    _read_either(graph, start, presents, uses_cache)
    graph.outputs.extend(presents.values())
    model.opset_imports.update({**keys.opset_imports, **model.opset_imports})
    return model


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    """All values of a graph and of those inside it, each once."""
    yield from graph.inputs
    yield from tuple(graph.initializers.values())
    for node in ir.traversal.RecursiveGraphIterator(graph):
        yield from node.outputs
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from tuple(attribute.as_graph().initializers.values())


def _first_step(
    first: ir.Graph,
    uses_cache: ir.Value,
    memory: Mapping[str, str],
    inputs: Mapping[str, ir.Value],
) -> ir.Node:
    """An `If` that gives what is read of the encoder in the first step, and nothing later."""
    outputs = {str(value.name).removeprefix("first/"): value for value in first.outputs}
    nothing, empty = [], []
    for name, present in memory.items():
        past = inputs[name]
        assert past.shape is not None
        assert past.dtype is not None
        shape = [size if isinstance(size, int) else 0 for size in past.shape]
        shape[2] = 0
        tensor = ir.tensor(numpy.zeros(shape, past.dtype.numpy()), past.dtype)
        node = ir.node("Constant", [], {"value": tensor})
        node.outputs[0].name = f"none/{present}"
        node.outputs[0].type, node.outputs[0].shape = past.type, ir.Shape(shape)
        nothing.append(node)
        empty.append(node.outputs[0])
        if outputs[present].dtype != past.dtype:
            cast = ir.node("Cast", [outputs[present]], {"to": past.dtype})
            cast.outputs[0].name, cast.outputs[0].type = f"cast/{present}", past.type
            first.append(cast)
            outputs[present] = cast.outputs[0]
    first.outputs[:] = [outputs[present] for present in memory.values()]
    choice = _either(uses_cache, ir.Graph([], empty, nodes=nothing, name="behind_a_cache"), first)
    for value, (name, present) in zip(choice.outputs, memory.items(), strict=True):
        value.name, value.type = present, inputs[name].type
    return choice


def _either(uses_cache: ir.Value, then: ir.Graph, otherwise: ir.Graph) -> ir.Node:
    branches = {"then_branch": then, "else_branch": otherwise}
    return ir.node("If", [uses_cache], branches, num_outputs=len(then.outputs))


def _read_either(
    graph: ir.Graph, start: ir.Node, presents: Mapping[ir.Value, ir.Value], uses_cache: ir.Value
) -> None:
    """Each node that reads an input of `presents` reads in the first step what `start` gives.

    One with graphs of its own, or in one, reads a copy.
    """
    for past in presents:
        inner = [
            (node, index)
            for node, index in past.uses()
            if node.graph is not graph
            or any(each.type == ir.AttributeType.GRAPH for each in node.attributes.values())
        ]
        if inner:
            copy = ir.node("Identity", [past])
            copy.outputs[0].name, copy.outputs[0].type = f"{past.name}/read", past.type
            graph.insert_after(start, copy)
            for node, index in inner:
                node.replace_input_with(index, copy.outputs[0])
    reading = dict.fromkeys(node for past in presents for node, _ in past.uses())
    for node in reading:
        behind = _again(node, {}, "behind")
        first = _again(node, presents, "first")
        choice = _either(uses_cache, behind, first)
        choice.name = node.name
        choice.metadata_props.update(node.metadata_props)
        graph.insert_before(node, choice)
        for old, new in zip(node.outputs, choice.outputs, strict=True):
            new.name, new.type, new.shape = old.name, old.type, old.shape
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        graph.remove(node, safe=True)


def _again(node: ir.Node, instead: Mapping[ir.Value, ir.Value], branch: str) -> ir.Graph:
    """A graph of the node alone, with other inputs."""
    again = ir.Node(
        node.domain,
        node.op_type,
        [value if value is None else instead.get(value, value) for value in node.inputs],
        list(node.attributes.values()),
        num_outputs=len(node.outputs),
        version=node.version,
    )
    for old, new in zip(node.outputs, again.outputs, strict=True):
        new.name, new.type = old.name and f"{branch}/{old.name}", old.type
    return ir.Graph([], again.outputs, nodes=[again], name=f"{branch}/{node.outputs[0].name}")
