"""Inline the higher-order operators that only wrap a subgraph."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from attngraph.errors import CaptureError
from attngraph.frontend.translation.conditionals import chosen, is_conditional
from attngraph.frontend.watching.locations import Locator

_SUBGRAPH_AND_OPERANDS = {
    "wrap_with_set_grad_enabled": (1, 2),
    "wrap_with_autocast": (4, 5),
    "invoke_subgraph": (0, 2),
}
"""Positions of the subgraph and of its first operand among the operator's arguments."""
_AUTOCAST_ENABLED = 2
_PATH = "attngraph.path"
"""Where a subgraph keeps its name, as found from the outermost one."""
BODY = "attngraph.body"
"""Where a loop's node keeps the GraphModule that is its body."""


def enables_autocast(module: fx.GraphModule) -> bool:
    """Whether a part of the graph runs under autocast: its casts are not in the graph yet."""
    return any(
        _wrapper(node) == "wrap_with_autocast" and bool(node.args[_AUTOCAST_ENABLED])
        for part in module.modules()
        if isinstance(part, fx.GraphModule)
        for node in part.graph.nodes
    )


def attends_flexibly(module: fx.GraphModule) -> bool:
    """Whether a part of the graph is flex_attention, which a retrace under inference writes out."""
    return any(
        _wrapper(node) == "flex_attention"
        for part in module.modules()
        if isinstance(part, fx.GraphModule)
        for node in part.graph.nodes
    )


def batches(module: fx.GraphModule) -> bool:
    """Whether a part of the graph is a function under torch.vmap: its sizes lack the batch."""
    return any(
        getattr(node.target, "__module__", "") == "torch._functorch.predispatch"
        for part in module.modules()
        if isinstance(part, fx.GraphModule)
        for node in part.graph.nodes
    )


def inline(module: fx.GraphModule) -> fx.Graph:
    """The module's graph without subgraphs; the module itself is left as it is.

    A scan stays, with its body in its `meta`, and both sides of a cond are computed. Raises
    CaptureError for other control flow (while_loop, …), with the user's line.
    """
    if not any(_wrapper(node) for node in module.graph.nodes):
        return module.graph
    module.meta.pop(_PATH, None)  # a loop's body is the outermost of its own
    flat = fx.Graph()
    environment: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            environment[node] = flat.node_copy(node)
    flat.output(_copy(module, flat, environment))
    return flat


def _copy(module: fx.GraphModule, flat: fx.Graph, environment: dict[fx.Node, Any]) -> Any:
    """Copies the nodes after the placeholders, which `environment` binds; returns the outputs."""

    def read(node: fx.Node) -> Any:
        return environment[node]

    for node in module.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            return fx.map_arg(node.args[0], read)
        part = getattr(module, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(part, fx.GraphModule):
            environment[node] = part
            part.meta[_PATH] = _path(module, str(node.target))
        elif node.op == "get_attr":  # a constant of a subgraph is found from the outermost one
            environment[node] = flat.node_copy(node)
            environment[node].target = _path(module, str(node.target))
        elif _wrapper(node) == "scan":
            environment[node] = _keep_scan(node, flat, environment)
        elif is_conditional(node):
            sides = [
                _inlined(node, side, node.args[3], flat, environment) for side in node.args[1:3]
            ]
            asked = node.args[0]
            asked = environment[asked] if isinstance(asked, fx.Node) else asked
            environment[node] = chosen(node, flat, asked, sides)
        elif name := _wrapper(node):
            environment[node] = _inline_call(node, name, flat, environment)
        elif node.target is operator.getitem and isinstance(read(node.args[0]), (list, tuple)):
            environment[node] = read(node.args[0])[node.args[1]]
        else:
            environment[node] = flat.node_copy(node, read)
    return None


def _path(module: fx.GraphModule, name: str) -> str:
    above = module.meta.get(_PATH)
    return f"{above}.{name}" if above else name


def _keep_scan(node: fx.Node, flat: fx.Graph, environment: dict[fx.Node, Any]) -> fx.Node:
    reference, *operands = node.args[:4]
    assert isinstance(reference, fx.Node)
    read = [fx.map_arg(operand, lambda item: environment[item]) for operand in operands]
    kept = flat.create_node("call_function", node.target, (None, *read))
    kept.meta = {**node.meta, BODY: environment[reference]}
    return kept


def _inline_call(node: fx.Node, name: str, flat: fx.Graph, environment: dict[fx.Node, Any]) -> Any:
    if name not in _SUBGRAPH_AND_OPERANDS:
        raise CaptureError(
            f"The model uses the higher-order operator {name} at {Locator().of(node)}, which a "
            "dataflow graph can't hold; write that part without it (torch.where, a fixed loop, or "
            "torch._higher_order_ops.scan)."
        )
    subgraph, first = _SUBGRAPH_AND_OPERANDS[name]
    return _inlined(node, node.args[subgraph], node.args[first:], flat, environment)


def _inlined(
    node: fx.Node, reference: Any, given: Any, flat: fx.Graph, environment: dict[fx.Node, Any]
) -> Any:
    """The results of the subgraph that `reference` names, on what it is given."""
    callee = environment[reference] if isinstance(reference, fx.Node) else None
    if not isinstance(callee, fx.GraphModule):
        name = _wrapper(node)
        raise CaptureError(f"The {name} at {Locator().of(node)} names no subgraph to inline.")
    parameters = [inner for inner in callee.graph.nodes if inner.op == "placeholder"]
    operands = [environment[each] if isinstance(each, fx.Node) else each for each in given]
    return _copy(callee, flat, environment | dict(zip(parameters, operands, strict=True)))


def _wrapper(node: fx.Node) -> str:
    """The name of a higher-order operator; empty for any other node."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator):
        return ""
    return str(node.target.__name__)
