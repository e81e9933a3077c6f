"""Images of any size, as patches in one row with a grid (frames, rows, columns) for each image.

Where each patch and each token of an image lies follows from the grids alone. Models compute it in
loops over them, which a trace can't follow; here it is arithmetic on all of them at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

ENDS, SEGMENTS = "image_cu_seqlens", "segments"
_WITHIN = "attngraph_flash_within"  # models hand the lengths of images to what is called flash


def patches_placed(
    grid: Tensor, count: int, merged: int, window: int | None, side: int | None = None
) -> dict[str, Tensor]:
    """What a vision encoder reads of the grids (N, 3) of `count` patches, by its own names.

    `merged` patches by as many become one token; attention is within a frame of an image, and where
    `window` isn't None within windows of so many tokens by as many. `SEGMENTS` has numbers (P,)
    that are equal within a frame, and in the place of the windows' ends stand such numbers. `ENDS`
    (N + 1,) are those of the images, for what a model reads them for beside attention. A table of
    positions, `side` by as many, is resampled to each image between the four that are nearest. A
    size below 1 counts as 1, and patches behind the last image as its own.
    """
    frames, rows, columns = grid.clamp(min=1).unbind(-1)
    ends = (frames * rows * columns).cumsum(0)
    every = torch.arange(count, device=grid.device)
    image = (every[:, None] >= ends).sum(-1).clamp(max=grid.shape[0] - 1)
    within = every - (ends - frames * rows * columns)[image]
    height, width = rows[image], columns[image]
    frame, place = within // (height * width), within % (height * width)
    block, place = place // (width * merged), place % (width * merged)
    column, inner = place // merged**2, place % merged**2
    segment = (frames.cumsum(0) - frames)[image] + frame
    at = torch.stack([block * merged + inner // merged, column * merged + inner % merged], -1)
    lengths = pad(ends, (1, 0))
    found = {"image_position_ids": at, ENDS: lengths, SEGMENTS: segment}
    if side is not None:
        sizes = torch.stack([height, width], -1)
        found["image_interp_indices"], found["image_interp_weights"] = _resampled(at, sizes, side)
    if window is not None:
        found["image_cu_window_seqlens"] = (
            (segment << 40) + (block // window << 20) + column // window
        )
        found["image_window_index"] = torch.arange(count // merged**2, device=grid.device)
    return found


def _resampled(at: Tensor, sizes: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """The four places (P, 4) of a table, `side` by as many, that are nearest to patches at (P, 2)
    of images of `sizes` (P, 2) whose corners are the table's, and how much each counts."""
    place = at.float() * (side - 1) / (sizes - 1).clamp(min=1)
    floor = place.floor()
    rows, columns = (floor.long()[..., None] + torch.arange(2)).clamp(0, side - 1).unbind(1)
    down, right = torch.stack([1 - (place - floor), place - floor], -1).unbind(1)
    indices = rows[:, :, None] * side + columns[:, None]
    return indices.flatten(1), (down[:, :, None] * right[:, None]).flatten(1)


class Places(nn.Module):
    """Three positions (3, B, S) of ids, and by how much the next position is above their number.

    Text counts on in all three. An image's tokens lie on its grid behind what comes before it, and
    what follows begins behind the longer side.
    """

    def __init__(self, token: int, merged: int) -> None:
        super().__init__()
        self.token, self.merged = token, merged

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, image_grid_thw: Tensor
    ) -> dict[str, Tensor]:
        shown = attention_mask != 0
        is_image = (input_ids == self.token) & shown
        grid = image_grid_thw.clamp(min=1)
        rows = (grid[:, 1] // self.merged).clamp(min=1)
        columns = (grid[:, 2] // self.merged).clamp(min=1)
        sizes = grid[:, 0] * rows * columns
        ends = sizes.cumsum(0)
        order = (is_image.flatten().long().cumsum(0) - 1).clamp(min=0)
        image = (order[:, None] >= ends).sum(-1).clamp(max=grid.shape[0] - 1)
        within = (order - (ends - sizes)[image]).reshape(input_ids.shape)
        image = image.reshape(input_ids.shape)
        height, width = rows[image], columns[image]
        is_last = is_image & (within == sizes[image] - 1)
        steps = torch.where(is_last, torch.maximum(height, width), (shown & ~is_image).long())
        total = steps.cumsum(1)
        begin = total - steps
        inside = torch.stack([within // (height * width), within // width % height, within % width])
        places = begin + torch.where(is_image, inside, 0)
        return {
            "position_ids": places.masked_fill(~shown, 0),
            "rope_deltas": total[:, -1:] - shown.long().sum(1, keepdim=True),
        }


@contextlib.contextmanager
def within_segments(model: nn.Module, ends: Tensor, segments: Tensor) -> Iterator[None]:
    """While it lasts, attention that is given the `ends` of images is within equal `segments` (P,),
    and within equal numbers where it is given those of `patches_placed`."""

    def within(*args: Any, cu_seq_lens_q: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        numbers = segments if cu_seq_lens_q is ends else cu_seq_lens_q
        return attend_within(*args, numbers=numbers, **kwargs)

    with attending_by(model, within):
        yield


@contextlib.contextmanager
def attending_by(model: nn.Module, within: Callable[..., tuple[Tensor, None]]) -> Iterator[None]:
    """While it lasts, attention that would take lengths of packed rows is what `within` computes of
    the same arguments."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known: Any = ALL_ATTENTION_FUNCTIONS
    known[_WITHIN] = within
    configs = {id(c): c for part in model.modules() if (c := getattr(part, "config", None))}
    name = "_attn_implementation_internal"
    before = [
        (config, getattr(config, name)) for config in configs.values() if hasattr(config, name)
    ]
    try:
        for config, _ in before:
            setattr(config, name, _WITHIN)
        yield
    finally:
        for config, own in before:
            setattr(config, name, own)
        del known[_WITHIN]


def attend_within(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    numbers: Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention (1, H, P, D) of patches to those with the same number, as (1, P, H, D)."""
    same = numbers[:, None] == numbers
    mixed = scaled_dot_product_attention(
        query, key, value, attn_mask=same, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return mixed.transpose(1, 2), None
