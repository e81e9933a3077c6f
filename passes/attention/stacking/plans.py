"""Values of isomorphic branches that are computed together, with the branches as an axis.

The branches become an axis in front of the last `trailing` dims: (…, N, F) for features, and
(…, N, H, S, T) for what is added to scores. A value that all branches share has size 1 there.
Everything is planned before anything is built: an op without a batching rule has no plan, and the
branches stay as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from attngraph.analysis.branches import Family
from attngraph.ir import Builder, Dim, Node, Value
from attngraph.ir.dims import product

FEATURES, SCORES = 1, 3  # dims behind the branches: (F,) and (H, S, T)


@dataclass
class Plan:
    """Builds a stacked value once. `full`: whether the branches' axis has its full size, or 1."""

    make: Callable[[Builder], Value]
    full: bool = True
    _made: Value | None = None

    def __call__(self, build: Builder) -> Value:
        if self._made is None:
            self._made = self.make(build)
        return self._made


@dataclass
class Stack(ABC):
    """The stacked values of one family, each planned once.

    Building fills `merged`: pairs of the nodes that became one, and that one.
    """

    family: Family
    exact_only: bool = False
    merged: list[tuple[tuple[Node, ...], Node]] = field(default_factory=list)
    _plans: dict[tuple[Value, int], Plan | None] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of branches."""
        return len(self.family.branches)

    def plan(self, value: Value, trailing: int = FEATURES) -> Plan | None:
        """How to stack a value of the first branch and its counterparts in the others."""
        key = (value, trailing)
        if key not in self._plans:
            self._plans[key] = self._planned(value, trailing)
        return self._plans[key]

    def whole(self, plan: Plan, build: Builder, trailing: int = FEATURES) -> Value:
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
        value = self.whole(plan, build, SCORES)
        shape = list(value.shape)
        at = len(shape) - SCORES
        if heads is not None and shape[at] != heads:
            shape[at] = heads
            value = build("aten.expand", value, size=shape)
        shape[at - 1 : at + 1] = [product(shape[at - 1 : at + 1])]
        return build("aten.reshape", value, shape=shape)

    def nodes(self, node: Node) -> tuple[Node, ...]:
        """A node of the first branch and its counterparts, in the order of the branches."""
        found = (value.producer for value in self.family.column(node.outputs[0]))
        return tuple(item for item in found if item is not None)

    def every(self, run: int) -> Self:
        """The first of every `run` branches."""
        return replace(self, family=self.family.every(run), _plans={})

    @abstractmethod
    def _planned(self, value: Value, trailing: int) -> Plan | None: ...


def laid_out(column: Sequence[Value], trailing: int) -> Plan:
    """The values as they are, one after another."""

    def make(build: Builder) -> Value:
        parts = [inserted(build, value, trailing) for value in column]
        return build("aten.cat", *parts, dim=-1 - trailing)

    return Plan(make)


def laid_out_column(stack: Stack, value: Value, trailing: int = FEATURES) -> Plan:
    return laid_out(stack.family.column(value), trailing)


def inserted(build: Builder, value: Value, trailing: int) -> Value:
    return build("aten.reshape", value, shape=_padded(value.shape, trailing))


def _padded(shape: Sequence[Dim], trailing: int) -> list[Dim]:
    """A shape with its branches' axis, of size 1."""
    full: list[Dim] = [1] * (trailing - len(shape)) + list(shape)
    at = len(full) - trailing
    return [*full[:at], 1, *full[at:]]


def moved(build: Builder, value: Value, source: int, target: int) -> Value:
    """The value with one axis at another place."""
    order = list(range(len(value.shape)))
    order.insert(target, order.pop(source))
    return value if order == sorted(order) else build("aten.permute", value, dims=order)
