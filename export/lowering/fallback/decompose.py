"""Composite ops without a lowering, as the smaller ops that torch decomposes them into.

The op is run on fake tensors and what reaches torch's dispatcher is written down as IR. Where torch
goes no further, a formula of ours may (formulas.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch._decomp import get_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._sympy import functions as torch_sympy

from attngraph.errors import IRError
from attngraph.export.lowering.fallback.formulas import FORMULAS
from attngraph.ir import Graph, Node, Value
from attngraph.ir.conditions import holds, shown
from attngraph.ir.dims import Dim, DimInfo, same, symbol
from attngraph.ir.infer import TypeInference
from attngraph.ir.ops import call, flatten_call, op_def, op_name
from attngraph.ir.storage import memory_of
from attngraph.ir.types import TensorType

_REMAINDERS = (torch_sympy.Mod, torch_sympy.PythonMod, sympy.Mod)  # as torch or sympy writes %


def decompose(
    node: Node, graph: Graph, has_lowering: Callable[[str], bool], *, formula: bool = True
) -> Graph | None:
    """The op as a graph over its own operands, in their order; None where torch can't divide it.

    Ops that `has_lowering` accepts are not divided further. A `formula` of the op's own goes first.
    """
    if any(value is not None and not isinstance(value.type, TensorType) for value in node.inputs):
        return None
    try:
        parts = _Decomposer(graph, has_lowering).run(node, formula and node.op in FORMULAS)
    except (IRError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return None
    return None if any(_is_again(part, node) for part in parts) else parts


def as_graph(
    function: Callable[..., Sequence[torch.Tensor]],
    operands: Mapping[str, TensorType],
    graph: Graph,
) -> Graph:
    """A function of tensors as a graph over operands of these names and types.

    Its sizes are of `graph`'s dims. Raises NotImplementedError where it asks for one of them.
    """
    return _Decomposer(graph, lambda op: True).trace(function, operands)


def _is_again(part: Node, node: Node) -> bool:
    """Whether a part is the node itself, on operands of the same dtypes and as many axes."""
    if part.op != node.op or part.attrs != node.attrs:
        return False
    kinds = [[v and (v.dtype, len(v.shape)) for v in one.inputs] for one in (part, node)]
    return kinds[0] == kinds[1]


def _is_guess(condition: Any, node: Node) -> bool:
    """Whether a condition says of a size of the node's operands or result that it isn't 1, no more.

    Or of their number of elements or a stride, or of one stride that it isn't the next one, or no
    multiple of it: torch asks so whether they are contiguous.
    """
    if len(condition.args) != 2:
        return False
    shapes = [*_shapes(node), tuple(node.attrs.get("output_size") or ())]
    sizes = [dim for shape in shapes for dim in shape]
    sizes += [math.prod(shape[axis:]) for shape in shapes for axis in range(len(shape))]
    divided, none = condition.args
    if isinstance(condition, sympy.Ne) and none == 0 and isinstance(divided, _REMAINDERS):
        less, more = divided.args
        return any(same(more, less * size) for size in sizes)
    plain = {
        part: next(each for each in part.args if each != 1)
        for part in condition.atoms(torch_sympy.Max)
        if len(part.args) == 2 and 1 in part.args
    }
    less, more = (sympy.sympify(side).xreplace(plain) for side in condition.args)
    if isinstance(condition, sympy.Ge) and more == 2:
        less, more = sympy.Integer(1), less
    elif isinstance(condition, (sympy.Gt, sympy.Ne)):
        less, more = more, less
    elif not isinstance(condition, sympy.Lt):
        return False
    return any(same(more, less * size) for size in sizes)


def _shapes(node: Node) -> list[tuple[Dim, ...]]:
    """The shapes of a node's operands and results."""
    types = [value.type for value in (*node.inputs, *node.outputs) if value is not None]
    return [type.shape for type in types if isinstance(type, TensorType)]


class _Decomposer(TypeInference):
    def __init__(self, graph: Graph, has_lowering: Callable[[str], bool]) -> None:
        super().__init__(dict(graph.dims))
        self.has_lowering = has_lowering
        self.parts = Graph("parts")
        self.parts.dims = dict(graph.dims)
        self._conditions = {*graph.conditions}
        self.values: dict[int, Value] = {}
        self.kept: list[torch.Tensor] = []

    def run(self, node: Node, by_formula: bool) -> Graph:
        definition = op_def(node.op)
        if by_formula:
            definition = replace(definition, function=FORMULAS[node.op])
        with enable_python_dispatcher(), self._mode, torch.no_grad():
            fakes = [None if v is None else self._fake(v.type).clone() for v in node.inputs]
            for value, fake in zip(node.inputs, fakes, strict=True):
                if value is not None and fake is not None:
                    self.know(fake, self.parts.add_input(value.name, value.type))
            attrs = {name: self._materialize(value) for name, value in node.attrs.items()}
            with self.recording():
                results = call(definition, fakes, attrs)
        if results == (NotImplemented,):
            raise NotImplementedError
        self._require_any_size(node)
        self.parts.set_outputs([self.values[id(result)] for result in results])
        return self.parts

    def trace(
        self,
        function: Callable[..., Sequence[torch.Tensor]],
        operands: Mapping[str, TensorType],
    ) -> Graph:
        with enable_python_dispatcher(), self._mode, torch.no_grad():
            fakes = [self._fake(type).clone() for type in operands.values()]
            for (name, type), fake in zip(operands.items(), fakes, strict=True):
                self.know(fake, self.parts.add_input(name, type))
            with self.recording():
                results = function(*fakes)
        if self._env.guards:
            raise NotImplementedError(f"asked for {self._env.guards[0].expr}")
        self.parts.set_outputs([self.values[id(result)] for result in results])
        return self.parts

    def _require_any_size(self, node: Node) -> None:
        """Raises NotImplementedError where torch divides the op differently at other sizes.

        Its decompositions ask for sizes, such as whether bins are of one length, and go on with
        what the sample's say. That a size is 2 or more is torch's own guess, unless it is more: it
        guesses so of dims without asking, and of what is computed from them by asking.
        """
        infos = {
            name: replace(info, low=info.low if info.low > 2 else min(info.low, 1))
            for name, info in self._dims.items()
        }
        given = [value.type for value in node.operands]
        shapes = [type.shape for type in given if isinstance(type, TensorType)]
        sizes = [sympy.sympify(dim) for shape in shapes for dim in shape]
        factors = {part for size in sizes for part in sympy.Mul.make_args(size) if part.args}
        whole = {part: symbol(f"size_{at}") for at, part in enumerate(sorted(factors, key=str))}
        infos |= {str(name): DimInfo(low=1) for name in whole.values()}
        for guard in self._env.guards:
            condition = guard.expr.xreplace(self._names)
            # No operand is empty: what is computed, and a factor of a size, is at least 1.
            known = (condition, condition.xreplace(whole))
            if _is_guess(condition, node) or any(holds(c, infos, self._conditions) for c in known):
                continue
            raise NotImplementedError(
                f"torch computes {node.op} in this way only where {shown(condition)}"
            )

    def recording(self) -> Any:
        """A context in which every call that reaches the dispatcher is recorded."""

        def dispatch(
            mode: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return self.record(function, args, kwargs or {})

        # Built by type(): the base class has no annotations, which strict mypy refuses.
        return type("_Recorder", (TorchDispatchMode,), {"__torch_dispatch__": dispatch})()

    def know(self, fake: torch.Tensor, value: Value) -> None:
        self.values[id(fake)] = value
        self.kept.append(fake)  # an id is only good while the object lives

    def record(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if function._schema.is_mutable:
            return self._write(function, args, kwargs)
        formula = self._formula(function)
        if formula is not None:
            with self.recording():
                made = formula(*args, **kwargs)
            if made is not NotImplemented:
                return made
        result = function(*args, **kwargs)
        outputs = list(result) if isinstance(result, (list, tuple)) else [result]
        if not any(isinstance(output, torch.Tensor) for output in outputs):
            return result
        inputs, attrs = flatten_call(op_def(op_name(function)), args, kwargs)
        wide = any(isinstance(t, torch.Tensor) and t.dtype == torch.float64 for t in inputs)
        operands = [None if fake is None else self._operand(fake, wide) for fake in inputs]
        types = [self._type(output) for output in outputs]
        made = self.parts.create(
            op_name(function), operands, pytree.tree_map(self._plain, attrs), types=types
        )
        for output, value in zip(outputs, made.outputs, strict=True):
            self.know(output, value)
        return result

    def _write(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """An in-place op as the op that it is named after, where nothing else sees the tensor."""
        target, name = args[0], function._schema.name.removeprefix("aten::").removesuffix("_")
        memory = memory_of(target)
        if any(t is not target and memory_of(t) == memory for t in self.kept):
            raise IRError(f"{op_name(function)} writes into a view.")
        with self.recording():
            if name == "copy":
                result = args[1].to(target.dtype).expand(target.shape).clone()
            else:
                twin = getattr(getattr(torch.ops.aten, name, None), function._overloadname, None)
                if twin is None:
                    raise IRError(f"{op_name(function)} is no value.")
                result = twin(*args, **kwargs)
        function(*args, **kwargs)  # it may change the tensor's shape
        if result.dtype != target.dtype or result.shape != target.shape:
            raise IRError(f"{op_name(function)} changes its operand's type.")
        self.values[id(target)] = self.values[id(result)]
        return target

    def _formula(self, function: Any) -> Callable[..., Any] | None:
        """What to run in the op's place: our formula, or torch's where there is no lowering."""
        name = op_name(function)
        if name in FORMULAS or self.has_lowering(name):
            return FORMULAS.get(name)
        return get_decompositions([function]).get(function)

    def _operand(self, item: Any, wide: bool) -> Value:
        """The value of an argument; a number next to float64 is as exact as that."""
        if isinstance(item, torch.Tensor):
            return self.values[id(item)]
        if isinstance(item, (torch.SymInt, torch.SymFloat)):
            dtype = torch.int64 if isinstance(item, torch.SymInt) else torch.float32
            attrs: dict[str, Any] = {"size": [], "fill_value": self._dim(item), "dtype": dtype}
            return self.parts.create("aten.full", [], attrs, types=[TensorType(dtype, ())]).output
        if isinstance(item, (bool, int, float)):
            with unset_fake_temporarily():
                exact = torch.float64 if wide and isinstance(item, float) else None
                return self.parts.add_constant("number", torch.tensor(item, dtype=exact))
        raise IRError(f"{item!r} is no operand.")

    def _plain(self, item: Any) -> Any:
        return self._dim(item) if isinstance(item, torch.SymInt) else item
