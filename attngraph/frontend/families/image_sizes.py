"""Images of any size, padded to the largest or cut into tiles, with the size (rows, columns) of
each.

A model whose encoder takes the sizes pads no image: it looks at each by itself, so that its graph
is of one. A model that lists resolutions (`image_grid_pinpoints`) reads an image as a small one of
the whole and as tiles of the resolution that wastes least; where each tile's features lie follows
from the sizes alone. Models compute it in loops over images, here it is arithmetic on all at once.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.errors import UsageError
from attngraph.frontend.interface.modalities import PIXELS, SIZES

_PACKS = "pack_image_features"
_KNOWN = {
    "self", "image_features", "image_sizes", "vision_feature_select_strategy", "image_newline",
}  # fmt: skip
"""What it takes where the rule is `Tiles`'; others shrink images of many tiles."""
_SHAPES = ((1.0, 0.6), (0.45, 1.0), (0.7, 0.7), (3.0, 2.0))  # of images, by their resolution's


def sizes_taken(model: nn.Module) -> bool:
    """Whether an encoder inside takes the images' sizes, and so pads none."""
    wanted = {PIXELS, SIZES}
    return any(
        wanted <= (taken := set(inspect.signature(part.forward).parameters))
        and "input_ids" not in taken
        for part in model.modules()
    )


def images_apart(images: Mapping[str, Tensor], unit: int) -> list[dict[str, Tensor]]:
    """Each image (1, C, H, W) of padded ones (N, C, H, W), whose sides are multiples of `unit`.

    Raises UsageError where the sizes aren't those of such images.
    """
    pixels, sizes = images[PIXELS], images.get(SIZES)
    if sizes is None:
        sizes = torch.tensor([pixels.shape[2:]] * len(pixels))
    if sizes.ndim != 2 or sizes.shape[1] != 2 or len(sizes) != len(pixels):
        raise UsageError(
            f"{SIZES} must be ({len(pixels)}, 2), rows and columns of each image in {PIXELS}; it "
            f"has shape {tuple(sizes.shape)}."
        )
    found = []
    for image, size in zip(pixels, sizes.tolist(), strict=True):
        height, width = (int(side) for side in size)
        if min(size) < 1 or height > image.shape[-2] or width > image.shape[-1]:
            raise UsageError(
                f"{SIZES} says that an image has {height} x {width} pixels, and {PIXELS} has room "
                f"for {image.shape[-2]} x {image.shape[-1]}."
            )
        if height % unit or width % unit:
            raise UsageError(
                f"An image has {height} x {width} pixels: both must be multiples of {unit}, as the "
                "model's processor resizes them."
            )
        found.append({PIXELS: image[None, :, :height, :width].contiguous()})
    return found


@dataclass(frozen=True)
class Tiles:
    """Tiles of `size` pixels by as many, of `side` tokens by as many, in one of `resolutions`
    (rows, columns of pixels) each."""

    size: int
    side: int
    resolutions: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, model: Any) -> Tiles | None:
        """Those of a model, if it cuts images into such."""
        packing = [kind for part in model.modules() if hasattr(kind := type(part), _PACKS)]
        listed = getattr(model.config, "image_grid_pinpoints", None)
        taken = [set(inspect.signature(getattr(kind, _PACKS)).parameters) for kind in packing]
        if listed is None or taken[:1] != [_KNOWN]:
            return None
        vision = model.config.vision_config
        size = int(vision.image_size)
        pairs = tuple((int(height), int(width)) for height, width in listed)
        return cls(size, size // int(vision.patch_size), pairs)

    @property
    def most(self) -> int:
        """How many tiles an image has at most, with that of the whole."""
        return 1 + max(height * width for height, width in self._grids)

    @property
    def _grids(self) -> list[tuple[int, int]]:
        return [(height // self.size, width // self.size) for height, width in self.resolutions]

    def grids(self, sizes: Tensor) -> Tensor:
        """Rows and columns of tiles (N, 2) of images of sizes (N, 2).

        As `select_best_resolution` of transformers has them: most pixels, then the least waste,
        then the first; its floats are of 64 bits.
        """
        listed = torch.tensor(self.resolutions)
        own = sizes.long()[:, None]
        scales = listed.double() / own.double()
        scale = torch.minimum(scales[..., 0], scales[..., 1])[..., None]
        resized = (own.double() * scale).long().prod(-1)
        pixels = torch.minimum(resized, own.prod(-1))
        waste = listed.prod(-1) - pixels
        worth = ((pixels << 24) - waste) * len(self.resolutions) - torch.arange(len(listed))
        return torch.tensor(self._grids)[worth.argmax(1)]

    def drawn(self, count: int) -> Tensor:
        """Sizes (N, 2) of so many images, as wide as high, wider and higher than a resolution."""
        listed = [self.resolutions[each % len(self.resolutions)] for each in range(count)]
        shapes = [_SHAPES[each % len(_SHAPES)] for each in range(count)]
        return (torch.tensor(listed).reshape(-1, 2) * torch.tensor(shapes).reshape(-1, 2)).long()

    def tokens(self, sizes: Tensor) -> list[int]:
        """How many tokens images of sizes (N, 2) take."""
        counts: list[int] = self._kept(sizes)[1].sum(1).tolist()
        return counts

    def packed(self, features: Tensor, newline: Tensor, sizes: Tensor) -> Tensor:
        """The rows (M, H) of images from features (N, P, L, H) of their tiles, one image behind the
        other: those of the whole, then the lines of its tiles without what pads the image to the
        resolution, with `newline` (H,) at the end of each."""
        places, keep = self._kept(sizes)
        count = torch.arange(features.shape[0])[:, None].expand(keep.shape)
        image, tile, within, ends = (each[keep] for each in (count, *places))
        rows = features[image, tile, within]
        return torch.where(ends[:, None], newline.to(rows.dtype), rows)

    def _kept(self, sizes: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """(tile, token in it, whether it ends a line) of each place of each image, (N, M) each, and
        which places are kept."""
        side, grids = self.side, self.grids(sizes)
        rows, columns = grids[:, :1] * side, grids[:, 1:] * side
        most_rows, most_columns = (side * max(each) for each in zip(*self._grids, strict=True))
        row = torch.arange(most_rows).repeat_interleave(most_columns + 1)[None]
        column = torch.arange(most_columns + 1).repeat(most_rows)[None]
        height, width = sizes.long()[:, :1], sizes.long()[:, 1:]
        # whichever side of the resolution the image doesn't fill is cut, by as much at both ends
        fills_width = width * rows > columns * height
        above = torch.where(fills_width, (rows - height * columns // width) // 2, 0)
        before = torch.where(fills_width, 0, (columns - width * rows // height) // 2)
        ends = column == most_columns
        in_line = (column >= before) & (column < columns - before)
        keep = (row >= above) & (row < rows - above) & (ends | in_line)
        tile = 1 + row // side * grids[:, 1:] + column // side
        tile = torch.where(ends | ~keep, 0, tile)
        within = row % side * side + column % side
        whole = torch.arange(side * side).expand(keep.shape[0], -1)
        first = torch.zeros_like(whole)
        return (
            torch.cat([first, tile], 1),
            torch.cat([whole, within.expand(keep.shape)], 1),
            torch.cat([first.bool(), ends.expand(keep.shape)], 1),
        ), torch.cat([~first.bool(), keep], 1)

    @contextlib.contextmanager
    def as_arithmetic(self, model: nn.Module, images: Mapping[str, Tensor]) -> Iterator[None]:
        """While it lasts, the model packs the features of its tiles (N · P, L, H) as `packed`."""
        (count, tiles), sizes = images[PIXELS].shape[:2], images[SIZES]

        def pack(features: list[Tensor], *_: Any, image_newline: Tensor, **__: Any) -> Any:
            (every,) = features
            apart = every.reshape(count, tiles, *every.shape[1:])
            return [self.packed(apart, image_newline, sizes)], None

        with contextlib.ExitStack() as held:
            for part in model.modules():
                if hasattr(type(part), _PACKS):
                    setattr(part, _PACKS, pack)
                    held.callback(delattr, part, _PACKS)
            yield

    def require(self, images: Mapping[str, Tensor]) -> None:
        """Raises UsageError where images don't have the tiles that their sizes ask for."""
        pixels, sizes = images.get(PIXELS), images.get(SIZES)
        if not isinstance(pixels, Tensor) or not isinstance(sizes, Tensor) or pixels.ndim != 5:
            return  # told where the feeds are looked at
        if sizes.shape != (len(pixels), 2) or bool((sizes < 1).any()):
            raise UsageError(
                f"{SIZES} must be ({len(pixels)}, 2), rows and columns of each image before it was "
                "cut into tiles."
            )
        wanted = 1 + int(self.grids(sizes).prod(-1).max())
        if wanted > pixels.shape[1]:
            raise UsageError(
                f"{PIXELS} has {pixels.shape[1]} tiles for each image, and {SIZES} asks for "
                f"{wanted}: give what the model's processor gives."
            )
