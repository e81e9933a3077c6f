"""Puts a module into inference mode, and restores afterwards what it was."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    EllipsisType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any
from unittest import mock

import torch
from torch.nn.attention import bias
from torch.nn.attention.bias import CausalVariant
from torch.utils import _pytree as pytree

INERT = (
    Enum,
    slice,
    range,
    EllipsisType,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    type,
    complex,
    bytes,
    PurePath,
    FunctionType,
    MethodType,
    BuiltinFunctionType,
    ModuleType,
)
"""Holds no tensor that a graph computes, and is kept as it is: code may ask for it by `is`."""
_NAMED = (Enum, torch.dtype, torch.device, torch.layout, torch.memory_format, type, bytes, PurePath)

_DEEPEST = 4
_MOST_THINGS = 1 << 16
MOST_ELEMENTS = 1 << 20
"""Elements of the largest tensor in an attribute whose content is put back."""
_CONTAINERS = (dict, list, set, deque)
_FUNCTIONS = (type, FunctionType, MethodType, BuiltinFunctionType, functools.partial)
_HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks")
_STANDARD = frozenset([*vars(torch.nn.Module()), "_is_full_backward_hook"])


@contextmanager
def inference(module: torch.nn.Module) -> Iterator[None]:
    """Eval mode, no gradients, and torch.nn's fused fast path off: it hides attention.

    Afterwards every part has the attributes it had. Otherwise what a model caches as it runs, such
    as a table for its next call, would keep the form that a trace or a float64 run gave it.
    """
    # By attribute: a program's module has no eval().
    modes = [(part, part.training) for part in module.modules()]
    with restored(module), AS_WRITTEN:
        try:
            for part, _ in modes:
                part.training = False
            with torch.no_grad():
                yield
        finally:
            for part, mode in modes:
                part.training = mode


class _AsWritten:
    """While any thread is inside, attention is computed by the operators that it is written in.

    torch.nn's fused fast path is off. flex_attention is computed as it is defined, and is not one
    operator of which a trace, or a run in float64, sees nothing. `causal_lower_right` and its like
    are masks, and not of a class of tensors that neither can make. These are switches for all
    threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                enabled = torch.backends.mha.get_fastpath_enabled()
                self._before.callback(torch.backends.mha.set_fastpath_enabled, enabled)
                torch.backends.mha.set_fastpath_enabled(False)
                self._before.enter_context(_flex_attention_as_defined())
                self._before.enter_context(mock.patch.object(bias, "CausalBias", _causal_bias))
            self._inside += 1

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._before.close()


def _causal_bias(variant: CausalVariant, queries: int, keys: int) -> torch.Tensor:
    """(S, T), true where a key is seen."""
    first = keys - queries if variant is CausalVariant.LOWER_RIGHT else 0
    return torch.ones(queries, keys, dtype=torch.bool).tril(first)


@contextmanager
def _flex_attention_as_defined() -> Iterator[None]:
    """Calls of the operator run `_flex_attention`, and aren't compiled first.

    These names are torch's own (2.11 to 2.15 have them). Under a torch that has others the operator
    stays one, which is refused where a model uses it.

    What Dynamo keeps of a caller is forgotten afterwards. Its guards don't see that the operator
    was another function: `torch.compile(flex_attention)` would fail in its next call.
    """
    # Within its own surroundings for a compile a trace would not see what is called.
    apart = mock.Mock(side_effect=contextlib.nullcontext)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, AttributeError):
            flex = importlib.import_module("torch.nn.attention.flex_attention")
            operators = importlib.import_module("torch._higher_order_ops.flex_attention")
            patches = (
                mock.patch.object(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
                mock.patch.object(flex, "setup_compilation_env", apart),
                mock.patch.object(operators.FlexAttentionHOP, "__call__", _flex_attention),
            )
            for patch in patches:
                stack.enter_context(patch)
        yield
    if apart.called:
        torch._dynamo.reset()


def _flex_attention(
    operator: object,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Any,
    block_mask: Any,
    scale: float,
    kernel_options: object,
    of_score: tuple[Any, ...] = (),
    of_mask: tuple[Any, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output, and of each row the logarithm of the sum and the largest score, in base 2.

    query (B, H, S, D), key and value (B or 1, H / groups, T, D); scores (B, H, S, T) are in
    float32, or in float64 where the query is. A row without a visible key gives zeros. Of a
    BlockMask the function alone is read, as in eager: the blocks are what a kernel may leave out.
    """
    heads, batch = query.shape[1] // key.shape[1], query.shape[0]
    if heads != 1:
        key, value = key.repeat_interleave(heads, 1), value.repeat_interleave(heads, 1)
    if key.shape[0] != batch:
        key, value = (x.expand(batch, -1, -1, -1) for x in (key, value))
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    scores = query.to(wide) @ key.to(wide).transpose(-2, -1) * scale
    places = [torch.arange(size, device=query.device) for size in scores.shape]
    indexing = importlib.import_module("torch._dynamo._trace_wrapped_higher_order_op")
    with indexing.TransformGetItemToIndex():  # an index of one element is a tensor, not a number
        scored = _over_all(score_mod, (0,), len(of_score))(scores, *places, *of_score)
        visible = _over_all(block_mask[-1], (), len(of_mask))(*places, *of_mask)
    scores = torch.where(visible, scored.to(wide), -math.inf)
    output = torch._safe_softmax(scores, -1).to(query.dtype) @ value
    return output, scores.logsumexp(-1) / math.log(2), scores.amax(-1) / math.log(2)


def _over_all(function: Any, before: tuple[int, ...], others: int) -> Any:
    """A function of one score's four indices, over all of them; `others` are the same for each.

    Mapped from the last axis to the first, each is the first of those that are left.
    """
    for axis in (3, 2, 1, 0):
        indices = [0 if at == axis else None for at in range(4)]
        function = torch.vmap(function, in_dims=(*before, *indices, *(None,) * others))
    return function


AS_WRITTEN = _AsWritten()


@contextmanager
def restored(module: torch.nn.Module) -> Iterator[None]:
    """Afterwards the attributes and buffers of all parts, and the lists, dicts and tensors in them,
    are as they were. Tensors above `MOST_ELEMENTS` keep what was written into them.
    """
    holders = [
        (holder, holder.held.copy()) for holder in (*holders_of(module), *_registries(module))
    ]
    held = [value for holder in holders_of(module) for _, value in holder.items()]
    tensors = [
        (value, value._version, value.is_leaf, value.detach().clone())
        for value in (*module.buffers(), *held)
        if isinstance(value, torch.Tensor)
        and value.numel() <= MOST_ELEMENTS
        and not value.is_inference()
    ]
    try:
        yield
    finally:
        for holder, before in holders:
            holder.restore(before)
        with torch.no_grad():
            for tensor, version, is_leaf, content in tensors:
                if tensor._version != version:
                    tensor.copy_(content)
                if is_leaf and not tensor.is_leaf and not tensor._is_view():
                    tensor.detach_()


def is_size(value: Any) -> bool:
    """Whether it is a torch.Size, of which pytree would make a tuple."""
    return isinstance(value, torch.Size)


def is_named(leaf: Any) -> bool:
    """Whether an output is one of such as Enums and dtypes, in which no size and no tensor is."""
    return isinstance(leaf, _NAMED) and not isinstance(leaf, (int, str))


def named_in(spec: pytree.TreeSpec) -> Iterator[Any]:
    """Such as Enums in the attributes of the objects that an output is made of."""
    rest = spec.context[-1] if isinstance(spec.context, list) and spec.context else None
    if isinstance(rest, dict):
        yield from (value for value in rest.values() if is_named(value))
    for child in spec.children():
        yield from named_in(child)


def each_leaf(of: Callable[[Any], Any], inputs: Any) -> Any:
    """The inputs of a call, nested as they are, each leaf as `of` makes it."""
    return pytree.tree_map(of, inputs, is_leaf=is_size)


@dataclass(frozen=True)
class Holder:
    """A namespace of attributes, of a module or of an object that it has, or a container in one."""

    name: str
    held: Any
    of_attributes: bool

    def items(self) -> list[tuple[Any, Any]]:
        """Its items, by key or position, without those that every torch.nn.Module has."""
        if isinstance(self.held, dict):
            return [pair for pair in self.held.items() if pair[0] not in _STANDARD]
        return list(enumerate(self.held))

    def path(self, key: Any) -> str:
        """The name of an item, such as `layers.0.cache['key']`."""
        if not self.of_attributes:
            return f"{self.name}[{key!r}]"
        return f"{self.name}.{key}" if self.name else str(key)

    def restore(self, before: Any) -> None:
        """Puts back the items that it had."""
        if isinstance(self.held, dict):
            # Only what changed, and not by the methods of a mapping that refuses to be written to.
            plain: Any = OrderedDict if isinstance(self.held, OrderedDict) else dict
            for name in self.held.keys() - before.keys():
                plain.__delitem__(self.held, name)
            for name, value in before.items():
                if name not in self.held or self.held[name] is not value:
                    plain.__setitem__(self.held, name, value)
        elif isinstance(self.held, list):
            self.held[:] = before
        else:
            self.held.clear()
            (self.held.extend if isinstance(self.held, deque) else self.held.update)(before)


def holders_of(module: torch.nn.Module) -> Iterator[Holder]:
    """The attributes of all parts, and the containers and objects among them, a few levels deep.

    A scripted module holds its own in C++.
    """
    seen: set[int] = set()

    def visit(name: str, value: Any, depth: int) -> Iterator[Holder]:
        if id(value) in seen or len(seen) > _MOST_THINGS or depth > _DEEPEST:
            return
        if isinstance(value, _CONTAINERS):
            found = Holder(name, value, False)
        elif _is_object(value):
            found = Holder(name, vars(value), True)
        else:
            return
        seen.add(id(value))
        yield found
        for key, item in found.items():
            yield from visit(found.path(key), item, depth + 1)

    for path, part in module.named_modules():
        if not isinstance(part, torch.jit.ScriptModule):
            own = Holder(path, vars(part), True)
            yield own
            for key, value in own.items():
                yield from visit(own.path(key), value, 0)


def _registries(module: torch.nn.Module) -> Iterator[Holder]:
    """The dicts in which modules keep parameters, buffers, submodules and hooks.

    A hook that a run installs goes with the attribute that says it is there: else the next run
    installs it again, and what it collects, as transformers does hidden states, comes twice.
    """
    for path, part in module.named_modules():
        if not isinstance(part, torch.jit.ScriptModule):
            for name in ("_parameters", "_buffers", "_modules", *_HOOKS):
                yield Holder(path, vars(part)[name], False)


def _is_object(value: Any) -> bool:
    """Whether it is an object of the model or of a library, whose attributes may be state."""
    return (
        isinstance(getattr(value, "__dict__", None), dict)
        and not isinstance(value, (torch.nn.Module, torch.Tensor, *_FUNCTIONS))
        and not type(value).__module__.startswith(("torch", "builtins"))
    )
