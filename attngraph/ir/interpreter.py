"""Runs a graph in PyTorch, node by node: the meaning of the IR."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch

from attngraph.errors import IRError
from attngraph.ir.dims import symbol, symbols_of, tells
from attngraph.ir.graph import Graph, Node, Value
from attngraph.ir.ops import evaluate
from attngraph.ir.types import ScalarType, TensorType

Observer = Callable[[Value, Any], Any]


def bind_dims(sizes: dict[str, int], type: TensorType, shape: Sequence[int], what: str) -> None:
    """Learns dim sizes from an actual shape. Raises IRError where it contradicts the type."""
    if len(shape) != type.rank:
        raise IRError(f"{what} has rank {len(shape)} where {type} is expected.")
    for dim, actual in zip(type.shape, shape, strict=True):
        unknown = symbols_of(dim) - sizes.keys()
        if len(unknown) == 1 and tells(dim):
            name = next(iter(unknown))
            free = sympy.Symbol(name, integer=True)  # which may be 0, as a past of no tokens
            known = {symbol(n): sympy.Integer(size) for n, size in sizes.items()}
            known[symbol(name)] = free
            solved = sympy.solve(sympy.sympify(dim).xreplace(known) - actual, free)
            if isinstance(dim, sympy.Symbol):
                solved = [actual]
            if len(solved) != 1 or solved[0] < 0:
                raise IRError(f"{what} has size {actual} where {type} needs {dim}.")
            sizes[name] = int(solved[0])
        elif not unknown:
            known = {symbol(n): sympy.Integer(size) for n, size in sizes.items()}
            expected = int(sympy.sympify(dim).xreplace(known))
            if expected != actual:
                raise IRError(f"{what} has shape {list(shape)} where {type} is expected.")


def interpret(
    graph: Graph,
    inputs: Sequence[Any],
    *,
    observe: Observer | None = None,
    constants: Mapping[str, torch.Tensor] | None = None,
) -> tuple[Any, ...]:
    """Evaluates the graph on concrete tensors, in the order of its inputs.

    `observe(value, tensor)` sees every computed value. `constants` overrides data by name.
    Raises IRError where the inputs don't fit the graph's types.
    """
    if len(inputs) != len(graph.inputs):
        raise IRError(f"{len(inputs)} inputs were given where {len(graph.inputs)} are expected.")
    sizes: dict[str, int] = {}
    memory: dict[Value, Any] = {}
    for value, tensor in zip(graph.inputs, inputs, strict=True):
        memory[value] = tensor
        if isinstance(value.type, TensorType):
            bind_dims(sizes, value.type, tensor.shape, f"Input {value.name}")
    overrides = constants or {}
    for name, value in graph.constants.items():
        memory[value] = overrides.get(name, value.data)
    last_use = _last_uses(graph)
    with torch.no_grad():
        for node in graph:
            _run(node, memory, sizes, observe)
            for value in last_use.get(node, ()):
                memory.pop(value, None)
    return tuple(memory[value] for value in graph.outputs)


def _run(
    node: Node, memory: dict[Value, Any], sizes: dict[str, int], observe: Observer | None
) -> None:
    arguments = [None if value is None else memory[value] for value in node.inputs]
    for value, argument in zip(node.inputs, arguments, strict=True):
        if value is not None and argument is None:
            raise IRError(f"%{value.name} has no data; parse the text with its weights.")
    results = evaluate(node, arguments, sizes)
    if len(results) != len(node.outputs):
        raise IRError(
            f"{node.op} has {len(results)} results where the graph has {len(node.outputs)}: their "
            "number follows from a size."
        )
    for value, result in zip(node.outputs, results, strict=True):
        memory[value] = result
        if isinstance(value.type, ScalarType):
            if value.type.name:
                sizes[value.type.name] = int(result)
        elif symbols_of(value.type.shape) - sizes.keys():
            bind_dims(sizes, value.type, result.shape, f"%{value.name}")
        if observe is not None:
            observe(value, result)


def _last_uses(graph: Graph) -> dict[Node, list[Value]]:
    kept = {*graph.outputs}
    seen: set[Value] = set()
    result: dict[Node, list[Value]] = {}
    for node in reversed(graph):
        for value in (*node.inputs, *node.outputs):
            if value is not None and value not in seen and value not in kept:
                seen.add(value)
                result.setdefault(node, []).append(value)
    return result
