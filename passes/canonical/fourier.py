"""Fourier transforms as products with tables of cosines and sines, one axis after the other.

A transform of n numbers is the sum of x_j · e^(∓2πi·jk/n), so an axis is one product with an (n, n)
table of cosines and one with sines. onnxruntime's DFT exists on the CPU alone, is slower than these
products up to some thousands, and its error reaches 1e-4 where n is no power of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from attngraph.ir import Builder, Node, TensorType, Value
from attngraph.ir.dims import Dim, as_dim, least, same
from attngraph.ir.ops import attribute

Parts: TypeAlias = tuple[Value, Value | None]
"""The real and the imaginary part; None where all numbers are real."""

_LONGEST = 4096  # tables grow with the square
_ONE_AXIS = {"aten.fft_fft", "aten.fft_ifft", "aten.fft_rfft", "aten.fft_irfft"}
_NORMS = {None: 0, "backward": 0, "ortho": 1, "forward": 2}


@dataclass(frozen=True)
class _Axis:
    """One axis: `size` elements are there, `length` are transformed, `kept` come out."""

    dim: int
    size: Dim
    length: Dim
    kept: Dim


@dataclass(frozen=True)
class Transform:
    """What a node transforms. `power`: each axis' result is divided by length^power."""

    axes: tuple[_Axis, ...]
    inverse: bool
    to_real: bool
    power: float

    def apply(self, build: Builder, parts: Parts) -> Parts:
        """The parts of the result. The axis that gives or takes half a spectrum is the last."""
        order = self.axes if self.to_real else self.axes[::-1]
        for axis in order:
            half = self.to_real and axis is order[-1]
            parts = self._along(build, parts, axis, half)
        return parts

    def _along(self, build: Builder, parts: Parts, axis: _Axis, half: bool) -> Parts:
        real, imaginary = parts
        there = as_dim(axis.length // 2 + 1) if half else axis.length
        rows = axis.size if same(axis.size, there) else least(axis.size, there)
        if not same(rows, axis.size):
            cut = {"dim": axis.dim, "end": rows}
            real = build("aten.slice.Tensor", real, **cut)
            imaginary = imaginary and build("aten.slice.Tensor", imaginary, **cut)
        cosines, sines = _tables(build, real.dtype, rows, axis, self.power, half)

        def product(part: Value, table: Value) -> Value:
            return _product(build, part, table, axis.dim)

        minus, plus = ("aten.sub.Tensor", "aten.add.Tensor")
        if not self.inverse:
            minus, plus = plus, minus
        if imaginary is None:
            by_sines = product(real, sines)
            signed = by_sines if self.inverse else build("aten.neg", by_sines)
            return product(real, cosines), signed
        found = build(minus, product(real, cosines), product(imaginary, sines))
        if half:
            return found, None
        return found, build(plus, product(imaginary, cosines), product(real, sines))


def read_transform(node: Node) -> Transform | None:
    """What a FOURIER node does; None where its tables would be too large or are unknown."""
    source, result = node.source, node.output
    if not isinstance(source.type, TensorType) or source.dtype.to_real() == torch.float16:
        return None
    rank = len(source.shape)
    if node.op.startswith("aten._fft"):
        dims = [dim % rank for dim in attribute(node, "dim")]
        norm = attribute(node, "normalization")
        lengths: Sequence[Any] | None = None
        inverse = node.op == "aten._fft_c2r" or not node.attrs.get("forward", True)
        power = (0.0, 0.5, 1.0)[norm]
        if node.op == "aten._fft_c2r":
            lengths = [*(source.shape[dim] for dim in dims[:-1]), node.attrs["last_dim_size"]]
    else:
        dims, lengths = _public(node, rank)
        inverse = "_i" in node.op
        norm = _NORMS[attribute(node, "norm")]
        power = (1.0, 0.5, 0.0)[norm] if inverse else (0.0, 0.5, 1.0)[norm]
    to_real = not result.dtype.is_complex
    if len(set(dims)) < len(dims) or not dims:
        return None
    axes = []
    for at, dim in enumerate(dims):
        size, kept = source.shape[dim], result.shape[dim]
        length: Dim = size if lengths is None else lengths[at]
        if to_real and at == len(dims) - 1:
            length = kept
        if isinstance(length, int) and length > _LONGEST:
            return None
        axes.append(_Axis(dim, size, length, kept))
    return Transform(tuple(axes), inverse, to_real, power)


def _public(node: Node, rank: int) -> tuple[list[int], Sequence[Any] | None]:
    """The axes of a function of torch.fft, and the lengths it is given."""
    if node.op in _ONE_AXIS:
        length = attribute(node, "n")
        return [attribute(node, "dim") % rank], None if length is None else [length]
    dims, lengths = attribute(node, "dim"), attribute(node, "s")
    if dims is None:
        dims = range(rank) if lengths is None else range(rank - len(lengths), rank)
    found = [dim % rank for dim in dims]
    source = node.source
    if lengths is not None:
        lengths = [
            source.shape[dim] if length == -1 else length
            for dim, length in zip(found, lengths, strict=True)
        ]
    return found, lengths


def _product(build: Builder, part: Value, table: Value, dim: int) -> Value:
    """The sum over one axis of `part` (..., rows, ...) and `table` (rows, kept)."""
    from_end = len(part.shape) - dim
    if from_end == 1:
        return build("aten.matmul", part, table)
    turned = build("aten.transpose.int", table, dim0=0, dim1=1)
    if from_end == 2:
        return build("aten.matmul", turned, part)
    last = {"dim0": dim, "dim1": -1}
    moved = build("aten.matmul", build("aten.transpose.int", part, **last), table)
    return build("aten.transpose.int", moved, **last)


def _tables(
    build: Builder, dtype: torch.dtype, rows: Dim, axis: _Axis, power: float, half: bool
) -> tuple[Value, Value]:
    """cos and sin of 2π·jk/n as (rows, kept), times what normalises; computed in float64.

    With `half` the rows are half a spectrum, of which all but the first and the middle one count
    twice.
    """
    if not (isinstance(rows, int) and isinstance(axis.length, int) and isinstance(axis.kept, int)):
        return _computed_tables(build, dtype, rows, axis, power, half)
    length = axis.length
    j, k = torch.arange(rows)[:, None], torch.arange(axis.kept)
    angle = (j * k % length).double() * (2 * math.pi / length)
    weight = torch.full((rows, 1), length**-power, dtype=torch.float64)
    if half:
        weight[(j > 0) & (2 * j != length)] *= 2
    return (
        build.constant((angle.cos() * weight).to(dtype), "cosines"),
        build.constant((angle.sin() * weight).to(dtype), "sines"),
    )


def _computed_tables(
    build: Builder, dtype: torch.dtype, rows: Dim, axis: _Axis, power: float, half: bool
) -> tuple[Value, Value]:
    double = torch.float64
    column = build("aten.arange", end=rows)
    column = build("aten.reshape", column, shape=[rows, 1])
    turns = build("aten.mul.Tensor", column, build("aten.arange", end=axis.kept))
    turns = build("aten.remainder.Scalar", turns, other=axis.length)
    turns = build("aten._to_copy", turns, dtype=double)
    length = build("aten.full", size=[], fill_value=axis.length, dtype=double)
    angle = build("aten.div.Tensor", turns, length)
    angle = build("aten.mul.Scalar", angle, other=2 * math.pi)
    weights = []
    if half:
        # Two numbers stand for one each, but for the first and, of an even length, the middle one.
        left = build(
            "aten.rsub.Scalar", build("aten.mul.Scalar", column, other=2), other=axis.length
        )
        sides = [build("aten.clamp_max", each, max=1) for each in (column, build("aten.abs", left))]
        weights.append(build("aten._to_copy", build("aten.add.Tensor", *sides), dtype=double))
    if power:
        scale = length if power == 1 else build("aten.sqrt", length)
        weights.append(build("aten.reciprocal", scale))
    tables = []
    for function in ("aten.cos", "aten.sin"):
        table = build(function, angle)
        for weight in weights:
            table = build("aten.mul.Tensor", table, weight)
        tables.append(build("aten._to_copy", table, dtype=dtype))
    return tables[0], tables[1]
