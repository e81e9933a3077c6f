"""Isomorphic branches as one: each op runs once, on values that have the branches as an axis.

The branches become an axis in front of the last `trailing` dims: (…, N, F) for features, and
(…, N, H, S, T) for what is added to scores. A value that all branches share has size 1 there. A
plan says how a value is built before anything is; where an op has no rule there is no plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from attngraph.ir import Builder, Dim, Node, Value
from attngraph.ir.dims import product, same_shape
from attngraph.ir.ops import attribute, input_of
from attngraph.passes.branches import ATTENTION, SCALAR_OPS, Family, is_projection
from attngraph.passes.parts import consecutive_parts

_NAMES = """add.Tensor sub.Tensor mul.Tensor div.Tensor add.Scalar sub.Scalar mul.Scalar div.Scalar
    neg abs exp log sqrt rsqrt reciprocal square pow.Tensor_Scalar sigmoid tanh relu gelu silu
    softplus clamp _to_copy masked_fill.Scalar where.self where.ScalarOther where.ScalarSelf
    logical_not bitwise_not logical_and logical_or __and__.Tensor __or__.Tensor bitwise_and.Tensor
    bitwise_or.Tensor maximum minimum eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor
    eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar"""
_ELEMENTWISE = frozenset(f"aten.{name}" for name in _NAMES.split())
_REDUCTIONS = frozenset(["aten.mean.dim", "aten.sum.dim_IntList", "aten.amax"])
_NORMS = frozenset(["aten.layer_norm", "aten.rms_norm"])
_FEATURES, _SCORES = 1, 3  # dims behind the branches: (F,) and (H, S, T)


@dataclass
class Plan:
    """Builds a stacked value once. `full`: whether the branches' axis has its size, or 1."""

    make: Callable[[Builder], Value]
    full: bool = True
    _made: Value | None = None

    def __call__(self, build: Builder) -> Value:
        if self._made is None:
            self._made = self.make(build)
        return self._made


@dataclass
class Stacking:
    """Plans for one family. `merged` lists (nodes that became one, it), once plans are built."""

    family: Family
    exact_only: bool = False
    merged: list[tuple[tuple[Node, ...], Node]] = field(default_factory=list)
    _plans: dict[tuple[Value, int], Plan | None] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of branches."""
        return len(self.family.branches)

    def plan(self, value: Value, trailing: int = _FEATURES) -> Plan | None:
        """How to build the values that correspond to one of the first branch, stacked."""
        key = (value, trailing)
        if key not in self._plans:
            self._plans[key] = self._plan(value, trailing)
        return self._plans[key]

    def whole(self, plan: Plan, build: Builder, trailing: int = _FEATURES) -> Value:
        """The stacked value with an axis of full size."""
        value = plan(build)
        if plan.full:
            return value
        shape = list(value.shape)
        shape[-1 - trailing] = self.count
        return build("aten.expand", value, size=shape)

    def packed(self, plan: Plan, build: Builder) -> Value:
        """The branches' features side by side: (…, N, F) as (…, N·F)."""
        value = self.whole(plan, build)
        shape = [*value.shape[:-2], product(value.shape[-2:])]
        return build("aten.reshape", value, shape=shape)

    def by_heads(self, plan: Plan, build: Builder, heads: int | None = None) -> Value:
        """The branches' heads side by side: (…, N, H, S, T) as (…, N·H, S, T)."""
        value = self.whole(plan, build, _SCORES)
        shape = list(value.shape)
        at = len(shape) - _SCORES
        if heads is not None and shape[at] != heads:
            shape[at] = heads
            value = build("aten.expand", value, size=shape)
        shape[at - 1 : at + 1] = [product(shape[at - 1 : at + 1])]
        return build("aten.reshape", value, shape=shape)

    def _plan(self, value: Value, trailing: int) -> Plan | None:
        column = self.family.column(value)
        node = value.producer
        if all(item is value for item in column):
            return Plan(lambda build: _inserted(build, value, trailing), full=False)
        if all(item.is_constant for item in column):
            return _laid_out(column, trailing)
        if value in self.family.first.leaves or node is None:
            make = consecutive_parts(column, trailing)
            return None if make is None else Plan(make)
        if node.op == ATTENTION:
            return self._attention(node) if (value.index, trailing) == (0, _FEATURES) else None
        if is_projection(node):
            return self._projection(node) if trailing == _FEATURES else None
        if node.op == "aten.split_with_sizes":
            return self._split(node, value, trailing)
        if len(node.outputs) > 1:
            return None
        if node.op in _ELEMENTWISE:
            return self._elementwise(node, trailing)
        if node.op in _REDUCTIONS or node.op == "aten.slice.Tensor":
            return self._along_trailing(node, trailing)
        if node.op in _NORMS:
            return self._norm(node) if trailing == _FEATURES else None
        match node.op:
            case "attn.rotary":
                return self._rotary(node) if trailing == _FEATURES else None
            case "aten.reshape":
                return self._reshape(node, trailing)
            case "aten.permute":
                return self._permute(node, trailing)
            case "aten.expand":
                return self._expand(node, trailing)
            case "aten.cat":
                return self._cat(node, trailing)
        return None

    def _nodes(self, node: Node) -> tuple[Node, ...]:
        found = (value.producer for value in self.family.column(node.outputs[0]))
        return tuple(item for item in found if item is not None)

    # -- one rule per kind of op -----------------------------------------------------------

    def _elementwise(self, node: Node, trailing: int) -> Plan | None:
        sources = [value for value in node.inputs if value is not None]
        plans = [self.plan(value, trailing) for value in sources]
        known = [plan for plan in plans if plan is not None]
        if len(known) < len(plans) or len(sources) < len(node.inputs):
            return None
        scales = node.op in SCALAR_OPS
        numbers = [attribute(item, "other") for item in self._nodes(node)] if scales else []
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

    def _projection(self, node: Node, factors: Sequence[float] = ()) -> Plan | None:
        nodes = self._nodes(node)
        source, weight, bias = (input_of(node, name) for name in ("input", "weight", "bias"))
        inputs = self.family.column(source)
        if all(item is source for item in inputs):
            if not replaceable(self.family.column(weight)):
                return None
            return Plan(lambda build: self._side_by_side(build, nodes, factors))
        shared = all(item.inputs[1:] == node.inputs[1:] for item in nodes)
        plan = self.plan(source)
        if plan is None or factors:
            return None
        if not shared:  # products as they are: together they would cost as many again per branch
            return _laid_out(self.family.column(node.output), _FEATURES)
        return Plan(lambda build: build("aten.linear", plan(build), weight, bias))

    def _side_by_side(
        self, build: Builder, nodes: Sequence[Node], factors: Sequence[float]
    ) -> Value:
        """Projections of one input: their weights below each other."""
        weights = [_scaled(build, node.inputs[1:], factors, i) for i, node in enumerate(nodes)]
        weight = build("aten.cat", *(pair[0] for pair in weights))
        bias = None
        if weights[0][1] is not None:
            bias = build("aten.cat", *(pair[1] for pair in weights))
        merged = build.node("aten.linear", nodes[0].inputs[0], weight, bias)
        if not factors:
            self.merged.append((tuple(nodes), merged))
        shape = [*merged.output.shape[:-1], len(nodes), nodes[0].output.shape[-1]]
        return build("aten.reshape", merged.output, shape=shape)

    def _along_trailing(self, node: Node, trailing: int) -> Plan | None:
        """Reductions and slices within the dims behind the branches."""
        source = node.inputs[0]
        plan = None if source is None else self.plan(source, trailing)
        if source is None or plan is None:
            return None
        if node.op in _REDUCTIONS and not attribute(node, "keepdim"):
            return None
        rank, dims = len(source.shape), attribute(node, "dim")
        counted = [dim % rank - rank for dim in ([dims] if isinstance(dims, int) else dims or [])]
        if not counted or min(counted) < -trailing:
            return None
        attrs = dict(node.attrs) | {"dim": counted[0] if isinstance(dims, int) else counted}
        return Plan(lambda build: build(node.op, plan(build), **attrs), plan.full)

    def _split(self, node: Node, value: Value, trailing: int) -> Plan | None:
        source = node.inputs[0]
        plan = None if source is None else self.plan(source, trailing)
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

    def _norm(self, node: Node) -> Plan | None:
        source, *affine = node.inputs
        plan = None if source is None else self.plan(source)
        if plan is None or len(attribute(node, "normalized_shape")) != 1:
            return None
        if all(item.inputs[1:] == node.inputs[1:] for item in self._nodes(node)):
            return Plan(lambda b: b(node.op, plan(b), *affine, **node.attrs), plan.full)
        factors = [None if value is None else self.plan(value) for value in affine]
        if any(p is None for p, v in zip(factors, affine, strict=True) if v is not None):
            return None

        def make(build: Builder) -> Value:
            result = build(node.op, plan(build), **node.attrs)
            for op, factor in zip(("aten.mul.Tensor", "aten.add.Tensor"), factors, strict=False):
                result = result if factor is None else build(op, result, factor(build))
            return result

        return Plan(make)

    def _rotary(self, node: Node) -> Plan | None:
        """All heads turn by the same angles."""
        source, *angles = node.inputs
        plan = None if source is None else self.plan(source)
        if plan is None or any(item.inputs[1:] != node.inputs[1:] for item in self._nodes(node)):
            return None
        attrs = node.attrs | {"heads": attribute(node, "heads") * self.count}

        def make(build: Builder) -> Value:
            turned = build("attn.rotary", self.packed(plan, build), *angles, **attrs)
            shape = [*turned.shape[:-1], self.count, node.output.shape[-1]]
            return build("aten.reshape", turned, shape=shape)

        return Plan(make)

    def _reshape(self, node: Node, trailing: int) -> Plan | None:
        source, shape = node.inputs[0], list(node.output.shape)
        plan = None if source is None else self.plan(source, trailing)
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

    def _permute(self, node: Node, trailing: int) -> Plan | None:
        source = node.inputs[0]
        plan = None if source is None else self.plan(source, trailing)
        if source is None or plan is None:
            return None
        at = len(source.shape) - trailing
        order = [dim % len(source.shape) for dim in attribute(node, "dims")]
        order = [dim if dim < at else dim + 1 for dim in order]
        order.insert(at, at)
        return Plan(lambda build: build("aten.permute", plan(build), dims=order), plan.full)

    def _expand(self, node: Node, trailing: int) -> Plan | None:
        source, shape = node.inputs[0], list(node.output.shape)
        plan = None if source is None else self.plan(source, trailing)
        if plan is None:
            return None
        at = len(shape) - trailing

        def make(build: Builder) -> Value:
            value = plan(build)
            size = value.shape[-1 - trailing]
            return build("aten.expand", value, size=[*shape[:at], size, *shape[at:]])

        return Plan(make, plan.full)

    def _cat(self, node: Node, trailing: int) -> Plan | None:
        rank = len(node.output.shape)
        dim = attribute(node, "dim") % rank - rank
        plans = [self.plan(value, trailing) for value in node.inputs if value is not None]
        known = [plan for plan in plans if plan is not None]
        if dim < -trailing or len(known) < len(plans):
            return None
        return Plan(lambda b: b("aten.cat", *(self.whole(p, b, trailing) for p in known), dim=dim))

    def _attention(self, node: Node) -> Plan | None:
        nodes = self._nodes(node)
        scales = [float(attribute(item, "scale")) for item in nodes]
        query = self._queries(node, [scale / scales[0] for scale in scales])
        memory = self._memory(node)
        addends = [self._addend(input_of(node, name), node) for name in ("bias", "mask")]
        sinks = input_of(node, "sinks")
        logits = None if sinks is None else self.plan(sinks) or _laid_out_column(self, sinks)
        if query is None or memory is None:
            return None
        heads, kv_heads, make_memory = attribute(node, "heads"), memory[0], memory[1]

        def make(build: Builder) -> Value:
            key, value, *past = make_memory(build)
            merged = build.node(
                ATTENTION,
                self.packed(query, build),
                key,
                value,
                *(None if addend is None else addend(build) for addend in addends),
                None if logits is None else self.packed(logits, build),
                *past,
                **node.attrs | {"heads": self.count * heads, "kv_heads": kv_heads},
            )
            self.merged.append((nodes, merged))
            context = merged.outputs[0]
            shape = [*context.shape[:-1], self.count, node.outputs[0].shape[-1]]
            return build("aten.reshape", context, shape=shape)

        return Plan(make)

    def _queries(self, node: Node, factors: Sequence[float]) -> Plan | None:
        """Scales that differ between heads go into the queries' weights, or their activations."""
        query = input_of(node, "query")
        if len(set(factors)) == 1:
            return self.plan(query)
        if self.exact_only:
            return None
        above = None if query in self.family.first.leaves else query.producer
        plan = self._projection(above, factors) if above and is_projection(above) else None
        if plan is not None:
            return plan
        plan = self.plan(query)
        if plan is None:
            return None
        tensor = torch.tensor(factors, dtype=query.dtype).reshape(-1, 1)
        return Plan(lambda b: b("aten.mul.Tensor", plan(b), b.constant(tensor, "scales")))

    def _memory(self, node: Node) -> tuple[int, Callable[[Builder], list[Value]]] | None:
        """(key-value heads, what builds keys, values and past); heads that share them get one."""
        names = ("key", "value", "past_key", "past_value")
        found = [value for name in names if (value := input_of(node, name)) is not None]
        kv_heads = attribute(node, "kv_heads")
        run = _run_length(tuple(zip(*map(self.family.column, found), strict=True)))
        if run == self.count and kv_heads == 1:
            return 1, lambda build: found
        if run > 1 and kv_heads != 1:
            return None
        of_keys = Stacking(self.family.every(run), self.exact_only, self.merged)
        trailing = [_FEATURES, _FEATURES, _SCORES, _SCORES][: len(found)]
        plans = [of_keys.plan(*pair) for pair in zip(found, trailing, strict=True)]
        known = [plan for plan in plans if plan is not None]
        if len(known) < len(plans):
            return None

        def make(build: Builder) -> list[Value]:
            packed = [of_keys.packed(plan, build) for plan in known[:2]]
            return packed + [of_keys.by_heads(plan, build) for plan in known[2:]]

        return of_keys.count * kv_heads, make

    def _addend(self, value: Value | None, node: Node) -> Callable[[Builder], Value] | None:
        """A bias or mask of all heads: shared, computed for all at once, or put side by side."""
        if value is None:
            return None
        heads = attribute(node, "heads")
        has_heads = len(value.shape) >= _SCORES and value.shape[-_SCORES] != 1
        if all(item is value for item in self.family.column(value)) and not has_heads:
            return lambda build: value
        plan = self.plan(value, _SCORES) or _laid_out_column(self, value, _SCORES)

        return lambda build: self.by_heads(plan, build, heads)


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


def _padded(shape: Sequence[Dim], trailing: int) -> list[Dim]:
    """A shape with its branches' axis, of size 1."""
    full: list[Dim] = [1] * (trailing - len(shape)) + list(shape)
    at = len(full) - trailing
    return [*full[:at], 1, *full[at:]]


def _inserted(build: Builder, value: Value, trailing: int) -> Value:
    return build("aten.reshape", value, shape=_padded(value.shape, trailing))


def _laid_out(column: Sequence[Value], trailing: int) -> Plan:
    """The values as they are, one after another."""

    def make(build: Builder) -> Value:
        parts = [_inserted(build, value, trailing) for value in column]
        return build("aten.cat", *parts, dim=-1 - trailing)

    return Plan(make)


def _laid_out_column(stacking: Stacking, value: Value, trailing: int = _FEATURES) -> Plan:
    return _laid_out(stacking.family.column(value), trailing)


def moved(build: Builder, value: Value, source: int, target: int) -> Value:
    """The value with one axis at another place."""
    order = list(range(len(value.shape)))
    order.insert(target, order.pop(source))
    return value if order == sorted(order) else build("aten.permute", value, dims=order)
