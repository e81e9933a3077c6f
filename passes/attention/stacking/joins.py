"""Where branches come together: concatenations, stacks and sums, and how they look when merged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from attngraph.analysis.branches import is_projection
from attngraph.analysis.values.matching import same_type
from attngraph.analysis.values.scalars import uniform
from attngraph.ir import Builder, Dim, Node, Value
from attngraph.ir.dims import same_shape
from attngraph.ir.ops import attribute, inputs_of
from attngraph.ir.traits import JOIN, MEAN, SUM
from attngraph.passes.attention.stacking.attention import replaceable
from attngraph.passes.attention.stacking.plans import moved
from attngraph.passes.attention.stacking.stacking import Stacking

_ADD = "aten.add.Tensor"


@dataclass(frozen=True)
class Join:
    """`node` brings `operands` together: "cat" or "stack" along `dim`, or "sum" times `factor`."""

    node: Node
    kind: str
    operands: tuple[Value, ...]
    dim: int = 0
    factor: float = 1.0

    def plan(self, stacking: Stacking) -> Callable[[Builder], Value] | None:
        """What builds the node's output with one family of operands merged; None if it can't be."""
        return self._sum(stacking) if self.kind == "sum" else self._beside(stacking)

    def operands_beside(self, members: Collection[int]) -> list[Value]:
        """The operands that are none of a family's members."""
        return [value for i, value in enumerate(self.operands) if i not in members]

    def _beside(self, stacking: Stacking) -> Callable[[Builder], Value] | None:
        root = stacking.family.first.root
        plan = stacking.plan(root) if root.shape else None
        if plan is None:
            return None
        members, at = stacking.family.members, len(root.shape) - 1

        def make(build: Builder) -> Value:
            stacked = moved(build, stacking.whole(plan, build), at, self.dim)
            if len(members) == len(self.operands) and self.kind == "stack":
                return stacked
            size = root.shape[self.dim] if self.kind == "cat" else 1
            shape = [*stacked.shape[: self.dim], size * len(members)]
            shape += stacked.shape[self.dim + (2 if self.kind == "cat" else 1) :]
            block = build("aten.reshape", stacked, shape=shape)
            return self._placed(build, block, members, size)

        return make

    def _placed(self, build: Builder, block: Value, members: Sequence[int], size: Dim) -> Value:
        """The merged operands, in one piece where they are neighbours, among the others."""
        operands = list(self.operands)
        if self.kind == "stack":
            shape = list(block.shape)
            shape[self.dim] = 1
            operands = [build("aten.reshape", v, shape=shape) for v in operands]
        if members[-1] - members[0] == len(members) - 1:
            operands[members[0] : members[-1] + 1] = [block]
        else:
            sizes = [size] * len(members)
            parts = build.node("aten.split_with_sizes", block, split_sizes=sizes, dim=self.dim)
            for position, part in zip(members, parts.outputs, strict=True):
                operands[position] = part
        return operands[0] if len(operands) == 1 else build("aten.cat", *operands, dim=self.dim)

    def _sum(self, stacking: Stacking) -> Callable[[Builder], Value] | None:
        merged = _sum_of_projections(stacking) or _sum_of_values(stacking)
        if merged is None or len({value.dtype for value in self.operands}) > 1:
            return None
        members = set(stacking.family.members)

        def make(build: Builder) -> Value:
            total: Value | None = None
            for position, term in enumerate(self.operands):
                if position == min(members):
                    term = merged(build)
                elif position in members:
                    continue
                total = term if total is None else build(_ADD, total, term)
            assert total is not None
            return total if self.factor == 1 else build("aten.mul.Scalar", total, other=self.factor)

        return make


def _sum_of_projections(stacking: Stacking) -> Callable[[Builder], Value] | None:
    """Σₙ xₙ Wₙᵀ + bₙ as one projection of all xₙ side by side."""
    family = stacking.family
    node = family.first.root.producer
    if node is None or family.first.root in family.first.leaves or not is_projection(node):
        return None
    source, weight, bias = inputs_of(node, "input", "weight", "bias")
    plan = stacking.plan(source)
    weights = family.column(weight)
    if plan is None or not plan.full or not replaceable(weights):
        return None

    def make(build: Builder) -> Value:
        vector = None
        if bias is not None:
            stacked = build("aten.stack", *family.column(bias))
            vector = build("aten.sum.dim_IntList", stacked, dim=[0])
        matrix = build("aten.cat", *weights, dim=1)
        return build("aten.linear", stacking.packed(plan, build), matrix, vector)

    return make


def _sum_of_values(stacking: Stacking) -> Callable[[Builder], Value] | None:
    plan = stacking.plan(stacking.family.first.root)
    if plan is None or not plan.full:
        return None
    return lambda build: build("aten.sum.dim_IntList", plan(build), dim=[-2])


def read_join(node: Node, returned: Collection[Value]) -> Join | None:
    """The join that ends at a node; None where there is none, or it is a part of a larger one."""
    if node.op in JOIN:
        if any(_stack_under(user, returned) is node for user in node.output.users):
            return None
        operands = node.operands
        kind, rank = node.op.removeprefix("aten."), len(node.output.shape)
        return Join(node, kind, tuple(operands), attribute(node, "dim") % rank)
    if (stack := _stack_under(node, returned)) is not None:
        operands = stack.operands
        is_mean = node.op == "aten.mean.dim"
        return Join(node, "sum", tuple(operands), factor=1 / len(operands) if is_mean else 1.0)
    if not _adds(node) or _is_inner(node, returned):
        return None
    terms: list[Value] = []
    pending: list[Value | None] = [*reversed(node.inputs)]
    while pending:
        value = pending.pop()
        above = None if value is None else value.producer
        if above is not None and _adds(above) and _is_inner(above, returned):
            pending.extend(reversed(above.inputs))
        elif value is not None:
            terms.append(value)
    shape = node.output.shape
    needed = [value for value in terms if uniform(value) != 0]
    if any(same_shape(value.shape, shape) for value in needed):
        terms = needed
    return Join(node, "sum", tuple(terms)) if len(terms) > 1 else None


def _adds(node: Node) -> bool:
    """x + y without a factor; Python's sum() begins with 0 + x."""
    if node.op == "aten.add.Scalar":
        source = node.inputs[0]
        is_zero = bool(attribute(node, "other") == 0)
        return is_zero and source is not None and source.dtype == node.output.dtype
    return node.op == _ADD and bool(attribute(node, "alpha") == 1)


def _is_inner(node: Node, returned: Collection[Value]) -> bool:
    """Whether a sum is only a term of another one of its shape."""
    value = node.output
    users = value.users
    if len(value.uses) != 1 or value in returned or not _adds(users[0]):
        return False
    return same_type(value, users[0].output)


def _stack_under(node: Node, returned: Collection[Value]) -> Node | None:
    """The stack whose axis, and nothing else, a node sums over."""
    if node.op not in SUM | MEAN or attribute(node, "keepdim") or "dtype" in node.attrs:
        return None
    source = node.inputs[0]
    stack = None if source is None else source.producer
    if source is None or stack is None or stack.op != "aten.stack":
        return None
    rank, dims = len(source.shape), attribute(node, "dim") or []
    if [dim % rank for dim in dims] != [attribute(stack, "dim") % rank]:
        return None
    return stack if len(source.uses) == 1 and source not in returned else None
