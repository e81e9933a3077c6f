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
from attngraph.frontend.interface.modalities import IN_ROWS, PIXELS, SIZES, refuse_mixed

_PACKS = "pack_image_features"
_COMMON = {"self", "image_features", "image_sizes", "image_newline"}
_KNOWN = _COMMON | {"vision_feature_select_strategy"}
"""What it takes where the rule is `Tiles`'."""
_SHRINKING = _COMMON | {"vision_aspect_ratio"}
"""What the config of a model has that shrinks images of many tiles."""
_RATIO = 1.1  # by which an image's sides are too long before it is
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
class _Places:
    """Where the tokens of images come from, (N, M) each: the sum of `sources`, each a tile, a token
    in it and a weight, or a new line where one `ends`; those that are kept."""

    sources: tuple[tuple[Tensor, Tensor, Tensor | None], ...]
    ends: Tensor
    keep: Tensor


@dataclass(frozen=True)
class Tiles:
    """Tiles of `size` pixels by as many, of `side` tokens by as many, in one of `resolutions`
    (rows, columns of pixels) each.

    Where they are `shrunk`, an image has about the tokens of so many tiles at most, and which
    images are cut into tiles is said: those that stand alone in their row of text are.
    """

    size: int
    side: int
    resolutions: tuple[tuple[int, int], ...]
    shrunk: int | None = None

    @classmethod
    def of(cls, model: Any) -> Tiles | None:
        """The tiles into which a model cuts images, if it does."""
        packing = [kind for part in model.modules() if hasattr(kind := type(part), _PACKS)]
        listed = getattr(model.config, "image_grid_pinpoints", None)
        taken = [set(inspect.signature(getattr(kind, _PACKS)).parameters) for kind in packing]
        if listed is None or taken[-1:] not in ([_KNOWN], [_SHRINKING]):
            return None
        vision, shrunk = model.config.vision_config, None
        if taken[-1] == _SHRINKING:
            shrunk = int(model.config.vision_aspect_ratio.removeprefix("anyres_max_"))
        size = int(vision.image_size)
        pairs = tuple((int(height), int(width)) for height, width in listed)
        return cls(size, size // int(vision.patch_size), pairs, shrunk)

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
        """Sizes (N, 2) of so many images, as wide as high, wider and higher than a resolution; the
        largest first, where such are shrunk."""
        known = self.resolutions
        if self.shrunk is not None:
            known = tuple(sorted(known, key=lambda each: -each[0] * each[1]))
        listed = [known[each % len(known)] for each in range(count)]
        shapes = [_SHAPES[each % len(_SHAPES)] for each in range(count)]
        return (torch.tensor(listed).reshape(-1, 2) * torch.tensor(shapes).reshape(-1, 2)).long()

    def tokens(self, sizes: Tensor, alone: Tensor | None = None) -> list[int]:
        """How many tokens images of sizes (N, 2) take; only those `alone` (N,) have tiles."""
        counts: list[int] = self._kept(sizes, alone).keep.sum(1).tolist()
        return counts

    def packed(
        self, features: Tensor, newline: Tensor, sizes: Tensor, alone: Tensor | None = None
    ) -> Tensor:
        """The rows (M, H) of images from features (N, P, L, H) of their tiles, one image behind the
        other: those of the whole, then, where it is `alone` (N,), the lines of its tiles without
        what pads the image to the resolution, with `newline` (H,) at the end of each, or once."""
        places = self._kept(sizes, alone)
        keep = places.keep
        count = torch.arange(features.shape[0])[:, None].expand(keep.shape)
        rows: Tensor | None = None
        for tile, within, weight in places.sources:
            tile = tile.clamp(max=features.shape[1] - 1)  # of sizes that ask for more: `require`
            own = features[count[keep], tile[keep], within[keep]]
            own = own if weight is None else own * weight[keep][:, None].to(own.dtype)
            rows = own if rows is None else rows + own
        assert rows is not None
        return torch.where(places.ends[keep][:, None], newline.to(rows.dtype), rows)

    def _kept(self, sizes: Tensor, alone: Tensor | None = None) -> _Places:
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
        rows, columns = rows - 2 * above, columns - 2 * before
        lines, line = self._shrunk(rows, columns)
        if alone is not None:
            lines = torch.where(alone[:, None], lines, 1)
            line = torch.where(alone[:, None], line, 0)
        ends = (column == most_columns).expand(grids.shape[0], -1)
        keep = (row < lines) & (ends | (column < line))
        whole = torch.arange(side * side).expand(grids.shape[0], -1)
        first = torch.zeros_like(whole)
        sources: list[tuple[Tensor, Tensor, Tensor | None]] = []
        across = _between(column, columns, line, shrinks=self.shrunk is not None)
        for y, down in _between(row, rows, lines, shrinks=self.shrunk is not None):
            for x, right in across:
                high, wide = above + y, before + x
                tile = 1 + high // side * grids[:, 1:] + wide // side
                tile = torch.where(ends | ~keep, 0, tile)
                within = torch.where(keep, high % side * side + wide % side, 0)
                weight = None if down is None or right is None else down * right
                if weight is not None:
                    of_whole = first.float() + (0.0 if sources else 1.0)
                    weight = torch.cat([of_whole, weight.expand(keep.shape)], 1)
                both = torch.cat([first, tile], 1), torch.cat([whole, within], 1)
                sources.append((*both, weight))
        nothing = torch.zeros_like(whole, dtype=torch.bool)
        return _Places(
            tuple(sources), torch.cat([nothing, ends], 1), torch.cat([~nothing, keep], 1)
        )

    def _shrunk(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and columns (N, 1) of tokens that are left of as many; see `shrunk`."""
        if self.shrunk is None:
            return rows, columns
        ratio = ((rows * columns).double() / (self.shrunk * self.side**2)).sqrt()
        is_long = ratio > _RATIO
        ratio = torch.where(is_long, ratio, 1.0)

        def whole(length: Tensor) -> Tensor:
            """As `//` of Python's floats, whose quotient isn't that of `/` rounded down."""
            rest = torch.fmod(length.double(), ratio)
            return ((length.double() - rest) / ratio).round().long()

        return torch.where(is_long, whole(rows), rows), torch.where(
            is_long, whole(columns), columns
        )

    def alone(self, images: Mapping[str, Tensor]) -> Tensor | None:
        """Which images (N,) stand alone in their row of text, where it matters."""
        if self.shrunk is None:
            return None
        counts, image = images[IN_ROWS], torch.arange(images[SIZES].shape[0])
        row = (image[:, None] >= counts.cumsum(0)[None]).sum(1)
        return counts[row.clamp(max=counts.shape[0] - 1)] == 1

    @contextlib.contextmanager
    def as_arithmetic(self, model: nn.Module, images: Mapping[str, Tensor]) -> Iterator[None]:
        """While it lasts, the model packs the features of its tiles (N · P, L, H) as `packed`."""
        (count, tiles), sizes = images[PIXELS].shape[:2], images[SIZES]
        alone = self.alone(images)

        def pack(features: list[Tensor], *_: Any, image_newline: Tensor, **__: Any) -> Any:
            (every,) = features
            patches, own = self.side**2, every.shape[-2]
            if own != patches:
                because = f"its tiles have {patches} patches and {own} rows of features each"
                refuse_mixed(type(model), type(model).__name__, because)
            apart = every.reshape(count, tiles, *every.shape[1:])
            return [self.packed(apart, image_newline, sizes, alone)], None

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
        tiles = self.grids(sizes).prod(-1)
        if (counts := images.get(IN_ROWS)) is not None:
            if counts.ndim != 1 or bool((counts < 0).any()) or int(counts.sum()) != len(pixels):
                raise UsageError(
                    f"{IN_ROWS} must say how many of the {len(pixels)} images each row of text has."
                )
            alone = self.alone(images)
            tiles = tiles if alone is None else tiles * alone
        wanted = 1 + int(tiles.max())
        if wanted > pixels.shape[1]:
            raise UsageError(
                f"{PIXELS} has {pixels.shape[1]} tiles for each image, and {SIZES} asks for "
                f"{wanted}: give what the model's processor gives."
            )


def _between(
    place: Tensor, given: Tensor, taken: Tensor, *, shrinks: bool
) -> list[tuple[Tensor, Tensor | None]]:
    """What places (1, M) of `taken` (N, 1) are of as many `given` ones: themselves, or the two next
    to where they lie, each with its weight, as a bilinear resampling has them."""
    if not shrinks:
        return [(place, None)]
    scale = given.float() / taken.clamp(min=1).float()
    at = ((place.float() + 0.5) * scale - 0.5).clamp(min=0)
    low = torch.minimum(at.floor().long(), given - 1).clamp(min=0)
    high = torch.minimum(low + 1, given - 1).clamp(min=0)
    part = (at - low.float()).clamp(0, 1)
    return [(low, 1 - part), (high, part)]
