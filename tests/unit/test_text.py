"""The text form parses back to the same graph, whatever its attributes, dims and locations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._sympy import functions as torch_sympy

from attngraph.errors import IRError
from attngraph.ir import Graph, Loc, TensorType, format_graph, parse, verify
from attngraph.ir.dims import Dim, as_dim, format_dim, parse_dim, substitute, symbol
from attngraph.ir.parser import parse_attr, parse_type
from attngraph.ir.printer import format_attr
from attngraph.ir.types import DTYPES, ScalarType

SIZES = {"batch": 3, "seq": 10, "past": 7}
BINARY = [
    lambda a, b: a + b,
    lambda a, b: a - b,
    lambda a, b: a * b,
    torch_sympy.FloorDiv,
    torch_sympy.Mod,
    torch_sympy.Max,
    torch_sympy.Min,
]


def _combine(children: st.SearchStrategy[sympy.Expr]) -> st.SearchStrategy[sympy.Expr]:
    return st.builds(lambda f, a, b: f(a, b), st.sampled_from(BINARY), children, children)


numbers = st.integers(1, 64).map(sympy.Integer)
leaves = numbers | st.sampled_from(sorted(SIZES)).map(symbol)


def _exists(expr: sympy.Expr) -> bool:
    return not expr.has(sympy.zoo, sympy.nan)


@st.composite
def dims(draw: st.DrawFn) -> Dim:
    """Expressions that torch.export may write for a size; none divides by zero."""
    try:
        expr = draw(st.recursive(leaves, _combine, max_leaves=6))
        substitute(expr, SIZES)
    except (ZeroDivisionError, AssertionError):
        expr = symbol("seq")
    return as_dim(expr if _exists(expr) else symbol("seq"))


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.sampled_from(sorted(DTYPES.values(), key=str))
    | st.sampled_from([torch.contiguous_format, torch.channels_last])
    | dims()
)
attributes = st.recursive(scalars, lambda items: st.lists(items, max_size=4), max_leaves=8)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float):
        return type(b) is float and a == b and math.copysign(1, a) == math.copysign(1, b)
    if isinstance(a, complex) and isinstance(b, complex):
        return _same(a.real, b.real) and _same(a.imag, b.imag)
    return bool(type(a) is type(b) and a == b) or (isinstance(a, sympy.Basic) and a == b)


@given(dims())
def test_a_dim_expression_parses_back(dim: Dim) -> None:
    read = parse_dim(format_dim(dim))
    assert read == dim
    assert substitute(read, SIZES) == substitute(dim, SIZES)


@given(attributes)
def test_an_attribute_parses_back(value: Any) -> None:
    assert _same(parse_attr(format_attr(value)), value)


@given(
    attrs=st.dictionaries(st.sampled_from(["alpha", "dim", "size", "value"]), attributes),
    shape=st.lists(dims(), max_size=3),
    place=st.tuples(st.text(), st.integers(0, 9999), st.text()),
    fused=st.lists(st.tuples(st.text(), st.integers(0, 9999), st.text()), max_size=2),
)
def test_a_graph_parses_back(
    attrs: dict[str, Any],
    shape: list[Dim],
    place: tuple[str, int, str],
    fused: list[tuple[str, int, str]],
) -> None:
    graph = Graph()
    type = TensorType(torch.float32, tuple(shape))
    x = graph.add_input("x", type)
    loc = Loc(*place, tuple(Loc(*item) for item in fused))
    node = graph.create("aten.relu", [x, None], attrs, types=[type], loc=loc)
    graph.set_outputs([node.output], [place[0]])
    text = format_graph(graph)
    read = parse(text)
    assert format_graph(read) == text
    (again,) = read
    assert again.loc == loc
    assert again.output.type == type
    assert read.output_names == graph.output_names
    assert all(_same(again.attrs[name], value) for name, value in attrs.items())


def test_every_kind_of_line_prints_as_it_was_read() -> None:
    text = """graph @model.main {
  dim batch = 3 in 1..
  dim seq = 9 in 2..64
  dim u0 = 8 in 0..
  input %ids : i64[batch, seq]
  parameter %embed.weight : f32[100, 4]
  constant %fill = [-inf, 0.5] : f32[2]
  constant %on = true : bool[]
  %x = aten.embedding(%embed.weight, %ids) : f32[batch, seq, 4] @ "my model.py":3 "embed"
  %n = aten.item(%on) : int(u0)
  %a, %b = aten.split.Tensor(%x) {split_size = 2, dim = -1} : f32[batch, seq, 2], f32[batch, seq, 2]
  %y = aten.index.Tensor(%a, none, %ids) : f32[batch, batch, seq, 2]
  return %y as "my \\"y\\"", %b
}
"""
    assert format_graph(parse(text)) == text


def test_types_that_are_left_out_are_inferred() -> None:
    graph = parse(
        "graph @main {\n dim seq = 5 in 2..\n input %x : f32[seq, 4]\n"
        " %a, %b = aten.split.Tensor(%x) {split_size = 3, dim = 1}\n return %b\n}"
    )
    assert [str(value.type) for value in next(iter(graph)).outputs] == [
        "f32[seq, 3]",
        "f32[seq, 1]",
    ]
    verify(graph)


def test_weights_come_by_name_and_large_ones_are_not_written_out() -> None:
    weight = torch.randn(17)
    graph = Graph()
    graph.set_outputs([graph.add_constant("w", weight), graph.add_constant("v", torch.ones(16))])
    text = format_graph(graph)
    assert "parameter %w : f32[17]" in text
    read = parse(text, {"w": weight})
    assert read.constants["w"].data is weight
    assert parse(text).constants["w"].data is None
    data = read.constants["v"].data
    assert data is not None
    assert torch.equal(data, torch.ones(16))


def test_only_dims_that_occur_are_printed() -> None:
    graph = parse(
        "graph @main {\n dim seq = 5 in 2..\n dim other = 5 in 2..\n"
        " input %x : f32[seq]\n return %x\n}"
    )
    assert "dim seq" in format_graph(graph)
    assert "dim other" not in format_graph(graph)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("%a = aten.relu(%y) : f32[2]", "%y is not defined"),
        ("%x = aten.relu(%x) : f32[2]", "%x is defined twice"),
        ("%a = aten.relu(%x : f32[2]", "bracket is not closed"),
        ("%a = aten.relu(%x) : f33[2]", "is not a type"),
        ("%a = aten.relu(%x) : f32[2 +]", "is not a dimension expression"),
        ("%a = aten.relu(%x) : f32[__import__('os')]", "is not a dimension expression"),
        ("%a = aten.no_such_op(%x)", "is not an operator"),
        ("%a = aten.relu(%x) : f32[2] @ nowhere", "is not a source location"),
        ("constant %c = [1.0] : f32[seq]", "needs a static tensor type"),
        ("return none", "can't return none"),
        ("what is this", "expected dim, input"),
    ],
)
def test_a_line_that_does_not_parse_is_named(line: str, reason: str) -> None:
    with pytest.raises(IRError, match=f"Line 3 of the graph doesn't parse: .*{reason}") as error:
        parse(f"graph @main {{\n input %x : f32[2]\n {line}\n}}")
    assert line in str(error.value)


def test_runtime_scalars_have_types() -> None:
    for type in (ScalarType("int", "u0"), ScalarType("float"), ScalarType("bool")):
        assert parse_type(str(type)) == type
