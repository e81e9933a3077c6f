"""The SSA graph. `Graph` owns every mutation, so uses, names and the epoch are always right."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from attngraph.errors import IRError
from attngraph.ir.conditions import Condition, condition_rewritten, ties, without_ties
from attngraph.ir.dims import Dim, DimInfo, rewritten
from attngraph.ir.loc import UNKNOWN, Loc
from attngraph.ir.settling import bounded, settled
from attngraph.ir.types import TensorType, Type


class Value:
    """A typed value: a graph input, a constant (with or without `data`), or a node's output."""

    __slots__ = ("_uses", "data", "index", "is_constant", "name", "producer", "type")

    def __init__(
        self,
        name: str,
        type: Type,
        *,
        producer: Node | None = None,
        index: int = 0,
        data: torch.Tensor | None = None,
        is_constant: bool = False,
    ) -> None:
        self.name = name
        self.type = type
        self.producer = producer
        self.index = index
        self.data = data
        self.is_constant = is_constant
        self._uses: dict[tuple[Node, int], None] = {}

    @property
    def uses(self) -> tuple[tuple[Node, int], ...]:
        """(node, input position) pairs, in the order they were made."""
        return tuple(self._uses)

    @property
    def users(self) -> tuple[Node, ...]:
        """The distinct nodes that read this value."""
        return tuple(dict.fromkeys(node for node, _ in self._uses))

    @property
    def tensor_type(self) -> TensorType:
        """The type, where the value is a tensor. Raises IRError otherwise."""
        if not isinstance(self.type, TensorType):
            raise IRError(f"%{self.name} is a scalar where a tensor is expected.")
        return self.type

    @property
    def shape(self) -> tuple[Any, ...]:
        return self.tensor_type.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor_type.dtype

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}"


class Node:
    """One operation. `inputs` is a tuple: only the graph's methods change it.

    `attrs` are the node's own: a list that the caller goes on to change isn't kept.

    `number` counts the nodes that a graph has ever made: later ones have larger numbers.
    """

    __slots__ = ("_next", "_previous", "attrs", "graph", "inputs", "loc", "number", "op", "outputs")

    def __init__(
        self, op: str, inputs: tuple[Value | None, ...], attrs: Mapping[str, Any], loc: Loc
    ) -> None:
        self.op = op
        self.inputs = inputs
        self.attrs: dict[str, Any] = {
            name: list(item) if isinstance(item, list) else item for name, item in attrs.items()
        }
        self.outputs: tuple[Value, ...] = ()
        self.loc = loc
        self.number = 0
        self.graph: Graph | None = None
        self._previous: Node | None = None
        self._next: Node | None = None

    @property
    def operands(self) -> list[Value]:
        """The inputs that are there: an optional one that isn't given is None among `inputs`."""
        return [value for value in self.inputs if value is not None]

    def input(self, at: int) -> Value:
        """An input that the op requires. Raises IRError where it is absent."""
        value = self.inputs[at]
        if value is None:
            raise IRError(f"{self!r} lacks an input at {at}.")
        return value

    @property
    def source(self) -> Value:
        """The first input. Raises IRError where it is absent."""
        return self.input(0)

    @property
    def output(self) -> Value:
        """The only output. Raises IRError where there are several."""
        if len(self.outputs) != 1:
            raise IRError(f"{self.op} has {len(self.outputs)} outputs where one is expected.")
        return self.outputs[0]

    @property
    def regions(self) -> tuple[Graph, ...]:
        """The graphs among the attributes, as the body of a loop is."""
        return tuple(item for item in self.attrs.values() if isinstance(item, Graph))

    def __repr__(self) -> str:
        names = ", ".join(f"%{value.name}" if value else "none" for value in self.inputs)
        return f"{', '.join(map(repr, self.outputs))} = {self.op}({names})"


class Graph:
    """Inputs, constants, nodes in execution order, outputs, and the named dims of their shapes.

    A node may hold graphs among its attributes: its regions, such as the body of a loop. Clones and
    rewritten nodes share them, so a graph is frozen once a node holds it; `clone` is not.

    `conditions` say for which sizes of the dims, beside their ranges, the graph is the model.
    `created` is the number of the latest node; `epoch` counts mutations. `keep`, where there is
    one, says where the data of each new constant lies: it returns the same numbers.
    """

    def __init__(self, name: str = "main") -> None:
        self.name = name
        self.inputs: list[Value] = []
        self.outputs: tuple[Value, ...] = ()
        self.output_names: tuple[str, ...] = ()
        self.constants: dict[str, Value] = {}
        self.dims: dict[str, DimInfo] = {}
        self.conditions: tuple[Condition, ...] = ()
        self._epoch = 0
        self._frozen = False
        self.created = 0
        self.keep: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._names: dict[str, int] = {}
        self._first: Node | None = None
        self._last: Node | None = None
        self._count = 0

    @property
    def epoch(self) -> int:
        """The number of mutations so far."""
        return self._epoch

    @epoch.setter
    def epoch(self, count: int) -> None:
        if self._frozen:
            raise IRError(f"Graph {self.name} is a node's region; change a clone of it.")
        self._epoch = count

    def __iter__(self) -> Iterator[Node]:
        """The nodes of this moment in order; those erased meanwhile are skipped."""
        for node in self._snapshot():
            if node.graph is self:
                yield node

    def __reversed__(self) -> Iterator[Node]:
        for node in reversed(self._snapshot()):
            if node.graph is self:
                yield node

    def _snapshot(self) -> list[Node]:
        nodes, node = [], self._first
        while node is not None:
            nodes.append(node)
            node = node._next
        return nodes

    def __len__(self) -> int:
        return self._count

    def walk(self) -> Iterator[Node]:
        """The nodes in order, each followed by those in its regions."""
        for node in self:
            yield node
            for region in node.regions:
                yield from region.walk()

    def values(self) -> Iterator[Value]:
        """Inputs, constants, then every node's outputs."""
        yield from self.inputs
        yield from self.constants.values()
        for node in self:
            yield from node.outputs

    def unique_name(self, name: str) -> str:
        """`name`, or `name_1`, `name_2`, … if taken."""
        if name not in self._names:
            self._names[name] = 0
            return name
        while True:
            self._names[name] += 1
            candidate = f"{name}_{self._names[name]}"
            if candidate not in self._names:
                self._names[candidate] = 0
                return candidate

    def add_input(self, name: str, type: Type) -> Value:
        value = Value(self.unique_name(name), type)
        self.inputs.append(value)
        self.epoch += 1
        return value

    def rename(self, names: Mapping[str, str]) -> None:
        """Gives inputs and outputs other names: those that `names` has, by the names they have."""
        renamed = [value for value in self.inputs if value.name in names]
        for value in renamed:
            del self._names[value.name]
        for value in renamed:
            value.name = self.unique_name(names[value.name])
        self.output_names = tuple(names.get(name, name) for name in self.output_names)
        self.epoch += 1

    def add_constant(self, name: str, data: torch.Tensor | None, type: Type | None = None) -> Value:
        """A weight or a folded tensor. The data is shared, never copied; None: known by name."""
        if type is None:
            if data is None:
                raise IRError(f"Constant {name} needs data or a type.")
            type = TensorType(data.dtype, tuple(data.shape))
        if data is not None and self.keep is not None:
            data = self.keep(data)
        value = Value(self.unique_name(name), type, data=data, is_constant=True)
        self.constants[value.name] = value
        self.epoch += 1
        return value

    def create(
        self,
        op: str,
        inputs: Sequence[Value | None],
        attrs: Mapping[str, Any] | None = None,
        *,
        types: Sequence[Type],
        names: Sequence[str] | None = None,
        loc: Loc = UNKNOWN,
        before: Node | None = None,
    ) -> Node:
        """Inserts a node before another (default: at the end). `Builder` infers the types."""
        node = Node(op, tuple(inputs), attrs or {}, loc)
        self.created += 1
        node.number = self.created
        if names is None:
            stem = op.split(".")[1] if "." in op else op
            names = [stem] * len(types)
        node.outputs = tuple(
            Value(self.unique_name(name), type, producer=node, index=index)
            for index, (name, type) in enumerate(zip(names, types, strict=True))
        )
        self._link(node, before)
        self._add_uses(node)
        for region in node.regions:
            region._frozen = True
        return node

    def twin(
        self,
        node: Node,
        inputs: Sequence[Value | None] | None = None,
        attrs: Mapping[str, Any] | None = None,
        *,
        op: str | None = None,
        loc: Loc | None = None,
    ) -> Node:
        """A node before this one, like it in all that isn't given, whose results have its types."""
        given = node.inputs if inputs is None else inputs
        types = [value.type for value in node.outputs]
        attrs, loc = node.attrs if attrs is None else attrs, loc or node.loc
        return self.create(op or node.op, given, attrs, types=types, loc=loc, before=node)

    def set_inputs(self, node: Node, inputs: Sequence[Value | None]) -> None:
        """Rewires a node."""
        if tuple(inputs) == node.inputs:
            return
        self._drop_uses(node)
        node.inputs = tuple(inputs)
        self._add_uses(node)
        self.epoch += 1

    def settle_sizes(self) -> None:
        """Sizes, and attributes that hold some, without each max and min that the dims decide,
        and the conditions on one of them.

        A quotient is one of as few dims as the conditions leave: that of a dim by an equal one.
        """
        known: dict[Any, Dim] = {}
        equal, infos = ties(self.conditions), bounded(self.dims, self.conditions)

        def written(item: Any) -> Any:
            return settled(without_ties(item, equal) if equal else item, infos, known)

        for value in self.values():
            if isinstance(value.type, TensorType):
                shape = written(value.type.shape)
                if shape != value.type.shape:
                    value.type = TensorType(value.type.dtype, shape)
                    self.epoch += 1
        for node in self:
            attrs = {name: written(item) for name, item in node.attrs.items()}
            if attrs != node.attrs:
                node.attrs = attrs
                self.epoch += 1

    def define_dims(self, known: Mapping[str, Dim]) -> None:
        """Writes expressions over other dims in the place of these, in every size and attribute."""

        def written(item: Any) -> Any:
            result = rewritten(item, known)
            return item if result == item else settled(result, self.dims)

        for value in self.values():
            if isinstance(value.type, TensorType) and value.type.shape:
                value.type = TensorType(value.type.dtype, written(value.type.shape))
        for node in self:
            node.attrs = {name: written(item) for name, item in node.attrs.items()}
        self.conditions = tuple(condition_rewritten(c, known) for c in self.conditions)
        for name in known:
            self.dims.pop(name, None)
        self.epoch += 1

    def become(self, other: Graph) -> None:
        """Takes everything over from another graph, which is of no use afterwards."""
        vars(self).update({**vars(other), "keep": self.keep})
        for node in self._snapshot():
            node.graph = self

    def set_outputs(self, outputs: Sequence[Value], names: Sequence[str] | None = None) -> None:
        """What the graph returns. The output names stay when values are replaced."""
        self.outputs = tuple(outputs)
        if names is not None:
            self.output_names = tuple(names)
        elif len(self.output_names) != len(self.outputs):
            self.output_names = tuple(value.name for value in outputs)
        self.epoch += 1

    def replace_uses(self, old: Value, new: Value) -> None:
        """Every reader of `old`, the graph's outputs included, reads `new` instead."""
        if old is new:
            return
        for node in old.users:
            self._drop_uses(node)
            node.inputs = tuple(new if value is old else value for value in node.inputs)
            self._add_uses(node)
        self.outputs = tuple(new if value is old else value for value in self.outputs)
        self.epoch += 1

    def replace(self, node: Node, values: Iterable[Value]) -> None:
        """What read the outputs of a node reads these values, and the node is erased."""
        for old, new in zip(node.outputs, values, strict=True):
            self.replace_uses(old, new)
        self.erase(node)

    def take_place(self, node: Node, erased: Node) -> None:
        """Gives the values of a node the names of those of an erased one, whose place it took."""
        for value, old in zip(node.outputs, erased.outputs, strict=True):
            if old.name in self._names:
                raise IRError(f"%{old.name} is still there, so %{value.name} can't have its name.")
            del self._names[value.name]
            self._names[old.name] = 0
            value.name = old.name

    def erase(self, node: Node) -> None:
        """Removes a node whose outputs nobody reads. Raises IRError if one is still read."""
        for value in node.outputs:
            self._forget(value)
        self._drop_uses(node)
        self._unlink(node)

    def erase_constant(self, value: Value) -> None:
        """Removes an unread constant."""
        self._forget(value)
        del self.constants[value.name]
        self.epoch += 1

    def _forget(self, value: Value) -> None:
        if value._uses or any(output is value for output in self.outputs):
            raise IRError(f"%{value.name} is still read and can't be erased.")
        del self._names[value.name]

    def sort(self) -> None:
        """Restores execution order, moving as few nodes as a stable depth-first walk allows.

        Raises IRError, and changes nothing, if a node needs its own result.
        """
        order: list[Node] = []
        done: set[Node] = set()
        begun: set[Node] = set()
        for root in self._snapshot():
            stack = [(root, iter(root.inputs))] if root not in done else []
            begun.add(root)
            while stack:
                node, pending = stack[-1]
                for value in pending:
                    above = value.producer if value is not None else None
                    if above is None or above in done:
                        continue
                    if above in begun:
                        raise IRError(f"{above.op} at {above.loc} needs its own result.")
                    begun.add(above)
                    stack.append((above, iter(above.inputs)))
                    break
                else:
                    stack.pop()
                    done.add(node)
                    order.append(node)
        self._first = order[0] if order else None
        self._last = order[-1] if order else None
        for index, node in enumerate(order):
            node._previous = order[index - 1] if index else None
            node._next = order[index + 1] if index + 1 < len(order) else None
        self.epoch += 1

    def _link(self, node: Node, before: Node | None) -> None:
        if before is not None and before.graph is not self:
            raise IRError(f"{before!r} is not in graph {self.name}.")
        node.graph = self
        node._next = before
        node._previous = self._last if before is None else before._previous
        if node._previous is None:
            self._first = node
        else:
            node._previous._next = node
        if before is None:
            self._last = node
        else:
            before._previous = node
        self._count += 1
        self.epoch += 1

    def _unlink(self, node: Node) -> None:
        if node._previous is None:
            self._first = node._next
        else:
            node._previous._next = node._next
        if node._next is None:
            self._last = node._previous
        else:
            node._next._previous = node._previous
        node.graph = node._previous = node._next = None
        self._count -= 1
        self.epoch += 1

    def _add_uses(self, node: Node) -> None:
        for position, value in enumerate(node.inputs):
            if value is not None:
                if value.producer is not None and value.producer.graph is not self:
                    raise IRError(f"{node.op} at {node.loc} reads %{value.name}, which is gone.")
                value._uses[(node, position)] = None

    def _drop_uses(self, node: Node) -> None:
        for position, value in enumerate(node.inputs):
            if value is not None:
                value._uses.pop((node, position), None)


def free_name(name: str, taken: Collection[str], joint: str = "_") -> str:
    """`name`, or it with the first number that makes it free: `name_1`, `name_2`, …"""
    numbered = (f"{name}{joint}{count}" for count in itertools.count(1))
    return next(each for each in itertools.chain([name], numbered) if each not in taken)
