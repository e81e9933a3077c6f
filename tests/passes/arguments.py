"""What each op that local rules look at may be drawn with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st

from attngraph.ir import Value
from attngraph.ir.dims import product, symbol
from tests.passes.making import DTYPES, FLOATS, SIZES, Making

NUMBERS = [1, 1.0, 0, 0.0, -0.0, 2, -1, 0.5]

Arguments = Callable[[Making, Value], tuple[list[Value | None], dict[str, Any]]]


def _alone(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    return [x], {}


def _with_number(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    return [x], {"other": make.one_of(NUMBERS)}


def _with_operand(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    dtype = x.dtype if make.flag() else make.one_of(DTYPES)
    other = make.constant(make.one_of(NUMBERS), dtype)
    return ([x, other] if make.flag() else [other, x]), {}


def _sums(arguments: Arguments) -> Arguments:
    def found(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
        inputs, attrs = arguments(make, x)
        return inputs, {**attrs, "alpha": make.one_of([1, 1, 1, 2])}

    return found


def _connected(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    dtype = torch.bool if make.flag() else x.dtype
    other = make.constant(make.one_of([0, 1]), dtype)
    return ([x, other] if make.flag() else [other, x]), {}


def _dropout(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    return [x], {"p": make.one_of([0.0, 0.5]), "train": False} if make.flag() else {
        "p": 0.0,
        "train": True,
    }


def _pad(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    axes = make.number(1, max(1, len(x.shape)))
    return [x], {"pad": [make.one_of([0, 0, 0, 1]) for _ in range(2 * axes)]}


def _index_put(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    start = make.number(0, 2)
    end = make.number(start + 1, 3)
    assume(end <= len(x.shape))
    mask = make.input(torch.bool, x.shape[start:end])
    return [x, *[None] * start, mask, make.constant(2, x.dtype)], {}


def _where(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    other = x if make.flag() else make.input(x.dtype, x.shape)
    shape = x.shape if make.flag() else (make.one_of(SIZES), *x.shape)
    return [make.input(torch.bool, shape), x, other], {}


def _mask(make: Making, x: Value) -> Value:
    return make.input(torch.bool, [make.one_of([dim, 1]) for dim in x.shape])


def _chosen(*numbers: str, alone: bool = False) -> Arguments:
    def found(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
        attrs = {name: make.one_of(NUMBERS) for name in numbers}
        return [_mask(make, x), *([] if alone else [x])], attrs

    return found


def _masked(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    return [x, _mask(make, x)], {"value": make.one_of([*NUMBERS, -math.inf])}


def _masked_by_tensor(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    dtype = x.dtype if make.flag() else make.one_of(DTYPES)
    number = make.build.constant(torch.tensor(make.one_of(NUMBERS)).to(dtype))
    return [x, _mask(make, x), number], {}


def _times(rank: int, other_rank: int) -> Arguments:
    def found(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
        assume(len(x.shape) == rank)
        shape = [*x.shape[: rank - 2], x.shape[-1]] if rank > 1 else [x.shape[-1]]
        return [x, make.input(x.dtype, [*shape, make.one_of(SIZES)][:other_rank])], {}

    return found


def _plain_softmax(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    return [x], {"dim": make.axis(len(x.shape)), "half_to_float": False}


def _scalar(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    return [], {"s": make.one_of(NUMBERS), "dtype": make.one_of(FLOATS)}


def _cast(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    return [x], {"dtype": make.one_of(DTYPES)}


def _like(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    return [x, make.input(make.one_of(DTYPES), x.shape)], {}


def _filling(make: Making) -> float:
    return make.one_of([*NUMBERS, -math.inf, math.nan])


def _overwritten(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    return [x], {"value": _filling(make)}


def _filled(make: Making, attrs: dict[str, Any], op: str) -> dict[str, Any]:
    if "full" in op:
        attrs["fill_value"] = _filling(make)
    if make.flag() or op in ("aten.full", "aten.ones", "aten.zeros"):
        attrs["dtype"] = make.one_of(FLOATS)
    return attrs


def _fills(op: str) -> Arguments:
    def found(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
        is_new = op.endswith("_like") or ".new_" in op
        attrs: dict[str, Any] = {} if op.endswith("_like") else {"size": make.shape()}
        return [x] if is_new else [], _filled(make, attrs, op)

    return found


def _eye(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    return [], {"n": make.one_of(SIZES), "dtype": make.one_of(DTYPES)}


def _eye_m(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    return [], {"n": make.one_of(SIZES), "m": make.one_of(SIZES), "dtype": make.one_of(DTYPES)}


def _softmax(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    attrs = {"dim": make.axis(len(x.shape))}
    return [x], attrs | ({"dtype": torch.float32} if make.flag() else {})


def _rms(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    assume(x.shape and isinstance(x.shape[-1], int))
    eps = {"eps": 1e-3} if make.flag() else {}
    return [x], {"normalized_shape": [x.shape[-1]], **eps}


def _power(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    return [x], {"exponent": make.one_of([1, 1.0, 2, 0])}


def _reshaped(name: str) -> Arguments:
    def found(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
        shape = list(x.shape)
        if make.flag():
            shape.insert(make.number(0, len(shape)), 1)
        elif make.flag() and len(shape) > 1:
            at = make.number(0, len(shape) - 2)
            shape[at : at + 2] = [product(shape[at : at + 2])]
        if name in ("view_as", "reshape_as"):
            return [x, make.input(x.dtype, shape)], {}
        return [x], {name: shape}

    return found


def _squeezed(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    return [x], {"dim": make.axis(len(x.shape))}


def _squeezed_axes(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    return [x], {"dim": [make.axis(len(x.shape))]}


def _unsqueezed(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    return [x], {"dim": make.number(-1 - len(x.shape), len(x.shape))}


def _flattened(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    return [x], {"start_dim": make.number(0, max(0, len(x.shape) - 1))}


def _unflattened(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    axis = make.axis(len(x.shape))
    return [x], {"dim": axis, "sizes": [1, -1] if make.flag() else [x.shape[axis], 1]}


def _swapped(first: str, second: str) -> Arguments:
    def found(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
        rank = len(x.shape)
        return [x], {first: make.axis(rank), second: make.axis(rank)}

    return found


def _permuted(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    order = make.draw(st.permutations(range(len(x.shape))))
    return [x], {"dims": [dim - len(order) * make.flag() for dim in order]}


def _moved(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    rank = len(x.shape)
    count = make.number(0, rank)
    ends = [list(make.draw(st.permutations(range(rank))))[:count] for _ in range(2)]
    return [x], {"source": ends[0], "destination": [dim - rank * make.flag() for dim in ends[1]]}


def _expanded(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    shape = [make.one_of([dim, -1]) if dim != 1 else make.one_of(SIZES) for dim in x.shape]
    return [x], {"size": [*make.shape(0, 2), *shape]}


def _expanded_as(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    shape = [make.one_of(SIZES) if dim == 1 else dim for dim in x.shape]
    return [x, make.input(x.dtype, [*make.shape(0, 1), *shape])], {}


def _repeated(name: str) -> Arguments:
    def found(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
        count = len(x.shape) + make.number(0, 1)
        return [x], {name: [make.one_of([1, 1, 2, symbol("a")]) for _ in range(count)]}

    return found


def _narrowed(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    axis = make.axis(len(x.shape))
    size = x.shape[axis]
    assume(isinstance(size, int))
    length = make.number(0, int(size))
    start = make.number(0, int(size) - length)
    return [x], {"dim": axis, "start": start - int(size) * make.flag(), "length": length}


def _sliced(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    if make.flag():
        begin = {"start": make.number(-3, 3)} if make.flag() else {}
        length = make.one_of([4, symbol("a"), symbol("b") + 2])
        op, attrs = ("aten.arange.start", begin) if begin else ("aten.arange", {})
        x = make.build(op, **attrs, end=length + begin.get("start", 0))
    attrs = {"dim": make.axis(len(x.shape))}
    for name in ("start", "end"):
        if make.flag():
            attrs[name] = make.one_of([0, 1, 2, -1, 9])
    return [x], attrs | {"step": make.one_of([1, 1, 2])}


def _split(**drawers: Callable[[Making, int], Any]) -> Arguments:
    def found(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
        axis = make.axis(len(x.shape))
        size = x.shape[axis]
        assume(isinstance(size, int))
        return [x], {name: of(make, int(size)) for name, of in drawers.items()} | {"dim": axis}

    return found


def _count(make: Making, size: int) -> int:
    return make.number(1, 3)


def _parts(make: Making, size: int) -> list[int]:
    first = make.number(0, size)
    return [first, size - first] if make.flag() else [size]


def _places(make: Making, size: int) -> list[int]:
    return [make.number(0, size)]


def _joined(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    long = [axis for axis, dim in enumerate(x.shape) if isinstance(dim, int) and dim > 1]
    if long and make.one_of([True, True, False]):
        return _joined_again(make, x, make.one_of(long))
    axis = make.axis(len(x.shape))
    parts: list[Value | None] = [x]
    for _ in range(make.number(0, 2)):
        shape = list(x.shape)
        shape[axis] = make.one_of([0, 0, 2, symbol("past")])
        dtype = x.dtype if make.flag() else make.one_of(DTYPES)
        parts.insert(make.number(0, len(parts)), make.input(dtype, shape))
    return parts, {"dim": axis}


def _joined_again(make: Making, x: Value, axis: int) -> tuple[list[Value | None], dict[str, Any]]:
    """The slices of x, or most of them, of which something may be added to one."""
    size = int(x.shape[axis])
    last = make.one_of([size, size, size, size - 1])
    parts: list[Value | None] = []
    for start, end in ((0, 1), (1, last)):
        part = make.build("aten.slice.Tensor", x, dim=axis, start=start, end=end)
        if make.one_of([False, False, True]):
            part = make.build("aten.add.Tensor", part, make.input(x.dtype, part.shape))
        parts.append(part)
    return parts if make.one_of([True, True, True, False]) else parts[::-1], {"dim": axis}


def _copied(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    shape = [make.one_of([dim, dim, 1]) for dim in x.shape][make.number(0, 1) :]
    return [x, make.input(x.dtype if make.flag() else make.one_of(DTYPES), shape)], {}


def _rolled(make: Making, x: Value, axis: int, start: int, end: int) -> Value:
    """Moved by as many places as are written, mostly so that these wrapped round."""
    by = end - start
    if make.one_of([start > 0, start > 0, make.flag()]):
        by = -by
    return make.build.node("aten.roll", x, shifts=[by], dims=[axis]).output


def _window(make: Making, x: Value) -> tuple[Value, int, bool]:
    """What is written into, along which axis, and whether that is a window that moves on."""
    if make.flag():
        shape = [make.number(2, 4), *make.one_of([[], [2]])]
        axis = make.number(0, len(shape) - 1)
        return make.input(x.dtype, shape), axis, True
    return x, make.axis(len(x.shape)), False


def _selected(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    x, axis, moves = _window(make, x)
    size = x.shape[axis]
    assume(isinstance(size, int) and size > 0)
    place = make.number(-int(size), int(size) - 1)
    if moves:
        place = make.one_of([0, -1, int(size) - 1, place])
        x = _rolled(make, x, axis, place % int(size), place % int(size) + 1)
    shape = list(x.shape)
    del shape[axis]
    return [x, make.input(x.dtype, shape)], {"dim": axis, "index": place}


def _pasted(make: Making, x: Value) -> tuple[list[Value | None], dict[str, Any]]:
    x, axis, moves = _window(make, x)
    size = x.shape[axis]
    assume(isinstance(size, int))
    start = make.number(0, int(size))
    end = make.number(start, int(size))
    shape = list(x.shape)
    shape[axis] = end - start
    attrs = {"dim": axis, "start": start - int(size) * (make.flag() and start < int(size))}
    attrs["end"], source = end, make.input(x.dtype, shape)
    if moves and end > start:
        x = _rolled(make, x, axis, start, end)
    if make.flag():  # what was there, and more
        part = make.build.node("aten.slice.Tensor", x, **attrs).output
        source = make.build.node("aten.add.Tensor", part, source).output
    return [x, source], attrs


_PRODUCTS = {"mm": (2, 2), "bmm": (3, 3), "mv": (2, 1), "dot": (1, 1)}
"""Ranks of the two operands."""
_ALONE = """positive resolve_conj resolve_neg clone contiguous alias detach lift_fresh_copy neg
    bitwise_not logical_not squeeze ravel t mT numpy_T"""
ARGUMENTS: dict[str, Arguments] = {
    **{f"aten.{name}": _alone for name in _ALONE.split()},
    **{f"aten.{name}dropout": _dropout for name in ("", "feature_", "alpha_", "feature_alpha_")},
    **{f"aten.{name}": _pad for name in ("pad", "constant_pad_nd")},
    **{f"aten.{name}.Scalar": _with_number for name in ("mul", "div")},
    **{f"aten.{name}.Tensor": _with_operand for name in ("mul", "div")},
    **{f"aten.{name}.Scalar": _sums(_with_number) for name in ("add", "sub")},
    **{f"aten.{name}.Tensor": _sums(_with_operand) for name in ("add", "sub")},
    "aten.pow.Tensor_Scalar": _power,
    **{f"aten.__{name}__.Tensor": _connected for name in ("and", "or")},
    **{f"aten.bitwise_{name}.Tensor": _connected for name in ("and", "or")},
    **{f"aten.logical_{name}": _connected for name in ("and", "or")},
    "aten.index_put": _index_put,
    "aten.where.self": _where,
    "aten.where.Scalar": _chosen("self", "other", alone=True),
    "aten.where.ScalarOther": _chosen("other"),
    "aten.where.ScalarSelf": _chosen("self"),
    "aten.masked_fill.Scalar": _masked,
    "aten.masked_fill.Tensor": _masked_by_tensor,
    **{f"aten.{name}": _times(*ranks) for name, ranks in _PRODUCTS.items()},
    **{f"aten.{name}": _cast for name in ("_to_copy", "to.dtype", "to.dtype_layout")},
    "aten.to.device": lambda make, x: ([x], {"device": "cpu", "dtype": make.one_of(DTYPES)}),
    **{f"aten.{name}": _like for name in ("to.other", "type_as")},
    **{
        f"aten.{name}": _fills(f"aten.{name}")
        for kind in ("full", "ones", "zeros")
        for name in (kind, f"{kind}_like", f"new_{kind}")
    },
    "aten.fill.Scalar": _overwritten,
    "aten.scalar_tensor": _scalar,
    "aten.eye": _eye,
    "aten.eye.m": _eye_m,
    **{f"aten.special_{name}": _softmax for name in ("softmax", "log_softmax")},
    **{f"aten.{name}.int": _softmax for name in ("softmax", "log_softmax")},
    **{f"aten._{name}": _plain_softmax for name in ("softmax", "log_softmax")},
    "aten.rms_norm": _rms,
    "aten.reshape": _reshaped("shape"),
    "aten._reshape_copy": _reshaped("size"),
    **{f"aten.{name}": _reshaped("size") for name in ("view", "view_copy", "_unsafe_view")},
    **{f"aten.{name}": _reshaped(name) for name in ("view_as", "reshape_as")},
    "aten.squeeze.dim": _squeezed,
    "aten.squeeze.dims": _squeezed_axes,
    "aten.unsqueeze": _unsqueezed,
    "aten.flatten.using_ints": _flattened,
    "aten.unflatten.int": _unflattened,
    **{f"aten.{name}": _swapped("dim0", "dim1") for name in ("transpose.int", "swapdims")},
    "aten.swapaxes": _swapped("axis0", "axis1"),
    "aten.permute": _permuted,
    **{f"aten.{name}.int": _swapped("source", "destination") for name in ("movedim", "moveaxis")},
    **{f"aten.{name}.intlist": _moved for name in ("movedim", "moveaxis")},
    **{f"aten.{name}": _expanded for name in ("expand", "expand_copy", "broadcast_to")},
    "aten.expand_as": _expanded_as,
    "aten.repeat": _repeated("repeats"),
    "aten.tile": _repeated("dims"),
    "aten.narrow": _narrowed,
    "aten.slice.Tensor": _sliced,
    **{f"aten.{name}": _split(chunks=_count) for name in ("chunk", "unsafe_chunk")},
    **{f"aten.{name}.Tensor": _split(split_size=_count) for name in ("split", "unsafe_split")},
    "aten.split.sizes": _split(split_size=_parts),
    **{
        f"aten.{name}": _split(split_sizes=_parts)
        for name in ("split_with_sizes", "unsafe_split_with_sizes")
    },
    "aten.tensor_split.sections": _split(sections=_count),
    "aten.tensor_split.indices": _split(indices=_places),
    "aten.cat": _joined,
    "aten.copy": _copied,
    "aten.select_scatter": _selected,
    "aten.slice_scatter": _pasted,
}
"""How the inputs and attributes of each op are drawn."""
