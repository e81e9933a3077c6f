"""split-complex: complex numbers as pairs of reals, which is what ONNX operators compute on.

Rotary embeddings are written with them: view_as_real(view_as_complex(x) * polar(1, angle)). Fourier
transforms become products with tables (fourier.py).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from attngraph.analysis.values.complex_parts import (
    CONJUGATES,
    ON_BOTH,
    POWER,
    QUOTIENTS,
    REST,
    TO_REALS,
    Splittable,
    is_complex,
    is_product,
    scalar_of,
)
from attngraph.ir import Builder, Graph, Node, Remark, Value
from attngraph.ir.dims import same
from attngraph.ir.ops import attribute
from attngraph.ir.slices import backward_slice
from attngraph.ir.traits import ADDITIVE, FOURIER, SHIFT
from attngraph.passes.canonical.fourier import Parts, Transform, read_transform
from attngraph.passes.canonical.signals import spell_out_signals
from attngraph.passes.canonical.value_forms import FILLS, filled
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.manager import GraphPass

Pair: TypeAlias = tuple[Value, Value]


class SplitComplex(GraphPass, name="split-complex", exact=True):
    """Replaces each real result of complex numbers by the same from their parts.

    What complex arithmetic can't be written on parts stays as it is, with all that it is made of.
    """

    def run(self, graph: Graph) -> list[Remark]:
        checked = Checked(graph, self.name, depth=None)
        spell_out_signals(graph, checked)
        parts = _Parts(graph)
        for node in list(graph):
            if node.op not in TO_REALS and node.op not in FOURIER:
                continue
            if not is_complex(source := node.source) or is_complex(node.output):
                continue
            is_read = node.output.uses or node.output in graph.outputs
            if is_read and parts.known(source) and parts.known_op(node):
                result = parts.real_result(node, parts.of(source))
                if not checked.replace([(node.output, result)], leaves=_real_sources(source)):
                    parts = _Parts(graph)  # some of the parts it remembers were erased
        return checked.remarks


def _real_sources(value: Value) -> list[Value]:
    """What complex numbers are made of; their parts may have been built for another result."""
    return backward_slice([value], lambda above: not is_complex(above))[0]


class _Parts:
    """The real and imaginary parts of values, built where they are first asked for."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.build = Builder(graph)
        self._splittable = Splittable(lambda node: self._transform(node) is not None)
        self._pairs: dict[Value, Pair] = {}
        self._transforms: dict[Node, Transform | None] = {}
        self.known, self.known_op = self._splittable.known, self._splittable.known_op

    def _transform(self, node: Node) -> Transform | None:
        if node not in self._transforms:
            self._transforms[node] = read_transform(node)
        return self._transforms[node]

    def of(self, value: Value) -> Pair:
        """(real, imaginary) of a value that is known."""
        if value not in self._pairs:
            if value.data is not None:
                real, imaginary = value.data.real, value.data.imag
                self._pairs[value] = (
                    self.build.constant(real.contiguous(), f"{value.name}.real"),
                    self.build.constant(imaginary.contiguous(), f"{value.name}.imag"),
                )
            else:
                assert value.producer is not None
                self._split(value.producer)
        return self._pairs[value]

    def _split(self, node: Node) -> None:
        if node.op in FILLS:
            self._pairs[node.output] = self._filled(node)
            return
        if (number := scalar_of(node)) is not None:
            pair = self._with_scalar(node, number)
            self._pairs[node.output] = (self._fit(pair[0], node), self._fit(pair[1], node))
            return
        inputs = node.inputs[1:] if node.op == "aten.copy" else node.inputs
        sides = [self.of(v) if v is not None and is_complex(v) else (v, v) for v in inputs]
        self.build.at(node, node.loc)
        if node.op in ON_BOTH:
            halves = [
                self.build.node(node.op, *[side[part] for side in sides], **node.attrs)
                for part in (0, 1)
            ]
            for value, real, imaginary in zip(
                node.outputs, halves[0].outputs, halves[1].outputs, strict=True
            ):
                self._pairs[value] = (real, imaginary)
            return
        pair = self._product(node) if is_product(node) else self._other(node)
        self._pairs[node.output] = (self._fit(pair[0], node), self._fit(pair[1], node))

    def _filled(self, node: Node) -> Pair:
        number, dtype = complex(filled(node)), node.output.dtype.to_real()
        build, shape = self.build.at(node, node.loc), list(node.output.shape)
        real, imaginary = (
            build("aten.full", size=shape, fill_value=part, dtype=dtype)
            for part in (number.real, number.imag)
        )
        return real, imaginary

    def _fit(self, part: Value, node: Node) -> Value:
        """A part in the result's shape and dtype."""
        shape, dtype = node.output.shape, node.output.dtype.to_real()
        if len(part.shape) != len(shape) or not all(map(same, part.shape, shape)):
            part = self.build("aten.expand", part, size=list(shape))
        return self.build.cast(part, dtype)

    def _product(self, node: Node) -> Pair:
        left, right = node.operands
        build = self.build

        def times(x: Value, y: Value) -> Value:
            return build(node.op, x, y, **node.attrs)

        if not is_complex(left):
            c, d = self.of(right)
            return times(left, c), times(left, d)
        a, b = self.of(left)
        if not is_complex(right):
            return times(a, right), times(b, right)
        return self._times((a, b), self.of(right), times)

    def _times(self, left: Pair, right: Pair, times: Any = None) -> Pair:
        """(a + bi)(c + di), by elements or as another product."""
        (a, b), (c, d), build = left, right, self.build

        def by_elements(x: Value, y: Value) -> Value:
            return build("aten.mul.Tensor", x, y)

        times = times or by_elements
        real = build("aten.sub.Tensor", times(a, c), times(b, d))
        return real, build("aten.add.Tensor", times(a, d), times(b, c))

    def _other(self, node: Node) -> Pair:
        build, op = self.build, node.op
        first = node.input(1 if op == "aten.copy" else 0)
        if op in FOURIER:
            real, imaginary = self._transformed(node)
            assert imaginary is not None
            return real, imaginary
        if op == "aten.view_as_complex":
            real, imaginary = (build("aten.select.int", first, dim=-1, index=i) for i in (0, 1))
            return real, imaginary
        if op in SHIFT:
            a, b = self.of(first)
            return build(op, a, **node.attrs), b
        if op == "aten.complex":
            return first, node.input(1)
        if op == "aten.polar":
            real, imaginary = (build(name, node.input(1)) for name in ("aten.cos", "aten.sin"))
            multiply = "aten.mul.Tensor"
            return build(multiply, first, real), build(multiply, first, imaginary)
        if op in ADDITIVE:
            return self._sum(node)
        if op in QUOTIENTS:
            return self._quotient(node)
        if not is_complex(first):
            zero = build("aten.full", size=list(first.shape), fill_value=0.0, dtype=first.dtype)
            return first, zero
        a, b = self.of(first)
        if op in CONJUGATES:
            return a, build("aten.neg", b)
        if op == POWER:
            product = (a, b)
            for _ in range(int(attribute(node, "exponent")) - 1):
                product = self._times(product, (a, b))
            return product
        if op == "aten.exp":
            size = build("aten.exp", a)
            turned = [build(f"aten.{function}", b) for function in ("cos", "sin")]
            real, imaginary = (build("aten.mul.Tensor", size, each) for each in turned)
            return real, imaginary
        return a, b  # a cast

    def _with_scalar(self, node: Node, number: complex) -> Pair:
        """z · c, z / c, z + c, z - c or c - z, of a complex number c; z may be real."""
        build, first = self.build.at(node, node.loc), node.source
        zero = self.build.constant(torch.zeros((), dtype=first.dtype.to_real()), "zero")
        a, b = self.of(first) if is_complex(first) else (first, zero)
        if node.op in SHIFT or node.op == REST:
            real, imaginary = (
                build(node.op, part, **{**node.attrs, "other": other})
                for part, other in ((a, number.real), (b, number.imag))
            )
            return real, imaginary
        factor = 1 / number if node.op == "aten.div.Scalar" else number

        def times(part: Value, other: float) -> Value:
            return build("aten.mul.Scalar", part, other=other)

        return (
            build("aten.sub.Tensor", times(a, factor.real), times(b, factor.imag)),
            build("aten.add.Tensor", times(a, factor.imag), times(b, factor.real)),
        )

    def _quotient(self, node: Node) -> Pair:
        """z / w as z · conj(w / s) / |w / s|² / s, with the larger part of w for s: no square of
        a large or a small number."""
        build, (*above, below) = self.build, node.operands
        divide, multiply = "aten.div.Tensor", "aten.mul.Tensor"
        one = self.build.constant(torch.ones((), dtype=node.output.dtype.to_real()), "one")
        zero = self.build.constant(torch.zeros((), dtype=one.dtype), "zero")
        first = above[0] if above else None
        a, b = self.of(first) if is_complex(first) and first else (first or one, zero)
        if not is_complex(below):
            return build(divide, a, below), build(divide, b, below)
        parts = self.of(below)
        size = build("aten.maximum", *(build("aten.abs", part) for part in parts))
        c, d = (build(divide, part, size) for part in parts)
        square = build("aten.add.Tensor", build(multiply, c, c), build(multiply, d, d))
        whole = build(multiply, square, size)
        real = build("aten.add.Tensor", build(multiply, a, c), build(multiply, b, d))
        imaginary = build("aten.sub.Tensor", build(multiply, b, c), build(multiply, a, d))
        return build(divide, real, whole), build(divide, imaginary, whole)

    def _sum(self, node: Node) -> Pair:
        left, right = node.operands
        alpha = attribute(node, "alpha")
        zero = self.build.constant(torch.zeros((), dtype=node.output.dtype.to_real()), "zero")
        a, b = self.of(left) if is_complex(left) else (left, zero)
        c, d = self.of(right) if is_complex(right) else (right, zero)
        return self.build(node.op, a, c, alpha=alpha), self.build(node.op, b, d, alpha=alpha)

    def _transformed(self, node: Node) -> Parts:
        source, transform = node.source, read_transform(node)
        assert transform is not None
        build = self.build.at(node, node.loc)
        cast = source.producer
        bare = cast.inputs[0] if cast is not None and cast.op == "aten._to_copy" else None
        if bare is not None and not is_complex(bare):
            return transform.apply(build, (self.build.cast(bare, source.dtype.to_real()), None))
        parts = self.of(source) if is_complex(source) else (source, None)
        return transform.apply(build.at(node, node.loc), parts)

    def real_result(self, node: Node, pair: Pair) -> Value:
        """What a node of `TO_REALS`, or a transform to reals, computes of its operand's parts."""
        build = self.build.at(node, node.loc)
        if node.op in FOURIER:
            return self._fit(self._transformed(node)[0], node)
        real, imaginary = pair
        if node.op == "aten.view_as_real":
            return build("aten.stack", real, imaginary, dim=-1)
        if node.op == "aten.abs":
            squares = [build("aten.mul.Tensor", part, part) for part in pair]
            return build("aten.sqrt", build("aten.add.Tensor", *squares))
        if node.op == "aten.angle":
            return build("aten.atan2", imaginary, real)
        return real if node.op == "aten.real" else imaginary
