"""How ops that compute row by row, or only move elements, run on stacked branches."""

from __future__ import annotations

import torch

from attngraph.analysis.branches import SCALAR_OPS
from attngraph.ir import Builder, Node, Value
from attngraph.ir.dims import same_shape
from attngraph.ir.ops import attribute
from attngraph.passes.attention.stacking.plans import Plan, Stack, moved

_NAMES = """add.Tensor sub.Tensor mul.Tensor div.Tensor add.Scalar sub.Scalar mul.Scalar div.Scalar
    neg abs exp log sqrt rsqrt reciprocal square pow.Tensor_Scalar sigmoid tanh relu gelu silu
    softplus clamp _to_copy masked_fill.Scalar where.self where.ScalarOther where.ScalarSelf
    logical_not bitwise_not logical_and logical_or __and__.Tensor __or__.Tensor bitwise_and.Tensor
    bitwise_or.Tensor maximum minimum eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor
    eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar"""
ELEMENTWISE = frozenset(f"aten.{name}" for name in _NAMES.split())
REDUCTIONS = frozenset(["aten.mean.dim", "aten.sum.dim_IntList", "aten.amax"])


def elementwise(stack: Stack, node: Node, trailing: int) -> Plan | None:
    sources = [value for value in node.inputs if value is not None]
    plans = [stack.plan(value, trailing) for value in sources]
    known = [plan for plan in plans if plan is not None]
    if len(known) < len(plans) or len(sources) < len(node.inputs):
        return None
    scales = node.op in SCALAR_OPS
    numbers = [attribute(item, "other") for item in stack.nodes(node)] if scales else []
    if len(set(numbers)) <= 1:
        full = any(plan.full for plan in known)
        return Plan(lambda b: b(node.op, *(p(b) for p in known), **node.attrs), full)
    dtype = node.output.dtype
    if not dtype.is_floating_point or not all(type(n) in (int, float) for n in numbers):
        return None
    attrs = {name: value for name, value in node.attrs.items() if name != "other"}
    tensor = torch.tensor(numbers, dtype=dtype).reshape(-1, *[1] * trailing)
    op = node.op.replace(".Scalar", ".Tensor")
    return Plan(lambda b: b(op, known[0](b), b.constant(tensor, "per_head"), **attrs))


def along_trailing(stack: Stack, node: Node, trailing: int) -> Plan | None:
    """Reductions and slices within the dims behind the branches."""
    source = node.inputs[0]
    plan = None if source is None else stack.plan(source, trailing)
    if source is None or plan is None:
        return None
    if node.op in REDUCTIONS and not attribute(node, "keepdim"):
        return None
    rank, dims = len(source.shape), attribute(node, "dim")
    counted = [dim % rank - rank for dim in ([dims] if isinstance(dims, int) else dims or [])]
    if not counted or min(counted) < -trailing:
        return None
    attrs = dict(node.attrs) | {"dim": counted[0] if isinstance(dims, int) else counted}
    return Plan(lambda build: build(node.op, plan(build), **attrs), plan.full)


def split(stack: Stack, node: Node, value: Value, trailing: int) -> Plan | None:
    source = node.inputs[0]
    plan = None if source is None else stack.plan(source, trailing)
    if source is None or plan is None:
        return None
    dim = attribute(node, "dim") % len(source.shape) - len(source.shape)
    if dim < -trailing:
        return None
    start = sum(part.shape[dim] for part in node.outputs[: value.index])
    end = start + value.shape[dim]

    def make(build: Builder) -> Value:
        return build("aten.slice.Tensor", plan(build), dim=dim, start=start, end=end)

    return Plan(make, plan.full)


def norm(stack: Stack, node: Node) -> Plan | None:
    source, *affine = node.inputs
    plan = None if source is None else stack.plan(source)
    if plan is None or len(attribute(node, "normalized_shape")) != 1:
        return None
    if all(item.inputs[1:] == node.inputs[1:] for item in stack.nodes(node)):
        return Plan(lambda b: b(node.op, plan(b), *affine, **node.attrs), plan.full)
    factors = [None if value is None else stack.plan(value) for value in affine]
    if any(p is None for p, v in zip(factors, affine, strict=True) if v is not None):
        return None

    def make(build: Builder) -> Value:
        result = build(node.op, plan(build), **node.attrs)
        for op, factor in zip(("aten.mul.Tensor", "aten.add.Tensor"), factors, strict=False):
            result = result if factor is None else build(op, result, factor(build))
        return result

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


def reshape(stack: Stack, node: Node, trailing: int) -> Plan | None:
    source, shape = node.inputs[0], list(node.output.shape)
    plan = None if source is None else stack.plan(source, trailing)
    if source is None or plan is None or len(shape) < trailing or len(source.shape) < trailing:
        return None

    def make(build: Builder) -> Value:
        value = plan(build)
        at = len(source.shape) - trailing
        size, place = value.shape[at], len(shape) - trailing
        if same_shape(source.shape[at:], shape[place:]):
            return build(node.op, value, shape=[*shape[:place], size, *shape[place:]])
        value = build(node.op, moved(build, value, at, 0), shape=[size, *shape])
        return moved(build, value, 0, place)

    return Plan(make, plan.full)


def permute(stack: Stack, node: Node, trailing: int) -> Plan | None:
    source = node.inputs[0]
    plan = None if source is None else stack.plan(source, trailing)
    if source is None or plan is None:
        return None
    at = len(source.shape) - trailing
    order = [dim % len(source.shape) for dim in attribute(node, "dims")]
    order = [dim if dim < at else dim + 1 for dim in order]
    order.insert(at, at)
    return Plan(lambda build: build("aten.permute", plan(build), dims=order), plan.full)


def expand(stack: Stack, node: Node, trailing: int) -> Plan | None:
    source, shape = node.inputs[0], list(node.output.shape)
    plan = None if source is None else stack.plan(source, trailing)
    if plan is None:
        return None
    at = len(shape) - trailing

    def make(build: Builder) -> Value:
        value = plan(build)
        size = value.shape[-1 - trailing]
        return build("aten.expand", value, size=[*shape[:at], size, *shape[at:]])

    return Plan(make, plan.full)


def cat(stack: Stack, node: Node, trailing: int) -> Plan | None:
    rank = len(node.output.shape)
    dim = attribute(node, "dim") % rank - rank
    plans = [stack.plan(value, trailing) for value in node.inputs if value is not None]
    known = [plan for plan in plans if plan is not None]
    if dim < -trailing or len(known) < len(plans):
        return None
    return Plan(lambda b: b("aten.cat", *(stack.whole(p, b, trailing) for p in known), dim=dim))
