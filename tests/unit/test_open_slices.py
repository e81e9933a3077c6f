"""The lengths of slices of an axis whose size is open, as Python has them."""

from __future__ import annotations

import itertools

import pytest
import torch

from attngraph.errors import IRError
from attngraph.ir import Dim, TensorType, interpret, parse, verify
from attngraph.ir.dims import parse_dim, same, substitute

PLACES = (None, *range(-4, 5))


def _cut(low: int, start: int | None, end: int | None) -> Dim:
    ends = {"start": start, "end": end}
    said = "".join(f", {name} = {at}" for name, at in ends.items() if at is not None)
    graph = parse(f"""graph @main {{
  dim n = 9 in {low}..
  input %x : f32[2, n]
  %cut = aten.slice.Tensor(%x) {{dim = 1{said}}}
  return %cut
}}""")
    return graph.outputs[0].shape[1]


def test_a_slice_has_the_length_that_python_says() -> None:
    for start, end in itertools.product(PLACES, PLACES):
        length = _cut(1, start, end)
        for size in range(1, 12):
            assert substitute(length, {"n": size}) == len(range(size)[start:end])


def test_the_least_size_says_which_places_an_axis_has() -> None:
    assert _cut(4, None, 4) == 4
    assert same(_cut(3, None, 4), parse_dim("min(4, n)"))
    assert same(_cut(1, None, 1), 1)


@pytest.mark.parametrize(
    ("one", "other", "are_same"),
    [
        ("min(5, n) - 2", "min(3, n - 2)", True),
        ("n - max(0, n - 2)", "min(2, n)", True),
        ("8 * min(2, n)", "min(16, 8 * n)", True),
        ("(1 + max(0, n - 2 - max(0, n - 7))) // 2", "(1 + max(0, min(5, n - 2))) // 2", True),
        ("min(5, n) - 2", "min(3, n - 1)", False),
        ("n - min(2, n)", "min(0, n - 2)", False),
    ],
)
def test_lengths_are_one_however_they_are_written(one: str, other: str, are_same: bool) -> None:
    assert same(parse_dim(one), parse_dim(other)) == are_same


def test_the_verifier_compares_lengths_at_sizes_where_they_are_written_otherwise() -> None:
    text = """graph @main {
  dim n = 9 in 1..
  require n >= 2
  input %x : f32[2, n]
  %cut = aten.slice.Tensor(%x) {dim = 1, start = -7, end = -2}
  return %cut
}"""
    graph = parse(text)
    written = parse_dim("max(0, n - 2 - max(0, n - 7))")
    graph.outputs[0].type = TensorType(torch.float32, (2, written))
    verify(graph)
    graph.outputs[0].type = TensorType(torch.float32, (2, parse_dim("max(0, n - 2)")))
    with pytest.raises(IRError, match="is declared"):
        verify(graph)


def test_parts_whose_number_follows_from_a_size_are_an_error_that_is_told() -> None:
    graph = parse("""graph @main {
  dim n = 9 in 1..
  input %x : f32[n]
  %a, %b = aten.chunk(%x) {chunks = 2}
  return %a
}""")
    with pytest.raises(IRError, match="1 results where the graph has 2"):
        interpret(graph, (torch.zeros(1),))


@pytest.mark.parametrize(
    ("one", "other", "are_same"),
    [
        ("(n - 3) // 4", "((n - 1) // 2 - 1) // 2", True),
        ("(n - 3) // 2 + 1", "(n - 1) // 2", True),
        ("(4 * n + m + 5) // 4", "n + 1 + (m + 1) // 4", True),
        ("(n // 3 + m) // 2", "(n + 3 * m) // 6", True),
        ("-n // 2", "-((n + 1) // 2)", False),  # equal, and not shown
        ("(n - 3) // 4", "(n // 2 - 1) // 2", False),  # 0 and 1 at n = 6
        ("(2 * (n // 2)) // 4", "n // 4", True),
    ],
)
def test_quotients_of_quotients(one: str, other: str, are_same: bool) -> None:
    assert same(parse_dim(one), parse_dim(other)) == are_same
