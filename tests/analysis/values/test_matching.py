"""Expressions are read as polynomials, and constants are compared to the dtype's rounding."""

from __future__ import annotations

import math

import pytest
import torch

from attngraph.analysis.values.matching import Polynomial, equals, polynomial
from attngraph.ir import parse


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("%y = aten.mul.Scalar(%x) {other = 3.0}", {1: 3.0}),
        ("%y = aten.pow.Tensor_Scalar(%x) {exponent = 3}", {3: 1.0}),
        ("%a = aten.mul.Tensor(%x, %x)\n%y = aten.sub.Tensor(%a, %x) {alpha = 2}", {2: 1, 1: -2}),
        ("%a = aten.add.Scalar(%x) {other = 1}\n%y = aten.square(%a)", {2: 1.0, 1: 2.0, 0: 1.0}),
        ("%a = aten.square(%x)\n%y = aten.square(%a)", None),
        ("%y = aten.mul.Tensor(%x, %other)", None),
        ("%y = aten.add.Tensor(%x, %row)", None),
        ("%y = aten.exp(%x)", None),
    ],
)
def test_polynomial(lines: str, expected: Polynomial | None) -> None:
    graph = parse(
        "graph @main {\ninput %x : f32[4, 24]\ninput %other : f32[4, 24]\ninput %row : f32[24]\n"
        f"{lines}\nreturn %y\n}}"
    )
    assert polynomial(graph.outputs[0], graph.inputs[0]) == expected


def test_constants_are_equal_to_the_rounding_of_their_dtype() -> None:
    half = math.sqrt(0.5)
    assert equals(0.70710678, half, torch.float32)
    assert not equals(0.70710678, half, torch.float64)
    assert not equals(0.7071, half, torch.float32)
    assert equals(0.7071, half, torch.float16)
