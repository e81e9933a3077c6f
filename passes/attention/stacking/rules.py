"""How the ops between attentions run on stacked branches: by their batching rules, mostly."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from attngraph.analysis.rows.batching import batched, rule_of
from attngraph.analysis.rows.batching_rules import Batched, Behind
from attngraph.ir import Builder, Node, Value
from attngraph.ir.ops import attribute
from attngraph.ir.traits import SCALE, SHIFT
from attngraph.passes.attention.stacking.plans import Plan, Stack, moved


def over_branches(stack: Stack, node: Node, value: Value, trailing: int) -> Plan | None:
    """One of the node's results: the node itself, over operands that have the branches' axis."""
    rule = rule_of(node)
    if rule is None or (len(value.shape) < trailing and not rule.broadcasts()):
        return None
    carriers = rule.carriers(node)
    plans: list[Plan | None] = []
    for position, operand in enumerate(node.inputs):
        carried = operand is not None and position in carriers
        plans.append(stack.plan(operand, trailing) if operand and carried else None)
        if carried and plans[-1] is None:
            return None  # an operand that can't be stacked
        if operand is not None and not carried and set(stack.family.column(operand)) != {operand}:
            return None  # weights of their own, where the op wants the same for all rows
    shared = [None if plan is None or not plan.full else plan for plan in plans]
    for given in (plans, shared):  # what all branches share may do as it is
        full = any(plan.full for plan in given if plan is not None)
        behind = [None if plan is None else trailing for plan in given]
        found = _anywhere(node, behind, stack.count if full else 1)
        if found is not None:
            return Plan(_maker(stack, node, value, trailing, given, *found), full)
    return None


def _maker(
    stack: Stack,
    node: Node,
    value: Value,
    trailing: int,
    plans: Sequence[Plan | None],
    result: Batched,
    in_front: bool,
) -> Callable[[Builder], Value]:
    """What builds the node over stacked operands, and moves the branches' axis to its place."""
    sizes = {plan.full for plan in plans if plan is not None}
    rule = rule_of(node)
    alike = len(sizes) == 1 or (rule is not None and rule.broadcasts())

    def stacked(build: Builder, plan: Plan | None, operand: Value | None) -> Value | None:
        if plan is None:
            return operand
        made = plan(build) if alike else stack.whole(plan, build, trailing)
        return moved(build, made, len(made.shape) - 1 - trailing, 0) if in_front else made

    def make(build: Builder) -> Value:
        pairs = zip(plans, node.inputs, strict=True)
        operands = [stacked(build, plan, operand) for plan, operand in pairs]
        made = build.node(result.op, *operands, **result.attrs).outputs[value.index]
        last = len(made.shape) - 1
        return moved(build, made, last - result.behind, last - trailing)

    return make


def _anywhere(node: Node, behind: Behind, size: int) -> tuple[Batched, bool] | None:
    """The node with the new axis where it is, or in front of all others (True)."""
    if (found := batched(node, behind, size)) is not None:
        return found, False
    pairs = zip(behind, node.inputs, strict=True)
    ranks = [None if v is None or place is None else len(v.shape) for place, v in pairs]
    if any(r is not None and p is not None and r < p for r, p in zip(ranks, behind, strict=True)):
        return None  # stacked, it has dims of size 1 in front
    found = batched(node, ranks, size)
    return None if found is None else (found, True)


def scaled(stack: Stack, node: Node, trailing: int) -> Plan | None:
    """x + c, x · c and the like, with a number c per branch."""
    source, dtype = node.inputs[0], node.output.dtype
    numbers = [attribute(item, "other") for item in stack.nodes(node)]
    plan = None if source is None else stack.plan(source, trailing)
    if plan is None or not dtype.is_floating_point:
        return None
    if not all(type(number) in (int, float) for number in numbers):
        return None
    attrs = {name: value for name, value in node.attrs.items() if name != "other"}
    tensor = torch.tensor(numbers, dtype=dtype).reshape(-1, *[1] * trailing)
    op = node.op.replace(".Scalar", ".Tensor")
    return Plan(lambda b: b(op, plan(b), b.constant(tensor, "per_head"), **attrs))


def has_own_numbers(stack: Stack, node: Node) -> bool:
    """Whether the branches scale or shift by numbers that differ."""
    if node.op not in SHIFT | SCALE:
        return False
    return len({attribute(item, "other") for item in stack.nodes(node)}) > 1


def norm(stack: Stack, node: Node) -> Plan | None:
    """Norms with weights of their own: one without any, and a product and a sum behind it."""
    source, *affine = node.inputs
    plan = None if source is None else stack.plan(source)
    if plan is None or len(attribute(node, "normalized_shape")) != 1:
        return None
    factors = [None if value is None else stack.plan(value) for value in affine]
    if any(p is None for p, v in zip(factors, affine, strict=True) if v is not None):
        return None
    scale, shift, *_ = (*factors, None, None)

    def make(build: Builder) -> Value:
        result = build(node.op, plan(build), **node.attrs)
        if scale is not None:
            result = build("aten.mul.Tensor", result, scale(build))
        return result if shift is None else build("aten.add.Tensor", result, shift(build))

    return Plan(make)


def rotary(stack: Stack, node: Node) -> Plan | None:
    """All heads turn by the same angles."""
    source, *angles = node.inputs
    plan = None if source is None else stack.plan(source)
    if plan is None or any(item.inputs[1:] != node.inputs[1:] for item in stack.nodes(node)):
        return None
    attrs = node.attrs | {"heads": attribute(node, "heads") * stack.count}

    def make(build: Builder) -> Value:
        turned = build("attn.rotary", stack.packed(plan, build), *angles, **attrs)
        shape = [*turned.shape[:-1], stack.count, node.output.shape[-1]]
        return build("aten.reshape", turned, shape=shape)

    return Plan(make)
