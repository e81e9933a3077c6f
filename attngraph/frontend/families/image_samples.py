"""Images to trace and try a model with, of the size that its config says."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim

from attngraph.errors import UsageError
from attngraph.frontend.families.image_sizes import Tiles, sizes_taken
from attngraph.frontend.interface.modalities import (
    GRID,
    IN_ROWS,
    PATCH_PLACES,
    PIXELS,
    SHOWN,
    SIZES,
)

SHAPES = ((2, 3), (1, 2), (3, 1), (2, 2))  # of images in tokens, in checks
APART = ((2, 3), (4, 2), (3, 3), (2, 2))  # of those of which a graph takes one, at least 2 by 2


def sample_images(model: Any, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Two images of the size that the config says, and their dynamic dims. Raises UsageError."""
    vision: Any = getattr(model.config, "vision_config", None)
    if GRID in inspect.signature(model.forward).parameters:
        try:
            return _patches(vision, model.dtype)
        except AttributeError as error:
            raise UsageError(
                f"The config of {name} says no {error.name} of its patches, so images can't be "
                f"made: give samples, as images={{{PIXELS!r}: tensor, {GRID!r}: tensor}}."
            ) from error
    if PATCH_PLACES in inspect.signature(model.forward).parameters:
        return _placed(model.config, model.dtype)
    if sizes_taken(model):
        return _padded(model.config, model.dtype)
    if (tiles := Tiles.of(model)) is not None:
        return _tiles(tiles, vision, model.dtype)
    size = getattr(vision, "image_size", None)
    if size is None:
        raise UsageError(
            f"The config of {name} says no image_size: give samples, such as "
            f"images={{{PIXELS!r}: tensor}} with image_shapes."
        )
    height, width = (size, size) if isinstance(size, int) else size
    channels = int(getattr(vision, "num_channels", 3))
    seed = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, channels, int(height), int(width), generator=seed).to(model.dtype)
    if SHOWN not in inspect.signature(model.forward).parameters:
        return {PIXELS: drawn}, {PIXELS: {0: Dim("images")}}
    axes = {1: Dim("images")}
    return {PIXELS: drawn[None], SHOWN: parts_shown(drawn)[None]}, {PIXELS: axes, SHOWN: axes}


def parts_shown(pixels: Tensor) -> Tensor:
    """A mask (N, H, W) of images (N, C, H, W): all of every second one, the left half of others."""
    shown = torch.ones(len(pixels), *pixels.shape[2:], dtype=torch.bool)
    shown[1::2, :, pixels.shape[-1] // 2 :] = False
    return shown


def _patches(vision: Any, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Two images of different sizes as patches, one token of them behind the other."""
    merged, seed = int(vision.spatial_merge_size), torch.Generator().manual_seed(0)
    names = ("in_channels", "in_chans", "num_channels")
    channels = next((int(n) for n in (getattr(vision, name, None) for name in names) if n), 3)
    width = channels * int(vision.patch_size) ** 2 * int(getattr(vision, "temporal_patch_size", 1))
    grid = torch.tensor([[1, *SHAPES[0]], [1, *SHAPES[1]]]) * torch.tensor([1, merged, merged])
    pixels = torch.randn(int(grid.prod(-1).sum()), width, generator=seed).to(dtype)
    rows = merged**2 * Dim("image_tokens")
    return {PIXELS: pixels, GRID: grid}, {PIXELS: {0: rows}, GRID: {0: Dim("images")}}


def _placed(config: Any, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Two images as patches in rows of one length, each with its place, and the rest padded."""
    shapes, merged = torch.tensor(SHAPES[:2]), int(config.vision_config.pooling_kernel_size)
    count = merged**2 * int(torch.tensor(SHAPES).prod(-1).max())
    width = 3 * int(config.vision_config.patch_size) ** 2
    pixels = torch.rand(2, count, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    axes = {0: Dim("images"), 1: merged**2 * Dim("image_tokens")}
    found = {PIXELS: pixels, PATCH_PLACES: patches_at(config, shapes, count)}
    return found, dict.fromkeys(found, axes)


def patches_at(config: Any, shapes: Tensor, count: int) -> Tensor:
    """Column and row (N, P, 2) of `count` patches of images of shapes (N, 2), which are rows and
    columns of tokens; −1 behind an image's last one."""
    merged = int(config.vision_config.pooling_kernel_size)
    rows, columns = (shapes * merged).T[..., None]
    every = torch.arange(count)[None]
    at = torch.stack([every % columns, every // columns], -1)
    return torch.where((every < rows * columns)[..., None], at, -1)


def sides(config: Any) -> int:
    """What the sides of an image are multiples of, where an encoder takes images of any size."""
    return int(config.vision_config.patch_size) * int(getattr(config, "spatial_merge_size", 1))


def _padded(config: Any, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Two images of different sizes, padded to the larger; the dims are those of one by itself."""
    unit, vision = sides(config), config.vision_config
    sizes = torch.tensor(APART[:2]) * unit
    shape = (2, int(getattr(vision, "num_channels", 3)), *sizes.amax(0).tolist())
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    axes = {2: unit * Dim("rows", min=2), 3: unit * Dim("columns", min=2)}
    return {PIXELS: pixels, SIZES: sizes}, {PIXELS: axes}


def _tiles(
    tiles: Tiles, vision: Any, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Two images of different shapes as tiles, fewer of the second one where it can."""
    sizes = tiles.drawn(2)
    channels = int(getattr(vision, "num_channels", 3))
    shape = (2, tiles.most, channels, tiles.size, tiles.size)
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    images = Dim("images")
    found = {PIXELS: pixels, SIZES: sizes}
    shapes: dict[str, Any] = {PIXELS: {0: images, 1: Dim("tiles")}, SIZES: {0: images}}
    if tiles.shrunk is not None:
        found[IN_ROWS], shapes[IN_ROWS] = torch.ones(2, dtype=torch.int64), {0: Dim("image_rows")}
    return found, shapes
