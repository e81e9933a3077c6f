"""Runtime sizes: dims of the graph's inputs, arithmetic on them, and reshapes that avoid both."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import sympy
import torch
from sympy.logic.boolalg import Boolean

from attngraph.errors import LoweringError
from attngraph.export.lowering.emission.emitter import Emitter
from attngraph.ir import ScalarType, Value
from attngraph.ir.dims import (
    Dim,
    DimInfo,
    as_dim,
    at_least,
    format_dim,
    same,
    symbol,
    symbols_of,
    tells,
)

INT64_MAX = 2**63 - 1
_RELATIONS = {
    sympy.StrictGreaterThan: "Greater",
    sympy.GreaterThan: "GreaterOrEqual",
    sympy.StrictLessThan: "Less",
    sympy.LessThan: "LessOrEqual",
    sympy.Equality: "Equal",
}
_ROUNDINGS = {
    "TruncToInt": "",  # a cast to an integer does it
    "FloorToInt": "Floor",
    "floor": "Floor",
    "CeilToInt": "Ceil",
    "ceiling": "Ceil",
    "RoundToInt": "Round",  # halves to even, as Python does
}


class Sizes:
    """Emits sizes as 1-D i64 tensors of one element, each expression once per graph.

    A symbol is read from the first value in whose shape it stands alone: a graph input wherever
    there is one, so that no size waits for a computation. In a loop's body, one that no value of
    the body has is read in the graph around it, of the `outer` sizes.
    """

    def __init__(
        self, emitter: Emitter, dims: Mapping[str, DimInfo], outer: Sizes | None = None
    ) -> None:
        self._emitter = emitter
        self._dims = dims
        self._outer = outer
        self._zeros: dict[Dim, bool] = {}
        self._sources: dict[str, tuple[ir.Value, int, Dim] | ir.Value] = {}

    def learn(self, value: Value, result: ir.Value) -> None:
        """Remembers which symbols can be read from a value's shape, or are its value."""
        if isinstance(value.type, ScalarType):
            if value.type.name is not None:
                self._sources.setdefault(value.type.name, result)
            return
        for axis, dim in enumerate(value.type.shape):
            names = symbols_of(dim)
            if len(names) != 1 or not tells(dim):
                continue
            name = next(iter(names))
            known = self._sources.get(name)
            alone = isinstance(dim, sympy.Symbol)
            if known is None or (alone and isinstance(known, tuple) and known[2] != dim):
                self._sources[name] = (result, axis, dim)

    def define(self, name: str, size: ir.Value) -> None:
        """Has a symbol read from this integer value."""
        self._sources[name] = size

    def vector(self, dims: Sequence[Any]) -> ir.Value:
        """Sizes as a 1-D i64 tensor."""
        dims = [as_dim(dim) for dim in dims]
        if all(isinstance(dim, int) for dim in dims):
            return self._emitter.constant(list(dims), torch.int64, name="shape")
        key = ("sizes", tuple(dims))
        if key not in self._emitter.cache:
            pieces: list[ir.Value] = []
            static: list[int] = []
            for dim in [*dims, None]:
                if isinstance(dim, int):
                    static.append(dim)
                    continue
                if static:
                    pieces.append(self._emitter.constant(static, torch.int64, name="shape"))
                    static = []
                if dim is not None:
                    pieces.append(self._size(dim))
            joined = pieces[0] if len(pieces) == 1 else self._emitter.op("Concat", *pieces, axis=0)
            self._emitter.cache[key] = joined
        result: ir.Value = self._emitter.cache[key]
        return result

    def scalar(self, expr: Any) -> ir.Value:
        """A size as a 0-D i64 tensor."""
        dim = as_dim(expr)
        if isinstance(dim, int):
            return self._emitter.constant(dim, torch.int64)
        return self._as_scalar(("dim", dim), self._size(dim))

    def number(self, value: Any, dtype: torch.dtype) -> ir.Value:
        """A scalar of the dtype; expressions with fractions are computed in double."""
        if not isinstance(value, sympy.Basic):
            return self._emitter.constant(value, dtype)
        if value.is_number:
            exact = int(value) if value.is_Integer else float(value)
            return self._emitter.constant(exact, dtype)
        key = ("number", value, dtype)
        if key not in self._emitter.cache:
            whole = isinstance(value, Boolean) or value.is_integer
            size = self._size(value) if whole else self._double(value)
            scalar = self._as_scalar(("scalar", value), size)
            self._emitter.cache[key] = self._emitter.cast(scalar, dtype)
        result: ir.Value = self._emitter.cache[key]
        return result

    def reshape(self, value: ir.Value, old: Sequence[Dim], new: Sequence[Dim]) -> ir.Value:
        """Reshape with 0 for kept dims and -1 for one unknown; the value itself if nothing changes.

        Neither trick is used where a dim may be zero: those that only a run can tell, and seq // 4.
        """
        if len(old) == len(new) and all(map(same, old, new)):
            return value
        context = self._emitter
        if 0 in new or 0 in old:
            return context.op("Reshape", value, self.vector(new), allowzero=1)
        wanted: list[Dim] = list(new)
        computed = []
        for axis, dim in enumerate(new):
            if isinstance(dim, int):
                continue
            if axis < len(old) and same(old[axis], dim):
                wanted[axis] = 0
            else:
                computed.append(axis)
        may_be_zero = [new[axis] for axis in computed if self._may_be_zero(new[axis])]
        if not all(at_least(dim, 1, self._dims) for dim in may_be_zero):
            # a computed 0 would be read as a kept dim
            return context.op("Reshape", value, self.vector(new), allowzero=1)
        if computed and not any(self._may_be_zero(dim) for dim in new):
            hardest = max(computed, key=lambda axis: (sympy.count_ops(new[axis]), -axis))
            wanted[hardest] = -1
        return context.op("Reshape", value, self.vector(wanted))

    def expand(self, value: ir.Value, old: Sequence[Dim], new: Sequence[Dim]) -> ir.Value:
        """Expand with 1 for every dim that stays as it is."""
        missing = len(new) - len(old)
        padded = [1] * missing + list(old)
        if missing == 0 and all(map(same, old, new)):
            return value
        kept = [
            1 if same(before, after) else after for before, after in zip(padded, new, strict=True)
        ]
        return self._emitter.op("Expand", value, self.vector(kept))

    def _may_be_zero(self, dim: Dim) -> bool:
        if dim not in self._zeros:
            infos = self._dims
            named = any(name in infos and infos[name].low <= 0 for name in symbols_of(dim))
            self._zeros[dim] = named or not at_least(dim, 1, infos)
        return self._zeros[dim]

    def _as_scalar(self, key: tuple[Any, ...], size: ir.Value) -> ir.Value:
        cache = self._emitter.cache
        if key not in cache:
            cache[key] = self._emitter.op("Squeeze", size, self._emitter.constant([0]))
        result: ir.Value = cache[key]
        return result

    def _size(self, expr: Any) -> ir.Value:
        """An integer expression as a 1-D tensor of one element."""
        expr = sympy.sympify(expr)
        if expr.is_Integer:
            return self._emitter.constant([int(expr)], torch.int64)
        key = ("size", expr)
        if key not in self._emitter.cache:
            self._emitter.cache[key] = self._emit(expr)
        result: ir.Value = self._emitter.cache[key]
        return result

    def _emit(self, expr: sympy.Expr) -> ir.Value:
        op, kind = self._emitter.op, type(expr).__name__
        if isinstance(expr, sympy.Symbol):
            return self._symbol(expr)
        if isinstance(expr, (sympy.Add, sympy.Mul)):
            return self._fold("Add" if isinstance(expr, sympy.Add) else "Mul", expr.args)
        if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and expr.exp.is_positive:
            return self._fold("Mul", [expr.base] * int(expr.exp))
        if kind in ("Max", "Min"):
            return op(kind, *map(self._size, expr.args))
        if kind in ("FloorDiv", "CleanDiv"):
            return self._floor_divide(*expr.args)
        if kind in ("Mod", "PythonMod"):
            return op("Mod", self._size(expr.args[0]), self._size(expr.args[1]))
        if kind == "Abs":
            return op("Abs", self._size(expr.args[0]))
        if kind in _ROUNDINGS:
            real = self._double(expr.args[0])
            rounding = _ROUNDINGS[kind]
            return self._emitter.cast(op(rounding, real) if rounding else real, torch.int64)
        if isinstance(expr, Boolean):
            return self._emitter.cast(self._holds(expr), torch.int64)
        raise LoweringError(f"The size {format_dim(expr)} has no ONNX form; reshape without it.")

    def _holds(self, expr: Any) -> ir.Value:
        """Whether a condition on sizes holds, (1,) bool."""
        op = self._emitter.op
        if isinstance(expr, (sympy.And, sympy.Or)):
            each = [self._holds(part) for part in sorted(expr.args, key=str)]
            return functools.reduce(functools.partial(op, type(expr).__name__), each)
        if isinstance(expr, sympy.Not):
            return op("Not", self._holds(expr.args[0]))
        if isinstance(expr, sympy.Unequality):
            return op("Not", op("Equal", *map(self._size, expr.args)))
        return op(_RELATIONS[type(expr)], *map(self._size, expr.args))

    def _fold(self, op_type: str, terms: Sequence[Any]) -> ir.Value:
        result = self._size(terms[-1])
        for term in reversed(terms[:-1]):
            result = self._emitter.op(op_type, result, self._size(term))
        return result

    def _floor_divide(self, numerator: Any, denominator: Any) -> ir.Value:
        a, b = self._size(numerator), self._size(denominator)
        if not (numerator.is_nonnegative and denominator.is_positive):
            a = self._emitter.op("Sub", a, self._emitter.op("Mod", a, b))  # ONNX truncates
        return self._emitter.op("Div", a, b)

    def _double(self, expr: Any) -> ir.Value:
        """A real expression as a 1-D double tensor of one element."""
        op, kind = self._emitter.op, type(expr).__name__
        if expr.is_number:
            return self._emitter.constant([float(expr)], torch.float64)
        if expr.is_integer:
            return self._emitter.cast(self._size(expr), torch.float64)
        if kind in ("FloatTrueDiv", "IntTrueDiv"):
            return op("Div", self._double(expr.args[0]), self._double(expr.args[1]))
        if kind == "ToFloat":
            return self._double(expr.args[0])
        if kind == "OpaqueUnaryFn_sqrt":
            return op("Sqrt", self._double(expr.args[0]))
        if kind in ("Max", "Min"):
            return op(kind, *map(self._double, expr.args))
        if kind in ("Add", "Mul", "FloatPow", "Pow", "PowByNatural"):
            onnx_op = kind if kind in ("Add", "Mul") else "Pow"
            result = self._double(expr.args[0])
            for term in expr.args[1:]:
                result = op(onnx_op, result, self._double(term))
            return result
        raise LoweringError(f"The number {format_dim(expr)} has no ONNX form.")

    def _symbol(self, expr: sympy.Symbol) -> ir.Value:
        source = self._sources.get(expr.name)
        op = self._emitter.op
        if source is None and self._outer is not None:
            return self._outer._symbol(expr)
        if source is None:
            raise LoweringError(f"The size of dim {expr.name} can't be read from any value.")
        if isinstance(source, ir.Value):
            return op("Reshape", source, self._emitter.constant([1]))
        value, axis, dim = source
        read = op("Shape", value, start=axis, end=axis + 1)
        if isinstance(dim, sympy.Symbol):
            return read
        unknown = sympy.Symbol("_read", integer=True, positive=True)
        solutions = sympy.solve(sympy.sympify(dim) - unknown, symbol(expr.name))
        if len(solutions) != 1:
            raise LoweringError(f"Dim {expr.name} can't be computed from a size of {dim}.")
        numerator, denominator = sympy.fraction(sympy.together(solutions[0]))
        self._emitter.cache[("size", unknown)] = read
        whole = self._size(sympy.expand(numerator))
        result = whole if denominator == 1 else op("Div", whole, self._size(denominator))
        del self._emitter.cache[("size", unknown)]
        return result
