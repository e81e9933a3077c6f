"""Python's numbers beside tensors: `x + 1`, and `float(t)`, which a tensor holds until a run.

An operator that is given a number for a tensor is the overload that takes numbers. A fraction that
is read of a tensor as the model runs (`t.item()`) stays a tensor without dims: Python's arithmetic
on it, which is in double precision, becomes operators, and an operator that is given it for a
number is the overload that takes a tensor. Where Python raises an error (1 / 0, int of NaN), the
file goes on as tensors do.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from attngraph.errors import CaptureError
from attngraph.ir.graph import Graph, Value
from attngraph.ir.loc import Loc
from attngraph.ir.ops import OpDef, op_def, op_name
from attngraph.ir.types import TensorType

Given = Mapping[str, Any]
Call = tuple[str, OpDef, Sequence[Any], Given]
"""An operator's name and definition, and what it is given."""

_ARITHMETIC: dict[Any, str] = {
    operator.add: "aten.add.Tensor",
    operator.sub: "aten.sub.Tensor",
    operator.mul: "aten.mul.Tensor",
    operator.truediv: "aten.div.Tensor",
    operator.pow: "aten.pow.Tensor_Tensor",
    operator.mod: "aten.remainder.Tensor",
    operator.neg: "aten.neg",
    operator.abs: "aten.abs",
    math.trunc: "aten.trunc",
    math.floor: "aten.floor",
    math.ceil: "aten.ceil",
    round: "aten.round",
    torch.sym_float: "aten.clone",
    torch.sym_max: "aten.maximum",
    torch.sym_min: "aten.minimum",
    getattr(torch, "_sym_sqrt"): "aten.sqrt",  # noqa: B009
}
_COMPARISONS: dict[Any, str] = {
    operator.eq: "aten.eq.Tensor",
    operator.ne: "aten.ne.Tensor",
    operator.lt: "aten.lt.Tensor",
    operator.le: "aten.le.Tensor",
    operator.gt: "aten.gt.Tensor",
    operator.ge: "aten.ge.Tensor",
}
NO_VALUE = frozenset(
    [
        "aten._assert_tensor_metadata",
        "aten._assert_scalar",
        "aten._assert_async",
        "aten._assert_async.msg",
        "aten.sym_constrain_range",
        "aten.sym_constrain_range_for_size",
        "aten.promote_types",
        "aten.can_cast",
        *(f"aten.result_type.{kind}" for kind in ("Tensor", "Scalar", "Scalar_Tensor")),
        "aten.result_type.Scalar_Scalar",
    ]
)
"""Operators that demand something of tensors or sizes, or tell of dtypes, which a trace knows."""
_FILLS = ("aten.full", "aten.full_like", "aten.new_full", "aten.scalar_tensor", "aten.fill.Scalar")
_NUMBERS = (bool, int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)


class PythonNumbers:
    """The numbers of a trace, in a `graph`.

    `read` gives the graph's form of what an FX node is given, `type_of` that of its result's type,
    and `scalars` are inputs that are plain numbers.
    """

    def __init__(
        self,
        graph: Graph,
        scalars: Mapping[fx.Node, Any],
        read: Callable[[Any], Any],
        type_of: Callable[[Any], Any],
    ) -> None:
        self._graph, self._scalars, self._read, self._type_of = graph, scalars, read, type_of
        self.fractions: dict[fx.Node, Value] = {}
        """Those that are known at run time only: tensors without dims."""

    def full(self, number: Any, dtype: torch.dtype, loc: Loc) -> Value:
        """A tensor without dims that holds a number, or what the expression of a size gives."""
        attrs = {"size": [], "fill_value": number, "dtype": dtype}
        return self._made("aten.full", [], attrs, dtype, loc)

    def item(self, node: fx.Node, source: Value, loc: Loc) -> None:
        """The fraction that a tensor of one element holds, if more than conditions need it."""
        if any(
            user.op == "output" or user.target in _ARITHMETIC or computes(user) or _is_held(user)
            for user in node.users
        ):
            attrs: dict[str, Any] = {"shape": []}
            made = self._made("aten.reshape", [source], attrs, source.dtype, loc, node.name)
            self.fractions[node] = made

    def arithmetic(self, node: fx.Node, loc: Loc) -> None:
        """What Python computes of fractions; what isn't known here is left to whoever reads it."""
        name = _COMPARISONS[node.target] if _is_held(node) else _ARITHMETIC.get(node.target)
        if name is None or not any(arg in self.fractions for arg in node.all_input_nodes):
            return
        numbers = [arg for arg in node.args if arg is not None]  # of round, the digits
        inputs = [self._as_tensor(arg, torch.float64, loc) for arg in numbers]
        dtype = torch.bool if _is_held(node) else torch.float64
        self.fractions[node] = self._made(name, inputs, {}, dtype, loc)

    def call(self, node: fx.Node, name: str, args: Sequence[Any], kwargs: Given, loc: Loc) -> Call:
        """The operator as it is in the graph, where numbers may stand for tensors."""
        definition = op_def(name)
        given = dict(zip((arg.name for arg in definition.args), args, strict=False)) | dict(kwargs)
        kinds = {arg.name: arg.kind for arg in definition.args}
        numbers = {key for key, value in given.items() if self._is_number(value)}
        if any(self._is_fraction(value) for value in given.values()):
            return self._of_fractions(node, definition, given, numbers, loc)
        numbers &= {key for key, kind in kinds.items() if kind == "tensor"}
        if not numbers:
            return name, definition, args, kwargs
        for other in _overloads(name):
            if _is_like(definition, other, dict.fromkeys(numbers, "attr")):
                return other.name, other, args, kwargs
        tensors = [self._read(given[arg.name]) for arg in definition.args if arg.name in given]
        dtypes = [value.dtype for value in tensors if isinstance(value, Value)]
        for key in sorted(numbers):
            value = self._read(given[key])
            is_fraction = isinstance(value, float) or getattr(value, "is_integer", True) is False
            like = torch.empty(1, dtype=dtypes[0] if dtypes else None)
            dtype = torch.result_type(like, 0.5 if is_fraction else 0)
            given[key] = self.full(value, dtype, loc)
        return name, definition, (), given

    def _of_fractions(
        self,
        node: fx.Node,
        definition: OpDef,
        given: dict[str, Any],
        numbers: Collection[str],
        loc: Loc,
    ) -> Call:
        """The overload that takes tensors for fractions, and for the numbers beside them."""
        result = node.meta["val"]
        result = result if isinstance(result, torch.Tensor) else result[0]  # of topk, the values
        dtype = self._dtype(result, given)
        fractions = [key for key, value in given.items() if self._is_fraction(value)]
        if definition.name in _FILLS:
            (value,) = (self._as_tensor(given[key], result.dtype, loc) for key in fractions)
            size = list(self._type_of(result).shape)
            return "aten.expand", op_def("aten.expand"), (value, size), {}
        if "alpha" in fractions:
            other, step = (self._as_tensor(given[key], dtype, loc) for key in ("other", "alpha"))
            shape = self._type_of(given["other"].meta["val"]).shape
            given["other"] = self._made(
                "aten.mul.Tensor", [other, step], {}, dtype, loc, shape=shape
            )
            del given["alpha"]
            fractions.remove("alpha")
        asked = dict.fromkeys(fractions, "tensor") | dict.fromkeys({*numbers} - {*fractions})
        asked |= {arg.name: None for arg in definition.args if given.get(arg.name) is None}
        fitting = (
            o for o in (definition, *_overloads(definition.name)) if _is_like(definition, o, asked)
        )
        found = next(fitting, None)
        if found is None:
            raise CaptureError(
                f"{definition.name} at {loc} takes a number that .item() reads at run time; keep "
                "it a tensor, or give a fixed number."
            )
        for arg in found.args:
            if arg.kind == "tensor" and arg.name in {*numbers, *fractions}:
                given[arg.name] = self._as_tensor(given[arg.name], dtype, loc)
        return found.name, found, (), given

    def _dtype(self, made: torch.Tensor, given: Mapping[str, Any]) -> torch.dtype:
        """The dtype that a fraction is rounded to before what is `made` is computed with it."""
        result = made.dtype
        if result is torch.bool:
            tensors = [v.meta["val"] for v in given.values() if isinstance(v, fx.Node)]
            likes = [torch.empty(1, dtype=t.dtype) for t in tensors if isinstance(t, torch.Tensor)]
            result = torch.result_type(likes[0], 0.5) if likes else torch.get_default_dtype()
        return result.to_real() if result.is_complex else result

    def _as_tensor(self, item: Any, dtype: torch.dtype, loc: Loc) -> Value:
        value = self._read(item)
        if not isinstance(value, Value):
            return self.full(value, dtype, loc)
        if value.dtype == dtype or item not in self.fractions:
            return value
        return self._made("aten._to_copy", [value], {"dtype": dtype}, dtype, loc)

    def _is_fraction(self, item: Any) -> bool:
        return isinstance(item, fx.Node) and item in self.fractions

    def _is_number(self, item: Any) -> bool:
        if isinstance(item, fx.Node):
            item = self._scalars.get(item, item.meta.get("val"))
        return isinstance(item, _NUMBERS)

    def _made(
        self,
        name: str,
        inputs: Sequence[Value],
        attrs: Mapping[str, Any],
        dtype: torch.dtype,
        loc: Loc,
        label: str | None = None,
        shape: Sequence[Any] = (),
    ) -> Value:
        types = [TensorType(dtype, tuple(shape))]
        names = None if label is None else [label]
        return self._graph.create(name, inputs, attrs, types=types, names=names, loc=loc).output


def computes(node: fx.Node) -> bool:
    """Whether a node is an operator that isn't only a demand on numbers."""
    return isinstance(node.target, torch._ops.OpOverload) and op_name(node.target) not in NO_VALUE


def _is_held(node: fx.Node) -> bool:
    """Whether a node is a comparison that becomes a tensor's value."""
    return node.target in _COMPARISONS and any(map(computes, node.users))


def _overloads(name: str) -> list[OpDef]:
    namespace, packet = name.split(".")[:2]
    return [
        op_def(f"{namespace}.{packet}" + ("" if overload == "default" else f".{overload}"))
        for overload in getattr(getattr(torch.ops, namespace), packet).overloads()
    ]


def _is_like(definition: OpDef, other: OpDef, kinds: Mapping[str, str | None]) -> bool:
    """Whether `other` takes the same arguments; these as what is said here, None as anything."""
    if [arg.name for arg in other.args] != [arg.name for arg in definition.args]:
        return False
    return all(
        (kind := kinds.get(arg.name, arg.kind)) is None or other_arg.kind == kind
        for arg, other_arg in zip(definition.args, other.args, strict=True)
    )
