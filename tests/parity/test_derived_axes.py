"""An axis whose size is made of a dim, such as 8*c, takes no size but those, in any session."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from attngraph import Optimized, optimize
from attngraph.errors import ParityError, UsageError
from attngraph.export.runtime.session import Session
from attngraph.export.target import Target
from attngraph.ir import parse
from attngraph.ir.ranges import RANGES_KEY, Ranges
from attngraph.verification.stored_ranges import require_checked

pytestmark = pytest.mark.wide


class Blocks(nn.Module):
    """Sums within blocks of 8 rows."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        return x.reshape(batch, length // 8, 8, width).cumsum(2).reshape(batch, length, width)


class Edges(nn.Module):
    """What lies between the 2*n + 1 edges of n pairs, and the pairs."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x[:, 1:].reshape(x.shape[0], -1, 2).sum(-1) + y


@pytest.fixture(scope="module")
def blocks() -> Optimized:
    return optimize(Blocks(), (torch.randn(2, 40, 4),), dynamic_shapes=({1: 8 * Dim("c", max=9)},))


@pytest.fixture(scope="module")
def edges() -> Optimized:
    n = Dim("n", min=2, max=9)
    inputs = torch.randn(2, 11), torch.randn(2, 5)
    return optimize(Edges(), inputs, dynamic_shapes=({1: 2 * n + 1}, {1: n}))


def _open(optimized: Optimized, path: Path) -> Session:
    optimized.save(path)
    require_checked(path, _metadata(path))
    return Session.open(path, Target("cpu"))


def _metadata(path: Path) -> dict[str, str]:
    return {entry.key: entry.value for entry in onnx.load(path).metadata_props}


def test_multiples_are_taken_and_nothing_between(blocks: Optimized, tmp_path: Path) -> None:
    session = _open(blocks, tmp_path / "m.onnx")
    for length in (8, 40, 72):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(blocks(x), Blocks()(x))
        torch.testing.assert_close(session.run([x])[0], Blocks()(x))
    for length in (7, 9, 20, 71):
        x = torch.randn(2, length, 4)
        with pytest.raises(UsageError, match=f"axis 1 is {length}; the model takes multiples of 8"):
            blocks(x)
        with pytest.raises(UsageError, match=r"they must have c ≤ 9, x.shape\[1\] = 8\*c"):
            session.run([x])


def test_the_range_of_the_dim_is_that_of_what_is_made_of_it(
    blocks: Optimized, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"axis 1 is 80, where dim 'c' is 10; .* for at most 9"):
        blocks(torch.randn(2, 80, 4))
    with pytest.raises(UsageError, match="axis 1 is empty"):
        blocks(torch.randn(2, 0, 4))
    with pytest.raises(UsageError, match="they must have c ≤ 9"):
        _open(blocks, tmp_path / "m.onnx").run([torch.randn(2, 80, 4)])


@pytest.mark.parametrize(
    ("rows", "pairs", "told"),
    [
        (12, 5, r"axis 1 is 12; the model takes sizes 1 \+ 2\*n there"),
        (13, 5, r"axis 1 is 13; the model takes 1 \+ 2\*n there, and n is 5"),
        (9, 5, r"axis 1 is 9; the model takes 1 \+ 2\*n there, and n is 5"),
    ],
)
def test_two_axes_of_one_dim_go_together(
    rows: int, pairs: int, told: str, edges: Optimized, tmp_path: Path
) -> None:
    session = _open(edges, tmp_path / "m.onnx")
    good = torch.randn(2, 13), torch.randn(2, 6)
    torch.testing.assert_close(edges(*good), Edges()(*good))
    torch.testing.assert_close(session.run(good)[0], Edges()(*good))
    wrong = torch.randn(2, rows), torch.randn(2, pairs)
    with pytest.raises(UsageError, match=told):
        edges(*wrong)
    with pytest.raises(UsageError, match=r"n ≤ 9, x.shape\[1\] = 1 \+ 2\*n"):
        session.run(wrong)


def test_a_size_that_every_axis_has_is_not_compared() -> None:
    """n + 1 is any size above n's least, unless another axis tells n; a sum of dims is no axis of
    one."""
    text = "graph @main {{\n  dim n = 5 in 1..\n  dim m = 5 in 1..\n{}\n  return %x\n}}"
    for inputs, found in {
        "  input %x : f32[n + 1]": [],
        "  input %x : f32[n]\n  input %y : f32[n]": [],
        "  input %x : f32[n + m]\n  input %y : f32[n]\n  input %z : f32[m]": [],
        "  input %x : f32[n + 1]\n  input %y : f32[n]": ["x.shape[0] = 1 + n"],
        "  input %x : f32[2, 3*n]": ["x.shape[1] = 3*n"],
        "  input %x : f32[n*n]": [],
    }.items():
        assert [axis.told for axis in Ranges.of(parse(text.format(inputs))).axes] == found


def test_ranges_with_derived_axes_are_read_back(edges: Optimized) -> None:
    assert edges.ranges.axes
    assert Ranges.from_json(edges.ranges.to_json()) == edges.ranges


@pytest.mark.parametrize("axis", [["x", 1, "n"], ["x", 1, "n*n"], ["x", 1], "x", ["x", 1, "n.a"]])
def test_derived_axes_that_were_tampered_with_are_refused(axis: object, tmp_path: Path) -> None:
    text = json.dumps({"dims": {}, "relations": [], "axes": [axis]})
    with pytest.raises(UsageError, match="the ranges of its dims can't be read"):
        Ranges.of_file({RANGES_KEY: text}, tmp_path)


def test_a_file_that_tells_another_multiple_than_it_checks_is_found(
    blocks: Optimized, tmp_path: Path
) -> None:
    path = tmp_path / "m.onnx"
    blocks.save(path)
    metadata = _metadata(path)
    metadata[RANGES_KEY] = metadata[RANGES_KEY].replace("8*c", "4*c")
    with pytest.raises(ParityError, match=r"sizes have c ≤ 9, x.shape\[1\] = 4\*c, and doesn't"):
        require_checked(path, metadata)
