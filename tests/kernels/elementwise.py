"""Calls of ops that work element by element."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from attngraph.ir.types import dtype_name
from tests.kernels.runner import Call, Calls, Case
from tests.kernels.values import ALL, FLOATS, INTEGERS, NUMBERS, edges

F32 = (torch.float32,)
DIVIDED = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8)
FEW = (torch.float32, torch.float16, torch.int64, torch.int8)
BITS = (*INTEGERS, torch.bool)
Keep = Callable[[torch.Tensor], torch.Tensor]


def unary(text: str) -> Calls:
    """Of all edges, of none, and of a single one."""

    def calls(dtype: torch.dtype) -> list[Call]:
        values = edges(dtype)
        return [Call(text, (part,)) for part in (values, values[:0], values[0])]

    return calls


def pairs(text: str, right: Keep | None = None, left: Keep | None = None) -> Calls:
    """Every edge with every edge, broadcast from either side and spread out; with 0, 1 and −1.

    `right` and `left` say which values an operand may have.
    """

    def calls(dtype: torch.dtype) -> list[Call]:
        a, b = edges(dtype), edges(dtype)
        a, b = a if left is None else a[left(a)], b if right is None else b[right(b)]
        column, row = a[:, None], b[None]
        spread = tuple(part.reshape(-1) for part in torch.broadcast_tensors(column, row))
        shapes = [(column, row), (a[None], b[:, None]), spread, (a[:0], b[:1])]
        single = [(a, b[place]) for place in range(min(3, len(b)))]
        return [Call(text, operands) for operands in [*shapes, *single]]

    return calls


def scalars(text: str, *values: object) -> Calls:
    """All edges with each of the numbers, which stands for {} in the text."""

    def calls(dtype: torch.dtype) -> list[Call]:
        return [Call(text.replace("{}", str(number)), (edges(dtype),)) for number in values]

    return calls


def _unary(names: str, dtypes: Sequence[torch.dtype], **more: Any) -> list[Case]:
    return [Case(name, unary(f"aten.{name}(%0)"), tuple(dtypes), **more) for name in names.split()]


def _binary(names: str, dtypes: Sequence[torch.dtype], **more: Any) -> list[Case]:
    return [
        Case(name, pairs(f"aten.{name}(%0, %1)"), tuple(dtypes), **more) for name in names.split()
    ]


def _divides(values: torch.Tensor) -> torch.Tensor:
    """What torch divides any integer by: not 0, nor −1, which the lowest integer overflows with."""
    return (
        (values == values) | True
        if values.dtype.is_floating_point
        else (values > 1) | (values < -1)
    )


def _small(values: torch.Tensor) -> torch.Tensor:
    return (values >= -3) & (values <= 7)


def _exponent(values: torch.Tensor) -> torch.Tensor:
    return (values >= 0) & (values <= 7)


def _inner(values: torch.Tensor) -> torch.Tensor:
    """Integers in the inner half of the range, and any float."""
    if values.dtype.is_floating_point:
        return values == values
    limits = torch.iinfo(values.dtype)
    return (values > limits.min // 4) & (values < limits.max // 2)


def _inner_divisor(values: torch.Tensor) -> torch.Tensor:
    return _inner(values) & _divides(values)


def _lowest(values: torch.Tensor) -> torch.Tensor:
    return values == torch.iinfo(values.dtype).min


def _far_apart(operands: Sequence[torch.Tensor], result: torch.Tensor) -> torch.Tensor:
    """Where the quotient has no fraction left."""
    a, b = (operand.double() for operand in torch.broadcast_tensors(*operands))
    if not result.dtype.is_floating_point:
        return torch.zeros_like(result, dtype=torch.bool)
    return (a / b).abs() > 1 / torch.finfo(result.dtype).eps / 2


def _converted(to: torch.dtype) -> Calls:
    return unary(f"aten._to_copy(%0) {{dtype = {dtype_name(to)}}}")


def _outside(
    to: torch.dtype, operands: Sequence[torch.Tensor], result: torch.Tensor
) -> torch.Tensor:
    (x,) = operands
    if not x.dtype.is_floating_point or to.is_floating_point or to == torch.bool:
        return torch.zeros_like(result, dtype=torch.bool)
    limits, whole = torch.iinfo(to), x.double().trunc()
    return ~((whole >= limits.min) & (whole <= limits.max) & (whole < 2.0**63))


def _is_infinite(operands: Sequence[torch.Tensor], result: torch.Tensor) -> torch.Tensor:
    return operands[0].isinf()


def _chosen(dtype: torch.dtype) -> list[Call]:
    values = edges(dtype)
    even = torch.arange(len(values)) % 2 == 0
    both = torch.tensor([True, False])[:, None, None]
    return [
        Call("aten.where.self(%0, %1, %2)", (both, values[:, None], values[None])),
        Call("aten.where.self(%0, %1, %2)", (even, values, values.flip(0))),
        Call("aten.masked_fill.Scalar(%0, %1) {value = 1}", (values, even)),
    ]


def _tiny(text: str) -> Calls:
    """Of the largest denormals."""

    def calls(dtype: torch.dtype) -> list[Call]:
        values = torch.tensor([1.0, -1.0], dtype=dtype) * (torch.finfo(dtype).smallest_normal / 2)
        return [Call(text, (values, values * 0))]

    return calls


def _small_results(name: str) -> Calls:
    """Where they are 1e-10 to 1, from 0 and from −∞."""

    def calls(dtype: torch.dtype) -> list[Call]:
        values = torch.logspace(-10, 0, 41, dtype=dtype)
        values = torch.cat([values, -values * 0.9])
        return [Call(f"aten.{name}(%0)", (part,)) for part in (values, values.abs().log())]

    return calls


EXACT = """floor ceil round trunc sign sgn relu isnan isinf isfinite nan_to_num square logical_not
bitwise_not signbit isneginf isposinf frac positive clone relu6 hardtanh hardshrink"""
NEAR = """exp log sqrt rsqrt reciprocal sin cos tan atan asin acos sinh cosh asinh acosh atanh exp2
deg2rad rad2deg log2 log10"""
BOUNDED = """tanh erf silu hardswish hardsigmoid mish selu softplus log_sigmoid leaky_relu
elu celu erfc sinc logit softshrink"""
RELATIVE = "sigmoid expm1 log1p"  # of small results, which logarithms and quotients take
ARITHMETIC = """add.Tensor sub.Tensor mul.Tensor maximum minimum eq.Tensor ne.Tensor lt.Tensor
le.Tensor gt.Tensor ge.Tensor logical_and logical_or logical_xor clamp_min.Tensor
clamp_max.Tensor"""
FLOOR, TRUNC = (f' {{rounding_mode = "{mode}"}}' for mode in ("floor", "trunc"))
FMOD = "PyTorch's vectorised fmod gives NaN where a quotient has no fraction left"

CASES = [
    *_unary("abs neg", ALL, signed=True),
    *_unary(EXACT, ALL),
    *_unary(NEAR, ALL, ulps=4),
    *_unary(BOUNDED, NUMBERS, ulps=8, scale=1.0),
    *_unary(RELATIVE, NUMBERS, ulps=8),
    *[Case(f"{n}-small", _small_results(n), (torch.float32,), ulps=8) for n in RELATIVE.split()],
    Case(
        "gelu",
        unary("aten.gelu(%0)"),
        FLOATS,
        ulps=8,
        scale=1.0,
        undefined=_is_infinite,
        because="PyTorch's vectorised GELU of ∞ is NaN, its scalar one ∞",
    ),
    Case(
        "gelu-tanh",
        unary('aten.gelu(%0) {approximate = "tanh"}'),
        FLOATS,
        ulps=8,
        scale=1.0,
        undefined=_is_infinite,
        because="as GELU of ∞",
    ),
    Case("prelu", lambda d: [Call("aten.prelu(%0, %1)", (edges(d)[None], edges(d)[4:5]))], F32),
    Case(
        "prelu-of-several-weights",
        lambda d: [
            Call("aten._prelu_kernel(%0, %1)", (edges(d)[None], edges(d)[2:6, None])),
            Call("aten._prelu_kernel(%0, %1)", (edges(d)[None], edges(d)[4:5, None])),
        ],
        F32,
    ),
    Case("glu", lambda d: [Call("aten.glu(%0)", (edges(d)[:8].reshape(2, 4),))], FLOATS, ulps=8),
    *_binary(ARITHMETIC, ALL),
    *_binary("bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor", BITS),
    *_binary("fmax fmin heaviside rsub.Tensor", FEW),
    *_binary("isclose", (torch.float32, torch.int64)),
    Case("copysign.Tensor", pairs("aten.copysign.Tensor(%0, %1)"), (torch.float32, torch.int64)),
    *_binary("hypot atan2", (torch.float32, torch.int32), ulps=16),
    *_binary("logaddexp logaddexp2 xlogy.Tensor", (torch.float32, torch.float64), ulps=16, scale=1),
    Case("clamp", scalars("aten.clamp(%0) {min = {}, max = 7}", 0, 7, 8), NUMBERS),
    Case(
        "pow",
        scalars("aten.pow.Tensor_Scalar(%0) {exponent = {}}", 0, 1, 2, 3, 5, -1, 0.5, -0.5, 2.5),
        NUMBERS,
        ulps=16,
        undefined=_is_infinite,
        because="(−∞)^0.5 is ∞ or NaN, by dtype",
    ),
    Case("pow.Scalar", scalars("aten.pow.Scalar(%0) {self = {}}", 2.0, -1.5), FLOATS, ulps=16),
    Case("pow.Tensor_Tensor", pairs("aten.pow.Tensor_Tensor(%0, %1)"), FLOATS, ulps=64),
    Case(
        "pow-integers",
        pairs("aten.pow.Tensor_Tensor(%0, %1)", _exponent, _small),
        (torch.int64, torch.int32),
    ),
    Case(
        "pow-large",
        pairs("aten.pow.Tensor_Tensor(%0, %1)", _exponent),
        (torch.int64, torch.int32),
        difference="an integer to a computed power is a double on the way: exact below 2⁵³, and "
        "no remainder of 2⁶⁴ above (a constant power is a product)",
    ),
    Case("div.Tensor", pairs("aten.div.Tensor(%0, %1)"), ALL, ulps=1),
    *[
        Case(
            name,
            pairs(text, _inner_divisor, _inner),
            DIVIDED,
            ulps=2,
            undefined=_far_apart,
            because=FMOD,
        )
        for name, text in {
            "div-floor": f"aten.div.Tensor_mode(%0, %1){FLOOR}",
            "div-trunc": f"aten.div.Tensor_mode(%0, %1){TRUNC}",
            "floor_divide": "aten.floor_divide(%0, %1)",
            "remainder.Tensor": "aten.remainder.Tensor(%0, %1)",
            "fmod.Tensor": "aten.fmod.Tensor(%0, %1)",
        }.items()
    ],
    Case(
        "div-floor-lowest",
        pairs(f"aten.div.Tensor_mode(%0, %1){FLOOR}", _divides, _lowest),
        (torch.int64, torch.int32, torch.int16, torch.int8),
    ),
    Case("remainder.Scalar", scalars("aten.remainder.Scalar(%0) {other = {}}", 3, -3, 7), INTEGERS),
    Case("left_shift", pairs("aten.bitwise_left_shift.Tensor(%0, %1)", _exponent), INTEGERS),
    Case("right_shift", pairs("aten.bitwise_right_shift.Tensor(%0, %1)", _exponent), INTEGERS),
    Case("where", _chosen, ALL),
    Case(
        "where-zeros",
        lambda d: [
            Call("aten.where.self(%0, %1, %2)", (torch.ones(2) > 0, -torch.zeros(2), torch.ones(2)))
        ],
        F32,
        signed=True,
        difference="Where adds what it chose to zeros, so −0 becomes 0",
    ),
    *[
        Case(
            f"to-{dtype_name(to)}",
            _converted(to),
            tuple(dtype for dtype in ALL if dtype != to),
            undefined=functools.partial(_outside, to),
            because="a float that an integer type doesn't hold becomes any integer"
            if to in INTEGERS
            else "",
        )
        for to in ALL
    ],
    Case(
        "denormals",
        _tiny("aten.gt.Tensor(%0, %1)"),
        (torch.float32, torch.float64),
        strict=True,
        difference="sessions count denormals as zero (6 below); constants are folded with them",
    ),
]
