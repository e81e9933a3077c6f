"""Images resized to a size or by a factor."""

from __future__ import annotations

import pytest

from tests.export.lowered import check

IMAGE = "  input %x : f32[batch, 3, 6, 4]\n"
EDGES, CORNERS = "align_corners = false", "align_corners = true"


@pytest.mark.parametrize(
    ("op", "output_size", "scale_factors", "more", "size"),
    [
        ("bilinear", "[9, 7]", "none", EDGES, "9, 7"),
        ("bilinear", "[3, 8]", "none", CORNERS, "3, 8"),
        ("bilinear", "none", "[2.0, 1.5]", EDGES, "12, 6"),
        ("bicubic", "[12, 7]", "none", EDGES, "12, 7"),
        ("nearest", "[9, 8]", "none", "", "9, 8"),
        ("nearest", "none", "[2.0, 2.0]", "", "12, 8"),
    ],
)
def test_an_image_is_resized(
    op: str, output_size: str, scale_factors: str, more: str, size: str
) -> None:
    attrs = f"output_size = {output_size}, scale_factors = {scale_factors}"
    attrs += f", {more}" if more else ""
    result = f"%r = aten.upsample_{op}2d.vec(%x) {{{attrs}}} : f32[batch, 3, {size}]"
    check(f"{IMAGE}  {result}\n  return %r")
