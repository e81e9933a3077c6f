"""How attentions and their projections run on stacked branches: once, with the heads of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from attngraph.analysis.branches import ATTENTION, is_projection
from attngraph.ir import Builder, Node, Value
from attngraph.ir.ops import attribute, input_of, inputs_of
from attngraph.passes.attention.stacking.plans import (
    FEATURES,
    SCORES,
    Plan,
    Stack,
    laid_out,
    laid_out_column,
)


def projection(stack: Stack, node: Node, factors: Sequence[float] = ()) -> Plan | None:
    nodes = stack.nodes(node)
    source, weight, bias = inputs_of(node, "input", "weight", "bias")
    inputs = stack.family.column(source)
    if all(item is source for item in inputs):
        if not replaceable(stack.family.column(weight)):
            return None
        return Plan(lambda build: _side_by_side(stack, build, nodes, factors))
    shared = all(item.inputs[1:] == node.inputs[1:] for item in nodes)
    plan = stack.plan(source)
    if plan is None or factors:
        return None
    if not shared:  # products as they are: together they would cost as many again per branch
        return laid_out(stack.family.column(node.output), FEATURES)
    return Plan(lambda build: build("aten.linear", plan(build), weight, bias))


def _side_by_side(
    stack: Stack, build: Builder, nodes: Sequence[Node], factors: Sequence[float]
) -> Value:
    """Projections of one input: their weights below each other."""
    weights = [_scaled(build, node.inputs[1:], factors, i) for i, node in enumerate(nodes)]
    weight = build("aten.cat", *(pair[0] for pair in weights))
    bias = None
    if weights[0][1] is not None:
        bias = build("aten.cat", *(pair[1] for pair in weights))
    merged = build.node("aten.linear", nodes[0].inputs[0], weight, bias)
    if not factors:
        stack.merged.append((tuple(nodes), merged))
    shape = [*merged.output.shape[:-1], len(nodes), nodes[0].output.shape[-1]]
    return build("aten.reshape", merged.output, shape=shape)


def attention(stack: Stack, node: Node) -> Plan | None:
    nodes = stack.nodes(node)
    scales = [float(attribute(item, "scale")) for item in nodes]
    query = _queries(stack, node, [scale / scales[0] for scale in scales])
    memory = _memory(stack, node)
    addends = [_addend(stack, input_of(node, name), node) for name in ("bias", "mask")]
    sinks = input_of(node, "sinks")
    logits = None if sinks is None else stack.plan(sinks) or laid_out_column(stack, sinks)
    if query is None or memory is None:
        return None
    heads, kv_heads, make_memory = attribute(node, "heads"), memory[0], memory[1]

    def make(build: Builder) -> Value:
        key, value, *past = make_memory(build)
        merged = build.node(
            ATTENTION,
            stack.packed(query, build),
            key,
            value,
            *(None if addend is None else addend(build) for addend in addends),
            None if logits is None else stack.packed(logits, build),
            *past,
            **node.attrs | {"heads": stack.count * heads, "kv_heads": kv_heads},
        )
        stack.merged.append((nodes, merged))
        context = merged.outputs[0]
        shape = [*context.shape[:-1], stack.count, node.outputs[0].shape[-1]]
        return build("aten.reshape", context, shape=shape)

    return Plan(make)


def _queries(stack: Stack, node: Node, factors: Sequence[float]) -> Plan | None:
    """Scales that differ between heads go into the queries' weights, or their activations."""
    query = input_of(node, "query")
    if len(set(factors)) == 1:
        return stack.plan(query)
    if stack.exact_only:
        return None
    above = None if query in stack.family.first.leaves else query.producer
    plan = projection(stack, above, factors) if above and is_projection(above) else None
    if plan is not None:
        return plan
    plan = stack.plan(query)
    if plan is None:
        return None
    tensor = torch.tensor(factors, dtype=query.dtype).reshape(-1, 1)
    return Plan(lambda b: b("aten.mul.Tensor", plan(b), b.constant(tensor, "scales")))


def _memory(stack: Stack, node: Node) -> tuple[int, Callable[[Builder], list[Value]]] | None:
    """(key-value heads, what builds keys, values and past); heads that share them get one."""
    names = ("key", "value", "past_key", "past_value")
    found = [value for name in names if (value := input_of(node, name)) is not None]
    kv_heads = attribute(node, "kv_heads")
    run = _run_length(tuple(zip(*map(stack.family.column, found), strict=True)))
    if run == stack.count and kv_heads == 1:
        return 1, lambda build: found
    if run > 1 and kv_heads != 1:
        return None
    of_keys = stack.every(run)
    trailing = [FEATURES, FEATURES, SCORES, SCORES][: len(found)]
    plans = [of_keys.plan(*pair) for pair in zip(found, trailing, strict=True)]
    known = [plan for plan in plans if plan is not None]
    if len(known) < len(plans):
        return None

    def make(build: Builder) -> list[Value]:
        packed = [of_keys.packed(plan, build) for plan in known[:2]]
        return packed + [of_keys.by_heads(plan, build) for plan in known[2:]]

    return of_keys.count * kv_heads, make


def _addend(stack: Stack, value: Value | None, node: Node) -> Callable[[Builder], Value] | None:
    """A bias or mask of all heads: shared, computed for all at once, or put side by side."""
    if value is None:
        return None
    heads = attribute(node, "heads")
    has_heads = len(value.shape) >= SCORES and value.shape[-SCORES] != 1
    if all(item is value for item in stack.family.column(value)) and not has_heads:
        return lambda build: value
    plan = stack.plan(value, SCORES) or laid_out_column(stack, value, SCORES)

    return lambda build: stack.by_heads(plan, build, heads)


def replaceable(weights: Sequence[Value]) -> bool:
    """Whether weights go where they are put together: none is read where the others aren't.

    The layers of a model may share all of them; a weight tied to something else would be stored
    twice.
    """
    return len(set(weights)) == len(weights) and len({len(v.uses) for v in weights}) == 1


def _run_length(column: Sequence[object]) -> int:
    """The n for which every n neighbours are equal, and no others; 1 where there is none."""
    run = next((i for i, item in enumerate(column) if item != column[0]), len(column))
    firsts = column[::run]
    grouped = all(item == firsts[i // run] for i, item in enumerate(column))
    return run if grouped and len(column) % run == 0 and len(set(firsts)) == len(firsts) else 1


def _scaled(
    build: Builder, weights: Sequence[Value | None], factors: Sequence[float], branch: int
) -> tuple[Value | None, Value | None]:
    """A projection's weight and bias, times the branch's factor."""
    weight, bias = (*weights, None)[:2]
    if not factors or factors[branch] == 1:
        return weight, bias
    factor = factors[branch]
    return (
        build("aten.mul.Scalar", weight, other=factor),
        None if bias is None else build("aten.mul.Scalar", bias, other=factor),
    )
