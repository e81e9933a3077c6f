"""From an exported program's FX graph to the IR, node by node, without running anything.

Types are read from the trace. Sizes and arithmetic on them become expressions in attributes. What
has no meaning at inference (assertions, eval dropout, aliases, casts to the same dtype) vanishes.
Every real cast is `aten._to_copy {dtype}`; `view`, `_unsafe_view` and `reshape` are
`aten.reshape`; `contiguous` is `aten.clone {memory_format}` unless it does nothing.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from attngraph.errors import CaptureError
from attngraph.frontend.interface.shapes import dynamic_number
from attngraph.frontend.sizes.symbols import Symbols
from attngraph.frontend.translation.functional import IDENTITY_IN_PLACE, Functional
from attngraph.frontend.translation.python_numbers import NO_VALUE, Call, PythonNumbers
from attngraph.frontend.translation.strided import gather_strided
from attngraph.frontend.translation.wrapped import plain_weight
from attngraph.frontend.watching.asked import Asked, marked
from attngraph.frontend.watching.locations import Locator
from attngraph.ir.graph import Graph, Value
from attngraph.ir.loc import UNKNOWN
from attngraph.ir.ops import OpDef, flatten_call, op_name
from attngraph.ir.storage import memory_of, place_of, wraps
from attngraph.ir.types import ScalarType, TensorType, Type

_IDENTITY = frozenset(["aten.alias", "aten.detach", "aten.lift_fresh_copy", *IDENTITY_IN_PLACE])
_DROPOUT = frozenset(
    [
        f"aten.{name}{suffix}"
        for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
        for suffix in ("", "_")
    ]
)
_RESHAPE = frozenset(["aten.view", "aten._unsafe_view", "aten.reshape"])
_INNER = "export.access_subclass_inner_tensor"
_ITEM = frozenset(["aten.item", "aten._local_scalar_dense"])
_UNSAFE_NAME = re.compile(r"[^\w.$/-]")


class Translator:
    """Builds `graph`. Inputs first, then `run`.

    `wrapped` has the names and types of the weights that are no plain tensors, and `asked` the
    conditions that are marked in the program.
    """

    def __init__(self, functional: Functional, symbols: Symbols, name: str = "main") -> None:
        self.graph = Graph(name)
        self._program = functional.program
        self._module = functional.program.graph_module
        self._functional = functional
        self._symbols = symbols
        self._locator = Locator()
        self._values: dict[fx.Node, Value] = {}
        self._parts: dict[fx.Node, list[Value]] = {}
        self._scalars: dict[fx.Node, Any] = {}
        self._numbers = PythonNumbers(self.graph, self._scalars, self._read, self._type)
        self._weights: dict[fx.Node, tuple[str, torch.Tensor]] = {}
        self._known: dict[Hashable, Value] = {}
        self.wrapped: list[tuple[str, type]] = []
        self.asked: list[Asked] = []

    def run(self) -> list[Any]:
        """Translates every node; returns what the graph returns, Values and constants."""
        self._inputs()
        for node in self._functional.graph.nodes:
            if node.op == "output":
                results = [self._result(item) for item in node.args[0]]
                self._locate_first()
                return results
            if node.op == "get_attr":
                data = operator.attrgetter(str(node.target))(self._module)
                self._weights[node] = (str(node.target), data)
            elif node.op == "call_function":
                self._call(node)
        raise CaptureError("The exported program returns nothing.")

    def _locate_first(self) -> None:
        """Gives nodes without a location, before any that has one, the first there is."""
        nodes = list(self.graph)
        first = next((node.loc for node in nodes if node.loc != UNKNOWN), UNKNOWN)
        for node in nodes:
            if node.loc != UNKNOWN:
                break
            node.loc = first

    def _inputs(self) -> None:
        nodes = [node for node in self._functional.graph.nodes if node.op == "placeholder"]
        specs = self._program.graph_signature.input_specs
        state, constants = self._program.state_dict, self._program.constants
        for node, spec in zip(nodes, specs, strict=True):
            value = node.meta.get("val")
            if spec.kind is not torch.export.graph_signature.InputKind.USER_INPUT:
                data = state.get(str(spec.target), constants.get(str(spec.target)))
                if isinstance(data, torch.Tensor):
                    self._weights[node] = (str(spec.target), data)
                elif node.users:
                    raise CaptureError(
                        f"The model holds {spec.target}, a {type(data).__name__} that a graph of "
                        "tensors can't; keep it out of forward."
                    )
            elif isinstance(value, torch.Tensor):
                if value.layout is not torch.strided:
                    raise CaptureError(
                        f"Input {spec.arg.name} is a sparse tensor, which no file takes: give it "
                        "as a dense one (.to_dense()), or its places and values as two inputs, "
                        "with which forward sums by index_add."
                    )
                self._values[node] = self.graph.add_input(str(spec.arg.name), self._type(value))
            elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                raise dynamic_number(str(spec.arg.name), "export the module again")
            else:
                self._scalars[node] = getattr(spec.arg, "value", value)

    def _weight(self, node: fx.Node) -> Value:
        """A parameter, buffer or lifted tensor, added when first read; tied ones are one."""
        name, data = self._weights[node]
        if data.layout is not torch.strided:
            raise CaptureError(
                f"The model's {name} is a sparse tensor, which a graph can't hold; keep it as a "
                "dense one (.to_dense())."
            )
        key = place_of(data)
        if key not in self._known:
            plain = plain_weight(name, data)
            if wraps(data):
                self.wrapped.append((name, type(data)))
            self._known[key] = self.graph.add_constant(_UNSAFE_NAME.sub("_", name), plain.detach())
        return self._known[key]

    def _call(self, node: fx.Node) -> None:
        target, value = node.target, node.meta.get("val")
        source, index = node.args[0] if node.args else None, node.args[-1] if node.args else 0
        if target is operator.getitem and isinstance(source, fx.Node) and isinstance(index, int):
            if source in self._parts:
                self._values[node] = self._parts[source][index]
            return
        if not isinstance(target, torch._ops.OpOverload):
            if isinstance(value, torch.Tensor):
                raise CaptureError(
                    f"{target} at {self._locator.of(node)} is not an operator of torch."
                )
            self._numbers.arithmetic(node, self._locator.of(node))
            return  # that on sizes is read from the trace where it is used
        name = op_name(target)
        if (mark := marked(node)) is not None:
            place, said, condition = mark
            self.asked.append(Asked(place, said, self._tensor(condition)))
        if name in NO_VALUE or name.startswith("profiler."):
            return
        if name in _ITEM:
            self._item(node)
        elif name == _INNER:
            self._inner(node)
        elif value is not None and _is_cast(name) and isinstance(source, (bool, int, float)):
            self._values[node] = self._numbers.full(source, value.dtype, self._locator.of(node))
        elif self._is_identity(node, name):
            self._values[node] = self._tensor(node.args[0])
        elif name == "aten.as_strided":
            self._values[node] = self._strided(node)
        elif value is None or isinstance(value, (torch.Tensor, list, tuple)):
            name, definition, args, kwargs = self._canonical(node, name)
            self._create(node, name, definition, args, kwargs)

    def _inner(self, node: fx.Node) -> None:
        """A tensor that a weight of a type of its own wraps, such as its codes or its scales."""
        source, attribute = node.args[0], str(node.args[1])
        if not isinstance(source, fx.Node) or source not in self._weights:
            raise CaptureError(
                f"The tensors that a {attribute} is part of are made as the model runs, at "
                f"{self._locator.of(node)}; a graph has plain tensors only."
            )
        name, data = self._weights[source]
        self._weights[node] = (f"{name}.{attribute}", getattr(data, attribute))

    def _is_identity(self, node: fx.Node, name: str) -> bool:
        if name in _IDENTITY:
            return True
        if name in _DROPOUT:
            return bool(node.args[2] is False or node.args[1] == 0.0)
        if name == "aten.contiguous" or _is_cast(name):
            source = node.args[0]
            if not isinstance(source, fx.Node):
                return False
            before, after = source.meta["val"], node.meta["val"]
            if before.dtype != after.dtype:
                return False
            if name == "aten.contiguous":
                return memory_of(before) == memory_of(after)
            return _memory_format(node) is None
        return False

    def _canonical(self, node: fx.Node, name: str) -> Call:
        """The operator that stands for this one, and its call."""
        twin = self._functional.twins.get(node)
        if twin is not None:
            name = op_name(twin)
        args, kwargs = node.args, node.kwargs
        if name in _RESHAPE:
            name = "aten.reshape"
        elif name == "aten.contiguous":
            name, args = "aten.clone", node.args[:1]
            kwargs = {"memory_format": _memory_format(node) or torch.contiguous_format}
        elif _is_cast(name):
            source, value = node.args[0], node.meta["val"]
            assert isinstance(source, fx.Node)
            name, args = "aten._to_copy", (source,)
            kwargs = {"dtype": value.dtype}
            if (memory_format := _memory_format(node)) is not None:
                kwargs["memory_format"] = memory_format
            if source.meta["val"].dtype == value.dtype:
                name, kwargs = "aten.clone", {"memory_format": memory_format}
        return self._numbers.call(node, name, args, kwargs, self._locator.of(node))

    def _item(self, node: fx.Node) -> None:
        """`Tensor.item()`: an integer defines a dim; another number stays a tensor."""
        value, source = node.meta.get("val"), self._tensor(node.args[0])
        loc = self._locator.of(node)
        if isinstance(value, torch.SymInt):
            known = set(self._symbols.infos)
            expr = self._symbols.read(value)
            if isinstance(expr, sympy.Symbol) and expr.name not in known:
                kind = ScalarType("int", expr.name)
                self.graph.create("aten.item", [source], types=[kind], names=[node.name], loc=loc)
            return
        self._numbers.item(node, source, loc)

    def _strided(self, node: fx.Node) -> Value:
        (source, size, stride, *rest), loc = node.args, self._locator.of(node)
        assert isinstance(source, fx.Node)
        begin = source.meta["val"].storage_offset()
        offset = node.kwargs.get("storage_offset", rest[0] if rest else None)
        offset = begin if offset is None else offset
        lies, first, size, stride, offset = map(
            self._read, (source.meta["val"].stride(), begin, size, stride, offset)
        )
        value = self._tensor(source)
        return gather_strided(self.graph, value, lies, size, stride, offset - first, loc)

    def _create(
        self,
        node: fx.Node,
        name: str,
        definition: OpDef,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        read_args = [self._read(arg) for arg in args]
        read_kwargs = {key: self._read(arg) for key, arg in kwargs.items()}
        inputs, attrs = flatten_call(definition, read_args, read_kwargs)
        if attrs.get("sorted") is False:
            # What may come in any order comes in order, as by default: torch and a kernel would
            # choose different ones, and rows that are picked by these places would follow.
            del attrs["sorted"]
        value = node.meta.get("val")
        loc = self._locator.of(node)
        if any(isinstance(attr, Value) for attr in attrs.values()):
            raise CaptureError(
                f"{name} at {loc} takes a number that .item() reads at run time; keep it a tensor."
            )
        if isinstance(value, torch.Tensor):
            created = self.graph.create(
                name, inputs, attrs, types=[self._type(value)], names=[node.name], loc=loc
            )
            self._values[node] = created.output
            for handle in self._functional.handles.get(node, ()):
                self._values[handle] = created.output
        elif isinstance(value, (list, tuple)):
            types = [self._type(item) for item in value]
            names = [f"{node.name}_{index}" for index in range(len(types))]
            created = self.graph.create(name, inputs, attrs, types=types, names=names, loc=loc)
            self._parts[node] = list(created.outputs)
        else:
            raise CaptureError(
                f"{name} at {loc} has no result in the trace; attngraph can't tell what it does."
            )

    def _type(self, value: Any) -> Type:
        if isinstance(value, torch.Tensor):
            return TensorType(value.dtype, tuple(self._symbols.read(size) for size in value.shape))
        kind = type(value).__name__.removeprefix("Sym").lower()
        return ScalarType(kind if kind in ("int", "float", "bool") else "int")

    def _tensor(self, item: Any) -> Value:
        value = self._read(item)
        assert isinstance(value, Value)
        return value

    def _read(self, item: Any) -> Any:
        """An FX argument as the IR has it: Values, numbers, expressions, and lists of them."""
        if isinstance(item, fx.Node):
            if item in self._values:
                return self._values[item]
            if item in self._numbers.fractions:
                return self._numbers.fractions[item]
            if item in self._weights:
                return self._weight(item)
            if item in self._scalars:
                return self._scalars[item]
            return self._symbols.read(item.meta["val"])
        if isinstance(item, (list, tuple)):
            return [self._read(part) for part in item]
        return self._symbols.read(item)

    def _result(self, item: Any) -> Any:
        value = self._read(item)
        if isinstance(value, sympy.Basic):
            loc = self._locator.of(item)
            return self._numbers.full(
                value, torch.int64 if value.is_integer else torch.float32, loc
            )
        return value


def _is_cast(name: str) -> bool:
    return name == "aten._to_copy" or name.startswith("aten.to.") or name == "aten.type_as"


def _memory_format(node: fx.Node) -> torch.memory_format | None:
    """The layout that a copy asks for; None where it preserves its input's."""
    for value in (*node.args, *node.kwargs.values()):
        if isinstance(value, torch.memory_format) and value != torch.preserve_format:
            return value
    return None
