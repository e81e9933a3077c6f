"""However a rotary embedding is written, it is read as one rotation, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attngraph import passes
from attngraph.frontend.capture import capture
from attngraph.ir import Graph, interpret, verify

pytestmark = pytest.mark.wide

HEADS, WIDTH = 3, 8
PIPELINE = "split-complex,canonicalize,constant-fold,cse,dce,fuse-rotary,dce,canonicalize,cse,dce"
Rotate = Callable[[Tensor], Tensor]


def _angles(length: int, width: int = WIDTH) -> Tensor:
    """(S, R/2)"""
    frequencies = 100.0 ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    return torch.outer(torch.arange(length).to(frequencies.dtype), frequencies)


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def half(x: Tensor) -> Tensor:
    """(B, S, H, D), as Llama."""
    angles = _angles(x.shape[1])
    both = torch.cat((angles, angles), dim=-1)[None, :, None]
    return x * both.cos() + _rotate_half(x) * both.sin()


def half_scaled(x: Tensor) -> Tensor:
    """As YaRN: cosines and sines times a number."""
    angles = _angles(x.shape[1])
    both = torch.cat((angles, angles), dim=-1)[None, :, None]
    return x * (both.cos() * 1.25) + _rotate_half(x) * (both.sin() * 1.25)


def half_of_products(x: Tensor) -> Tensor:
    """As GPT-OSS."""
    angles = _angles(x.shape[1])[None, :, None]
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def half_backwards(x: Tensor) -> Tensor:
    """Turned the other way."""
    angles = _angles(x.shape[1])
    both = torch.cat((angles, angles), dim=-1)[None, :, None]
    return x * both.cos() - _rotate_half(x) * both.sin()


def half_heads_first(x: Tensor) -> Tensor:
    angles = _angles(x.shape[1])
    both = torch.cat((angles, angles), dim=-1)
    x = x.transpose(1, 2)
    return (x * both.cos() + _rotate_half(x) * both.sin()).transpose(1, 2)


def half_by_roll(x: Tensor) -> Tensor:
    angles = _angles(x.shape[1])
    both = torch.cat((angles, angles), dim=-1)[None, :, None]
    signs = torch.cat((-torch.ones(WIDTH // 2), torch.ones(WIDTH // 2)))
    return x * both.cos() + torch.roll(x, WIDTH // 2, -1) * (both.sin() * signs)


def half_by_matrix(x: Tensor) -> Tensor:
    angles = _angles(x.shape[1])
    both = torch.cat((angles, angles), dim=-1)[None, :, None]
    exchange = torch.zeros(WIDTH, WIDTH)
    for i in range(WIDTH // 2):
        exchange[i + WIDTH // 2, i], exchange[i, i + WIDTH // 2] = -1.0, 1.0
    return x * both.cos() + (x @ exchange.to(x.dtype)) * both.sin()


def half_by_stack(x: Tensor) -> Tensor:
    angles = _angles(x.shape[1])[None, :, None]
    first, second = x.unflatten(-1, (2, WIDTH // 2)).unbind(-2)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((first * cos - second * sin, first * sin + second * cos), -2).flatten(-2)


def interleaved(x: Tensor) -> Tensor:
    """As GPT-J."""
    angles = _angles(x.shape[1]).repeat_interleave(2, dim=-1)[None, :, None]
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * angles.cos() + turned * angles.sin()


def interleaved_complex(x: Tensor) -> Tensor:
    """As Llama's own code."""
    angles = _angles(x.shape[1])
    turn = torch.polar(torch.ones_like(angles), angles)[None, :, None]
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(3)


def interleaved_matrices(x: Tensor) -> Tensor:
    """A 2 × 2 matrix per position and pair."""
    angles = _angles(x.shape[1])
    cos, sin = angles.cos(), angles.sin()
    matrices = torch.stack((cos, -sin, sin, cos), dim=-1).unflatten(-1, (2, 2))
    pairs = x.unflatten(-1, (-1, 2))
    return torch.einsum("sdij,bshdj->bshdi", matrices, pairs).flatten(-2)


def interleaved_flux(x: Tensor) -> Tensor:
    """As Flux: columns of the matrices times the parts, broadcast and added."""
    angles = _angles(x.shape[1])
    cos, sin = angles.cos(), angles.sin()
    matrices = torch.stack((cos, -sin, sin, cos), dim=-1).unflatten(-1, (2, 2))[:, None]
    pairs = x.reshape(*x.shape[:-1], -1, 1, 2)
    result = matrices[..., 0] * pairs[..., 0] + matrices[..., 1] * pairs[..., 1]
    return result.reshape(x.shape)


def partial(x: Tensor) -> Tensor:
    """As GPT-NeoX."""
    angles = _angles(x.shape[1], WIDTH // 2)
    both = torch.cat((angles, angles), dim=-1)[None, :, None]
    turned, rest = x[..., : WIDTH // 2], x[..., WIDTH // 2 :]
    return torch.cat((turned * both.cos() + _rotate_half(turned) * both.sin(), rest), dim=-1)


def partial_interleaved(x: Tensor) -> Tensor:
    """As ChatGLM."""
    angles = _angles(x.shape[1], WIDTH // 2)[None, :, None]
    turned, rest = x.split((WIDTH // 2, WIDTH // 2), dim=-1)
    pairs = turned.unflatten(-1, (-1, 2))
    cos, sin = angles.cos(), angles.sin()
    first = pairs[..., 0] * cos - pairs[..., 1] * sin
    second = pairs[..., 1] * cos + pairs[..., 0] * sin
    return torch.cat((torch.stack((first, second), -1).flatten(-2), rest), dim=-1)


def sections(x: Tensor) -> Tensor:
    """As M-RoPE: some pairs turn with one position, some with another."""
    one = _angles(x.shape[1])
    other = 2.0 * one
    both = torch.stack((torch.cat((one, one), -1), torch.cat((other, other), -1)))
    cos, sin = (
        torch.cat([part[i % 2] for i, part in enumerate(table.split([1, 3] * 2, dim=-1))], dim=-1)
        for table in (both.cos(), both.sin())
    )
    return x * cos[None, :, None] + _rotate_half(x) * sin[None, :, None]


def gathered(x: Tensor) -> Tensor:
    """Rows of tables, chosen by position."""
    angles = torch.cat((_angles(64), _angles(64)), dim=-1)
    positions = torch.arange(x.shape[1]).flip(0).expand(x.shape[0], -1)
    cos, sin = angles.cos()[positions][:, :, None], angles.sin()[positions][:, :, None]
    return x * cos + _rotate_half(x) * sin


def tables_times_decay(x: Tensor) -> Tensor:
    """As xPos: the turned features are also scaled by position."""
    angles = _angles(x.shape[1])
    both = torch.cat((angles, angles), dim=-1)[None, :, None]
    decay = torch.exp(-0.1 * angles[:, :1])[None, :, None]
    return x * both.cos() * decay + _rotate_half(x) * both.sin() * decay


def grouped_heads(x: Tensor) -> Tensor:
    """The heads in one axis with the features until they are paired."""
    return interleaved_complex(x.flatten(2).unflatten(2, (HEADS, WIDTH)))


ROTATIONS: list[Rotate] = [
    half,
    half_scaled,
    half_of_products,
    half_backwards,
    half_heads_first,
    half_by_roll,
    half_by_matrix,
    half_by_stack,
    interleaved,
    interleaved_complex,
    interleaved_matrices,
    interleaved_flux,
    partial,
    partial_interleaved,
    sections,
    gathered,
    tables_times_decay,
    grouped_heads,
]


def other_frequencies(x: Tensor) -> Tensor:
    """The halves of the table differ: the angles of a pair aren't one angle."""
    angles = _angles(x.shape[1])
    both = torch.cat((angles, 1.001 * angles), dim=-1)[None, :, None]
    return x * both.cos() + _rotate_half(x) * both.sin()


def unsigned(x: Tensor) -> Tensor:
    """A reflection."""
    angles = _angles(x.shape[1])
    both = torch.cat((angles, angles), dim=-1)[None, :, None]
    return x * both.cos() + torch.roll(x, WIDTH // 2, -1) * both.sin()


def mixed_pairs(x: Tensor) -> Tensor:
    """Tables for neighbours, features by halves."""
    angles = _angles(x.shape[1]).repeat_interleave(2, dim=-1)[None, :, None]
    return x * angles.cos() + _rotate_half(x) * angles.sin()


class _Module(nn.Module):
    def __init__(self, rotate: Rotate) -> None:
        super().__init__()
        self.rotate = rotate

    def forward(self, x: Tensor) -> Tensor:
        return self.rotate(x.unflatten(-1, (HEADS, WIDTH)))


def _graph(rotate: Rotate) -> tuple[Graph, Graph]:
    x = torch.randn(2, 5, HEADS * WIDTH)
    dims = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("seq", max=60)},)
    graphs = [capture(_Module(rotate), (x,), dynamic_shapes=dims).graph for _ in range(2)]
    passes.run(graphs[1], PIPELINE)
    verify(graphs[1])
    return graphs[0], graphs[1]


def _ops(graph: Graph) -> list[str]:
    return [node.op for node in graph]


def _assert_equal(before: Graph, after: Graph) -> None:
    for batch, length in ((2, 5), (1, 1), (3, 60)):
        torch.manual_seed(0)
        x = torch.randn(batch, length, HEADS * WIDTH)
        (expected,), (found,) = interpret(before, (x,)), interpret(after, (x,))
        # Two products and a sum, in another order.
        tolerance = 4 * torch.finfo(x.dtype).eps * float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("rotate", ROTATIONS, ids=lambda rotate: rotate.__name__)
def test_a_rotation_is_read(rotate: Rotate) -> None:
    before, after = _graph(rotate)
    ops = _ops(after)
    assert ops.count("attn.rotary") == 1
    assert not {"aten.cat", "aten.stack", "aten.neg"} & set(ops[ops.index("attn.rotary") :])
    assert "aten.permute" not in ops
    (turned,) = (node for node in after if node.op == "attn.rotary")
    assert bool(turned.attrs.get("interleaved")) == (
        "half" not in rotate.__name__
        and ("interleaved" in rotate.__name__ or rotate is grouped_heads)
    )
    _assert_equal(before, after)


@pytest.mark.parametrize(
    "rotate",
    [other_frequencies, unsigned, mixed_pairs],
    ids=lambda rotate: rotate.__name__,
)
def test_what_is_no_rotation_stays(rotate: Rotate) -> None:
    before, after = _graph(rotate)
    assert "attn.rotary" not in _ops(after)
    _assert_equal(before, after)


def test_only_half_of_each_table_is_built() -> None:
    _, after = _graph(half)
    tables = [node.output for node in after if node.op in ("aten.cos", "aten.sin")]
    assert [table.shape[-1] for table in tables] == [WIDTH // 2, WIDTH // 2]
