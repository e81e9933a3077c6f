"""`attn.rotary` is onnxruntime's `RotaryEmbedding` where that has a kernel, else its products."""

from __future__ import annotations

import pytest
import torch

from tests.export.lowered import check, op_types

_BODY = """
  input %x : {dtype}[batch, seq, {width}]
  input %cos : {dtype}[{rows}, seq, {pairs}]
  input %sin : {dtype}[{rows}, seq, {pairs}]
  %y = attn.rotary(%x, %cos, %sin) {{heads = {heads}, interleaved = {interleaved}}}
  return %y"""


def _body(
    dtype: str, heads: int, size: int, pairs: int, interleaved: bool, rows: str = "batch"
) -> str:
    return _BODY.format(
        dtype=dtype,
        width=heads * size,
        heads=heads,
        pairs=pairs,
        rows=rows,
        interleaved=str(interleaved).lower(),
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "size", "pairs"), [(3, 8, 4), (1, 8, 4), (3, 10, 3), (2, 7, 2)])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_rotary(dtype: str, heads: int, size: int, pairs: int, interleaved: bool) -> None:
    model = check(_body(dtype, heads, size, pairs, interleaved))
    assert op_types(model) == ["RotaryEmbedding"]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [4, 3])
def test_double_precision_has_no_kernel(pairs: int, interleaved: bool) -> None:
    model = check(_body("f64", 3, 8, pairs, interleaved))
    assert "RotaryEmbedding" not in op_types(model)


def test_one_row_of_angles_is_spread_over_the_batch() -> None:
    """onnxruntime wants as many rows as x has."""
    model = check(_body("f32", 3, 8, 4, False, rows="1"))
    assert op_types(model).count("RotaryEmbedding") == 1


def test_large_angles() -> None:
    """The kernel takes cosines, so a position far out costs no precision."""
    positions = torch.tensor([0.0, 1.0, 1e5, 1e6, 8388607.0])
    angles = torch.outer(positions, torch.tensor([1.0, 0.1, 1e-4])).unsqueeze(0).expand(2, -1, -1)
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))
    check(_body("f32", 2, 6, 3, False), inputs=[x, angles.cos(), angles.sin()])
