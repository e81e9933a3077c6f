"""What the caller asked of `dynamic_shapes`, one entry per requested dim, in the inputs' order."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import Dim
from torch.export.dynamic_shapes import _combine_args, _DimHint, _DimHintType, _tree_map_with_path
from torch.utils import _pytree as pytree

from attngraph.errors import CaptureError, UsageError


@dataclass(frozen=True)
class Request:
    """One axis of one input that the caller wants dynamic.

    `leaf` counts the flattened inputs, tensors or not. `name` is the Dim's, None for Dim.AUTO and
    the like. `root` is the name of the dim it is derived from (`2 * half`), else `name`.
    """

    input: str
    leaf: int
    axis: int
    size: int
    name: str | None
    root: str | None
    low: int | None
    high: int | None

    def __str__(self) -> str:
        dim = f" (dim {self.name!r})" if self.name else ""
        return f"input {self.input}'s axis {self.axis}{dim}"


def combine(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The inputs by parameter name, in the signature's order; UsageError if they don't fit."""
    try:
        return dict(_combine_args(module, args, dict(kwargs)))
    except TypeError as error:
        raise UsageError(
            f"The inputs don't fit {type(module).__name__}.forward: {error}."
        ) from error


def named_dims(shapes: Any) -> Any:
    """`dynamic_shapes` with a Dim in place of each string, as `torch.onnx.export` takes them.

    Raises UsageError for a string that is no identifier: it would be the name of an ONNX dim.
    """

    def dim(shape: Any) -> Any:
        if not isinstance(shape, str):
            return shape
        if not shape.isidentifier():
            raise UsageError(
                f"dynamic_shapes has the dim {shape!r}; a dim's name is an identifier, "
                'such as "batch".'
            )
        return Dim(shape)

    return pytree.tree_map(dim, shapes)


def nested_shapes(combined: Mapping[str, Any], module: torch.nn.Module, shapes: Any) -> Any:
    """`dynamic_shapes` by position as torch.export takes them: those of `*args` are one tuple.

    A model that passes on what it is given (`forward(*args, **kwargs)`) has inputs all the same.
    """
    kinds = [parameter.kind for parameter in inspect.signature(module.forward).parameters.values()]
    if not isinstance(shapes, (tuple, list)) or inspect.Parameter.VAR_POSITIONAL not in kinds:
        return shapes
    at = kinds.index(inspect.Parameter.VAR_POSITIONAL)
    values = list(combined.values())
    given = values[at] if at < len(values) else ()
    if not isinstance(given, tuple) or len(shapes) != at + len(given):
        return shapes
    if len(given) == 1 and isinstance(shapes[at], tuple) and not any(map(_is_dim, shapes[at])):
        return shapes
    return (*shapes[:at], tuple(shapes[at:]))


def _is_dim(shape: Any) -> bool:
    return isinstance(shape, (int, Dim, _DimHint))


def requested_dims(combined: Mapping[str, Any], dynamic_shapes: Any) -> tuple[Request, ...]:
    """Every dim that is asked to be dynamic; ints, None and Dim.STATIC are not.

    Raises UsageError where the shapes don't match the inputs, or the sample's sizes the Dims;
    CaptureError for a sample size below two: torch specialises 0 and 1.
    """
    if not dynamic_shapes:
        return ()
    requests = tuple(_requests(combined, dynamic_shapes))
    for request in requests:
        if request.size < 2:
            raise CaptureError(
                f"The sample of {request} has size {request.size}, which torch.export takes for a "
                "constant; give a sample of size 2 or more."
            )
        low, high = request.low or 0, request.high
        if request.name and (request.size < low or (high is not None and request.size > high)):
            ends = f"{low} to {high}" if high is not None else f"{low} on"
            raise UsageError(
                f"The sample of {request} has size {request.size}, and the dim goes from {ends}."
            )
    by_name: dict[str, Request] = {}
    for request in requests:
        first = by_name.setdefault(request.name or "", request)
        if request.name and request.size != first.size:
            raise UsageError(
                f"The sample of {first} has size {first.size}, and that of {request} has "
                f"{request.size}: two sizes have two names."
            )
    return requests


def _requests(combined: Mapping[str, Any], dynamic_shapes: Any) -> Iterator[Request]:
    leaf = 0
    for position, (name, value) in enumerate(combined.items()):
        shapes = _shapes_of(name, position, len(combined), dynamic_shapes)
        count = len(pytree.tree_leaves(value))
        if shapes is not None:
            found: list[tuple[int, Any, Any]] = []

            def visit(
                path: Any, tensor: Any, shape: Any, found: list[Any] = found, start: int = leaf
            ) -> None:
                found.append((start + len(found), tensor, shape))

            try:
                _tree_map_with_path(visit, value, shapes, tree_name=name)
            except Exception as error:
                reason = str(error).strip().splitlines() or [type(error).__name__]
                raise UsageError(
                    f"dynamic_shapes doesn't match input {name}: {reason[0]}"
                ) from error
            for index, tensor, shape in found:
                shown = name if count == 1 else f"{name}[{index - leaf}]"
                if isinstance(tensor, torch.Tensor):
                    yield from _of_tensor(shown, index, tensor, shape)
                elif isinstance(tensor, (int, float)) and _is_dynamic(shape):
                    raise dynamic_number(shown, "export the module")
        leaf += count


def _shapes_of(name: str, position: int, count: int, dynamic_shapes: Any) -> Any:
    if isinstance(dynamic_shapes, Mapping):
        unknown = [key for key in dynamic_shapes if not isinstance(key, str)]
        if unknown:
            raise UsageError(
                f"dynamic_shapes has the key {unknown[0]!r}; its keys are parameter names."
            )
        return dynamic_shapes.get(name)
    if len(dynamic_shapes) != count:
        raise UsageError(
            f"dynamic_shapes has {len(dynamic_shapes)} entries for {count} inputs; give one each "
            "(None for a static one), or a dict by parameter name."
        )
    return dynamic_shapes[position]


def _of_tensor(name: str, leaf: int, tensor: torch.Tensor, shape: Any) -> Iterator[Request]:
    if not shape:
        return
    axes = shape.items() if isinstance(shape, Mapping) else enumerate(shape)
    for axis, dim in axes:
        if not -tensor.ndim <= axis < tensor.ndim:
            raise UsageError(
                f"dynamic_shapes names axis {axis} of input {name}, which has {tensor.ndim} axes."
            )
        axis %= tensor.ndim
        if not _is_dynamic(dim):
            continue
        size = tensor.shape[axis]
        is_named = isinstance(dim, Dim)
        if not is_named and not isinstance(dim, _DimHint):
            raise UsageError(
                f"dynamic_shapes has a {type(dim).__name__} for axis {axis} of input {name}; give "
                "a torch.export.Dim, a name, or None for a constant size."
            )
        label = dim.__name__ if is_named else None
        root = dim.root.__name__ if is_named and hasattr(dim, "root") else label
        yield Request(name, leaf, axis, size, label, root, _bound(dim.min), _bound(dim.max))


def without_names(shapes: Any) -> Any:
    """`dynamic_shapes` with Dim.AUTO of the same range in place of each Dim, or None.

    None where a Dim is derived from another one.
    """
    dims = [dim for dim in pytree.tree_leaves(shapes) if isinstance(dim, Dim)]
    if any(hasattr(dim, "root") for dim in dims):
        return None

    def auto(dim: Any) -> Any:
        if not isinstance(dim, Dim):
            return dim
        return Dim.AUTO(min=_bound(dim.min), max=_bound(dim.max))

    return pytree.tree_map(auto, shapes)


def _is_dynamic(dim: Any) -> bool:
    static = dim is None or isinstance(dim, int)
    return not static and getattr(dim, "type", None) != _DimHintType.STATIC


def dynamic_number(name: str, action: str) -> CaptureError:
    """The error about an input that is a Python number and is asked to be dynamic."""
    return CaptureError(
        f"Input {name} is a number that is asked to be dynamic, and a graph's inputs are tensors. "
        "To choose it at each run, let forward take a tensor of it and read "
        "it with .item() where Python needs a number (n = steps.item(); where n is a size, also "
        "torch._check(n >= 0) and torch._check(n <= x.shape[1])); to make it a constant, "
        f"{action} with None for it in dynamic_shapes."
    )


def _bound(value: Any) -> int | None:
    """torch writes an open upper bound as its own infinity."""
    return value if isinstance(value, int) else None
