"""Types by evaluation: an op is run on fake tensors whose sizes are symbolic.

`evaluate` is the only source of truth: an op needs no second description of its shapes. What an
evaluation said is remembered for the process, where nothing but its operands can have told it.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
import torch.utils._sympy.functions as torch_sympy
from sympy.logic.boolalg import Boolean
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.value_ranges import ValueRanges

from attngraph.errors import IRError
from attngraph.ir.conditions import Condition, ties, without_ties
from attngraph.ir.dims import Dim, DimInfo, as_dim, is_of_a_run, symbol, symbols_of
from attngraph.ir.graph import Value
from attngraph.ir.hashing import hashable
from attngraph.ir.open_slices import open_slices
from attngraph.ir.ops import OpDef, call
from attngraph.ir.settling import bounded, settled
from attngraph.ir.types import ScalarType, TensorType, Type

_SHARED: dict[Hashable, tuple[Type, ...]] = {}
_SHARED_MOST = 1 << 11
_GROWTH = 64  # of sizes, where the sample's are too small to tell
_LARGEST = _GROWTH**2


class TypeInference:
    """Infers output types over one set of named dims.

    The types hold where the `conditions` do. A call costs one fake evaluation, 1 to 80 ms, unless
    the same op was asked about before.
    """

    def __init__(
        self,
        dims: dict[str, DimInfo],
        conditions: Iterable[Condition] = (),
        *,
        scale: int = 1,
    ) -> None:
        self._dims, self._scale = dims, scale
        self._holding = conditions = tuple(conditions)
        self._from_two = frozenset(map(_from_two, conditions)) - {None}
        self._ties = ties(conditions)
        self._larger: set[sympy.Symbol] = set()
        self._sizes: dict[str, torch.SymInt] = {}
        self._names: dict[sympy.Symbol, sympy.Symbol] = {}
        self._found: set[str] = set()
        self._cache: dict[TensorType, torch.Tensor] = {}
        self._known: dict[Hashable, tuple[Type, ...]] = {}

    @functools.cached_property
    def _larger_sizes(self) -> TypeInference | None:
        """An inference over sizes larger than the sample's; None where those are large already."""
        scale = self._scale * _GROWTH
        return None if scale > _LARGEST else TypeInference(self._dims, self._holding, scale=scale)

    @functools.cached_property
    def _env(self) -> ShapeEnv:
        return ShapeEnv(duck_shape=False, specialize_zero_one=True)

    @functools.cached_property
    def _mode(self) -> FakeTensorMode:
        mode = FakeTensorMode(shape_env=self._env, allow_non_fake_inputs=True)
        # Storing a result under symbolic sizes costs twice its evaluation; `_known` does that job.
        mode.cache_enabled = False
        return mode

    def infer(
        self, definition: OpDef, inputs: Sequence[Value | None], attrs: Mapping[str, Any]
    ) -> tuple[Type, ...]:
        """The output types of an op. Raises IRError where its evaluation rejects the inputs."""
        types = self._evaluated(definition, inputs, attrs)
        if not self._ties:
            return types
        return tuple(
            TensorType(each.dtype, without_ties(each.shape, self._ties))
            if isinstance(each, TensorType)
            else each
            for each in types
        )

    def _evaluated(
        self, definition: OpDef, inputs: Sequence[Value | None], attrs: Mapping[str, Any]
    ) -> tuple[Type, ...]:
        key = (definition.name, tuple(v and v.type for v in inputs), hashable(attrs))
        if key in self._known:
            return self._known[key]
        shared = self._shared_key(definition, inputs, attrs, key)
        if shared in _SHARED:
            return _SHARED[shared]
        if shape := _asserted(definition, inputs, attrs):
            return (shape,)
        slices = open_slices(larger=self._larger)
        assumed = len(self._env.guards)
        try:
            with enable_python_dispatcher(), self._mode, torch.no_grad(), slices:
                concrete = {name: self._materialize(value) for name, value in attrs.items()}
                fakes = [None if value is None else self._fake(value.type) for value in inputs]
                results = call(definition, fakes, concrete)
        except IRError:
            raise
        except Exception as error:
            shown = ", ".join("none" if value is None else repr(value) for value in inputs)
            raise IRError(
                f"{definition.name}({shown}) is rejected by its evaluation: {error}"
            ) from error
        known = len(self._names)
        types = tuple(self._type(result) for result in results)
        if len(self._names) > known:
            # A fake tensor remembers its own nonzero() and item(): another value needs another one.
            for value in inputs:
                if value is not None and isinstance(value.type, TensorType):
                    self._cache.pop(value.type, None)
        elif definition.outputs is not None and self._assumes_small(assumed):
            types = self._known[key] = self._at_larger_sizes(definition, inputs, attrs) or types
        else:
            self._known[key] = types
            if shared is not None and not self._guarded:
                if len(_SHARED) >= _SHARED_MOST:
                    for oldest in [*_SHARED][: _SHARED_MOST // 4]:
                        _SHARED.pop(oldest, None)
                _SHARED[shared] = types
        return types

    def _assumes_small(self, assumed: int) -> bool:
        """Whether the last evaluation, after so many assumptions, has made one that larger sizes
        don't meet.

        At a sample of 7 tokens, blocks of 32 are one: one block broadcasts, and a batch of blocks
        is as long as the batch.
        """
        for guard in self._env.guards[assumed:]:
            expr = guard.expr
            is_one = isinstance(expr, sympy.Rel) and any(side in (1, 2) for side in expr.args)
            is_below_two = is_one and expr.has(torch_sympy.FloorDiv)
            if not isinstance(expr, sympy.Eq) and not is_below_two:
                continue  # where a slice ends, only the sample tells
            known = {free: self._names.get(free) for free in expr.free_symbols}
            infos = {f: self._dims[str(name)] for f, name in known.items() if name is not None}
            large = {f: sympy.Integer(self._hint(info, _LARGEST)) for f, info in infos.items()}
            if len(large) == len(known) and expr.xreplace(large) == sympy.false:
                return True
        return False

    def _at_larger_sizes(
        self, definition: OpDef, inputs: Sequence[Value | None], attrs: Mapping[str, Any]
    ) -> tuple[Type, ...] | None:
        """The types where no size that follows from others is small; None where sizes go together
        in the sample alone. What was assumed of them is forgotten.
        """
        if self._found or (larger := self._larger_sizes) is None:
            return None
        for kept in (self._larger, self._sizes, self._names, self._cache):
            kept.clear()
        del self._env, self._mode
        try:
            return larger._evaluated(definition, inputs, attrs)
        except IRError:
            return None

    def _hint(self, info: DimInfo, scale: int) -> int:
        hint = max(info.hint, 2) * scale
        return hint if info.high is None else max(min(hint, info.high), info.hint, 2)

    @property
    def _guarded(self) -> bool:
        """An evaluation has assumed something of the sizes, which later ones may build on."""
        return bool(self._env.guards or self._env.replacements)

    def _shared_key(
        self,
        definition: OpDef,
        inputs: Sequence[Value | None],
        attrs: Mapping[str, Any],
        key: Hashable,
    ) -> Hashable | None:
        """All that a result depends on; None if that is also what was evaluated here before."""
        names = symbols_of(list(attrs.values()))
        for value in inputs:
            if value is not None:
                names |= value.type.symbols
        if names and (self._guarded or names & self._found or not names <= self._dims.keys()):
            return None
        infos = tuple((name, self._dims[name]) for name in sorted(names))
        larger = names & self._from_two
        return key, definition.function, infos, larger, torch.get_default_dtype()

    def _size(self, name: str) -> torch.SymInt:
        if name not in self._sizes:
            info = self._dims.setdefault(name, DimInfo())
            hint = self._hint(info, self._scale)
            source = ConstantSource(f"__{name}")
            created = self._env.create_symbol(
                hint, source, DimDynamic.DYNAMIC, do_not_specialize_zero_one=False
            )
            if not isinstance(created, sympy.Symbol):
                raise IRError(f"torch would not make a symbol for dim {name}.")
            high = sympy.oo if info.high is None else info.high
            if name in self._from_two:
                self._larger.add(created)
            self._env.var_to_range[created] = ValueRanges(min(max(info.low, 2), hint), high)
            size = self._env.create_symintnode(created, hint=hint, source=source)
            if not isinstance(size, torch.SymInt):
                raise IRError(f"torch would not make a symbol for dim {name}.")
            self._sizes[name] = size
            self._names[created] = symbol(name)
        return self._sizes[name]

    def _materialize(self, value: Any) -> Any:
        if isinstance(value, sympy.Basic):
            replaced = value.xreplace({s: self._size(s.name).node.expr for s in value.free_symbols})
            if value.is_integer:
                return self._env.create_symintnode(replaced, hint=None)
            if isinstance(replaced, Boolean):
                return self._env.create_symboolnode(replaced)
            return self._env.create_symfloatnode(replaced, hint=None)
        if isinstance(value, (list, tuple)):
            return type(value)(self._materialize(item) for item in value)
        return value

    def _fake(self, type: Type) -> Any:
        if isinstance(type, ScalarType):
            if type.name is None:
                raise IRError(f"An op can't read a runtime {type.kind} as a tensor.")
            return self._size(type.name)
        if type not in self._cache:
            shape = [self._materialize(dim) for dim in type.shape]
            self._cache[type] = torch.empty(shape, dtype=type.dtype)
        return self._cache[type]

    def _type(self, result: Any) -> Type:
        if isinstance(result, torch.Tensor):
            return TensorType(result.dtype, tuple(self._dim(size) for size in result.shape))
        if isinstance(result, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            kind = type(result).__name__.removeprefix("Sym").lower()
            dim = self._dim(result)
            return ScalarType(kind, dim.name if isinstance(dim, sympy.Symbol) else None)
        return ScalarType(type(result).__name__)

    def _dim(self, size: Any) -> Dim:
        if isinstance(size, int):
            return size
        expr = size.node.expr
        for unknown in expr.free_symbols - self._names.keys():
            name = unknown.name
            while name in self._dims:
                name += "_"
            self._dims[name] = DimInfo(low=0)
            self._names[unknown] = symbol(name)
            self._sizes[name] = size
            self._found.add(name)
        return as_dim(settled(expr.xreplace(self._names), bounded(self._dims, self._holding)))


def _asserted(
    definition: OpDef, inputs: Sequence[Value | None], attrs: Mapping[str, Any]
) -> TensorType | None:
    """The type that a reshape says itself, where only a run tells whether its elements are as many.

    Rows that are cut by counts of a tensor are together all rows, and no size says so.
    """
    given = inputs[0].type if inputs and inputs[0] is not None else None
    if definition.name != "aten.reshape" or not isinstance(given, TensorType):
        return None
    shape = attrs.get("shape", ())
    if -1 in shape or not any(map(is_of_a_run, given.symbols)):
        return None
    return TensorType(given.dtype, tuple(shape))


def _from_two(condition: Condition) -> str | None:
    """The dim of which a condition says no more than that it isn't 1."""
    names = symbols_of(condition)
    if len(names) != 1:
        return None
    (name,) = names
    return name if condition in (sympy.Ge(symbol(name), 2), sympy.Ne(symbol(name), 1)) else None
