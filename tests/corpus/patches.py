"""Images as rows of patches, with the grid of each image beside them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.models import states

# (time, rows, columns) of each image's patches: of a tower alone, and of a model whose prompts
# have as many placeholders each.
GRIDS = ((1, 4, 4), (1, 4, 8), (1, 8, 4))
EQUAL = ((1, 4, 4), (1, 4, 4), (1, 4, 4))
GRID_NAMES = ("grid_thw", "image_grid_thw")


def grid_name(names: Any) -> str | None:
    """What the forward of these parameters calls its grid, None where it has none."""
    return next((name for name in GRID_NAMES if name in names), None)


def patches(config: Any, grids: Any) -> Tensor:
    """(P, C T H W): the pixels of every patch of the grids, flattened."""
    vision = getattr(config, "vision_config", config)
    channels = _first(vision, "in_channels", "num_channels") or 3
    frames = _first(vision, "temporal_patch_size", "patch_temporal") or 1
    count = sum(math.prod(grid) for grid in grids)
    return states(count, channels * frames * vision.patch_size**2)


def placed_patches(config: Any, batch: int, side: int = 4) -> Tensor:
    """(B, P, 2 + E): patches that have their row and their column, from 1, before them."""
    vision = getattr(config, "vision_config", config)
    width = _first(vision, "patch_embed_hidden_size") or 3 * vision.patch_size**2
    pixels = states(batch, side * side, width)
    steps = torch.arange(1, side + 1).float()
    places = torch.cartesian_prod(steps, steps).expand(batch, -1, -1)
    return torch.cat([places, pixels], -1)


def _first(config: Any, *names: str) -> Any:
    return next((found for name in names if (found := getattr(config, name, None))), None)
