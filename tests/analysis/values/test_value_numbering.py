"""Values have one number if they are made by the same ops of the same sources, and else not."""

from __future__ import annotations

import pytest
import torch

from attngraph.analysis.values.value_numbering import number_values
from attngraph.ir import Value, parse


def _numbers(lines: str, constants: dict[str, torch.Tensor] | None = None) -> list[int]:
    """The numbers of %a and %b."""
    declared = "".join(
        f"parameter %{name} : f32{list(data.shape)}\n" for name, data in (constants or {}).items()
    )
    graph = parse(
        f"graph @main {{\ninput %x : f32[4, 8]\ninput %y : f32[4, 8]\n{declared}{lines}\n"
        "return %a, %b\n}"
    )
    for name, data in (constants or {}).items():
        graph.constants[name].data = data
    roots: list[Value] = list(graph.outputs)
    found = number_values(graph, roots, {})
    return [found[root] for root in roots]


@pytest.mark.parametrize(
    ("lines", "equal"),
    [
        ("%a = aten.exp(%x)\n%b = aten.exp(%x)", True),
        ("%a = aten.exp(%x)\n%b = aten.exp(%y)", False),
        ("%a = aten.exp(%x)\n%b = aten.sin(%x)", False),
        ("%a = aten.mul.Scalar(%x) {other = 2.0}\n%b = aten.mul.Scalar(%x) {other = 3.0}", False),
        ("%p, %a = aten.split.Tensor(%x) {split_size = 2}\n%b = aten.exp(%p)", False),
        ("%p = aten.exp(%x)\n%q = aten.exp(%x)\n%a = aten.sin(%p)\n%b = aten.sin(%q)", True),
        ("%a = aten.rand_like(%x)\n%b = aten.rand_like(%x)", False),  # two draws
    ],
)
def test_numbers_follow_the_ops_and_their_sources(lines: str, equal: bool) -> None:
    one, other = _numbers(lines)
    assert (one == other) is equal


def test_parts_of_one_node_are_other_values() -> None:
    one, other = _numbers("%a, %b = aten.split.Tensor(%x) {split_size = 2}")
    assert one != other


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (torch.ones(8), torch.ones(8), True),
        (torch.ones(8), torch.zeros(8), False),
        (torch.ones(8, 8), torch.ones(8, 8), False),  # too large to be looked at
    ],
)
def test_tiny_constants_are_compared_by_content(
    one: torch.Tensor, other: torch.Tensor, equal: bool
) -> None:
    lines = "%a = aten.mul.Tensor(%x, %c)\n%b = aten.mul.Tensor(%x, %d)"
    lines = lines if one.ndim == 1 else lines.replace("mul.Tensor", "matmul")
    found = _numbers(lines, {"c": one, "d": other})
    assert (found[0] == found[1]) is equal
