"""Inputs of a written module: at any size, with masks of every style."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

STYLES = ("left", "all", "right", "holes", "hidden", "one")
"""Of masks: padding on the left, none, on the right, anywhere; an element that is all hidden, and
elements of which all but one key are.
"""
LIMITS = {"b": 24, "s": 20, "t": 20, "p": 12, "n": 32}
SCALES = {"large": 300.0, "tiny": 1e-20, "zero": 0.0}
"""What extreme floats are: the others times this."""
_OTHERS = (
    ({"s": 1, "t": 1, "p": 1}, "all"),
    ({"b": 1, "s": 13, "t": 11, "p": 7}, "right"),
    ({"b": 5, "s": 3, "t": 3, "p": 3}, "hidden"),
    ({"b": 4, "s": 4, "t": 4, "p": 4}, "holes"),
    ({"b": 3, "s": 2, "t": 19, "p": 11}, "left"),
)
_MOST = {"b": 7, "s": 20, "t": 20, "p": 12, "n": 32}  # larger batches only take longer

Sizes = Mapping[str, int]
Args = tuple[Tensor, ...]


def cases(
    inputs: Mapping[str, str],
    sample: Sizes,
    free: Mapping[str, tuple[int, int]],
    allowed: Callable[[Sizes], bool] = lambda sizes: True,
) -> Iterator[tuple[str, Args]]:
    """Inputs that the compile didn't see, by what they are: at the sample's sizes, at both ends of
    the dims that are `free` within some sizes, and between them, where they are `allowed` together.
    """
    masked = any(":" in shape for shape in inputs.values())
    for seed, style in enumerate(STYLES if masked else STYLES[:1], 1):
        yield f"sample sizes, {style}", make(inputs, sample, style, seed)
    for seed, (label, scale) in enumerate(SCALES.items(), 30):
        yield f"sample sizes, {label}", make(inputs, sample, "right", seed, scale)
    ends = (
        ({name: low for name, (low, _) in free.items()}, "all"),
        ({name: min(high, _MOST[name]) for name, (_, high) in free.items()}, "right"),
    )
    seen = []
    for seed, (others, style) in enumerate((*_OTHERS, *ends) if free else (), 10):
        sizes = {n: _within(others.get(n, sample[n]), *ends) for n, ends in free.items()}
        if sizes not in seen and allowed(sizes):
            seen.append(sizes)
            label = ", ".join(f"{name}={size}" for name, size in sizes.items())
            yield f"{label}, {style}", make(inputs, {**sample, **sizes}, style, seed)


def _within(size: int, low: int, high: int) -> int:
    return min(max(size, low), high)


def make(
    inputs: Mapping[str, str],
    sizes: Sizes,
    style: str = "left",
    seed: int = 0,
    scale: float = 1.0,
) -> Args:
    """A tensor for each input, such as "b s m" or "b t:padding"; `scale` is that of floats which
    stand for no mask.
    """
    random = torch.Generator().manual_seed(seed)
    made = []
    for text in inputs.values():
        dims, _, kind = text.partition(":")
        shape = [sizes[dim] if dim in sizes else int(dim) for dim in dims.split()]
        if kind:
            made.append(_MAKERS[kind](shape, style, random))
        else:
            made.append(1.5 * scale * torch.randn(shape, generator=random))
    return tuple(made)


def _padding(shape: list[int], style: str, random: torch.Generator) -> Tensor:
    """Bool, true at tokens."""
    place, length = torch.arange(shape[-1]), shape[-1]
    row = torch.arange(shape[0])[:, None]
    most = max(length - 1, 0)
    match style:
        case "left":
            found = place >= (row + 1) % (most + 1)
        case "right":
            found = place < length - (row + 1) % (most + 1)
        case "holes":
            found = torch.rand(shape[0], length, generator=random) > 0.4
            found[:, 0] = True
        case "hidden":
            found = (row != shape[0] - 1) & (place >= row % 2)
        case "one":
            found = place == (row + 1) % length
        case _:
            found = torch.ones(shape[0], length, dtype=torch.bool)
    return found.expand(shape).contiguous()


def _mask(shape: list[int], style: str, random: torch.Generator) -> Tensor:
    """Bool, true where a query may look."""
    if style in ("all", "one"):
        column = torch.arange(shape[-1]) == torch.arange(shape[-2])[:, None] % shape[-1]
        return (column | (style == "all")).expand(shape).contiguous()
    found = torch.rand(shape, generator=random) > 0.5
    found[..., 0] = True
    if style == "hidden":
        found[-1] = False
    return found


def _lengths(shape: list[int], style: str, random: torch.Generator) -> Tensor:
    least = {"hidden": 0, "all": 1000, "one": 1}.get(style, 2)
    return torch.arange(shape[0]) % 5 + least if style != "one" else torch.ones(shape).long()


def _segments(shape: list[int], style: str, random: torch.Generator) -> Tensor:
    if style == "all":
        return torch.zeros(shape, dtype=torch.long)
    found = (torch.rand(shape, generator=random) > 0.6).long().cumsum(-1)
    return found.flip(-1) if style == "left" else found


def _ids(pad: int) -> Callable[[list[int], str, torch.Generator], Tensor]:
    """Of twelve words, `pad` where there is none."""

    def made(shape: list[int], style: str, random: torch.Generator) -> Tensor:
        words = torch.randint(4, 12, shape, generator=random)
        return torch.where(_padding(shape, style, random), words, pad)

    return made


def _ended(shape: list[int], style: str, random: torch.Generator) -> Tensor:
    """Words, with 2 at the end of some and after it."""
    words = torch.randint(4, 12, shape, generator=random)
    if style == "all":
        return words
    end = torch.arange(shape[0])[:, None] % shape[1] + (style not in ("hidden", "holes"))
    return torch.where(torch.arange(shape[1]) == end, 2, words)


def _frames(shape: list[int], style: str, random: torch.Generator) -> Tensor:
    """Floats, all 0 where there is nothing."""
    there = _padding(shape[:2], style, random)
    return 1.5 * torch.randn(shape, generator=random) * there[..., None]


def _salience(shape: list[int], style: str, random: torch.Generator) -> Tensor:
    """Floats above 0 where there is something."""
    size = torch.rand(shape, generator=random) + 0.1
    return torch.where(_padding(shape, style, random), size, -size)


def _additive(fill: float) -> Callable[[list[int], str, torch.Generator], Tensor]:
    return lambda *which: torch.where(_mask(*which), 0.0, fill)


_MAKERS: Mapping[str, Callable[[list[int], str, torch.Generator], Tensor]] = {
    "padding": _padding,
    "int padding": lambda *which: _padding(*which).long(),
    "float padding": lambda *which: _padding(*which).float(),
    "hidden": lambda *which: ~_padding(*which),
    "added": lambda *which: torch.where(_padding(*which), 0.0, torch.finfo(torch.float32).min),
    "ids": _ids(3),
    "ids padded with 0": _ids(0),
    "int ids": lambda *which: _ids(3)(*which).int(),
    "places": lambda shape, *_: torch.arange(shape[-1]).expand(shape).contiguous(),
    "ended ids": _ended,
    "frames": _frames,
    "salience": _salience,
    "mask": _mask,
    "lengths": _lengths,
    "segments": _segments,
    "additive -inf": _additive(float("-inf")),
    "additive lowest": _additive(torch.finfo(torch.float32).min),
}
