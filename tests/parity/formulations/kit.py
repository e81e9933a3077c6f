"""The table of formulations: how each is built, and how many attentions it must become.

Inputs are written as "b h s d", dims by letter (SIZES) or number, or as "b t:padding", where the
word after the colon names a maker of values other than normal ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.export import Dim

from tests.models.kit import peaked

SIZES = {"b": 2, "h": 3, "s": 5, "t": 7, "d": 6, "e": 10, "m": 18}
Q, K, V = "b h s d", "b h t d", "b h t e"
SELF = "b s m"  # what a module with its own projections takes: m = h · d
LONGEST = 24
BUFFER = 32  # rows of a table of positions, more than any dynamic dim has
GAIN = 1.5  # scores scaled by 1/√d have a standard deviation of GAIN² = 2.25
_DIMS = {name: Dim(name, max=LONGEST) for name in "bst"}

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True)
class Formulation:
    """One way to write an attention.

    `fused` is the number of sites that must fuse, None where either is right as long as there is
    a remark. `declined` holds, per declined site, a word that its code or reason must contain.
    `dynamic` names the dims that change, for a second run. `gap` says why the sites are not yet as
    they should be, `broken` why the result isn't; only in the second run after "dynamic: ".
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: tuple[str, ...]
    fused: int | None
    declined: tuple[str, ...]
    dynamic: str
    gap: str
    broken: str

    def module(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return peaked(self.make()).requires_grad_(False)

    def args(self, seed: int = 0) -> tuple[Tensor, ...]:
        """Sample inputs; masks of an odd seed hide every key from the last batch element."""
        random = torch.Generator().manual_seed(seed)
        return tuple(_tensor(text, random, seed) for text in self.inputs)

    @property
    def dynamic_shapes(self) -> tuple[dict[int, Dim], ...]:
        dims = [text.partition(":")[0].split() for text in self.inputs]
        return tuple(
            {axis: _DIMS[name] for axis, name in enumerate(names) if name in self.dynamic.split()}
            for names in dims
        )


FORMULATIONS: dict[str, Formulation] = {}


def formulation(
    *inputs: str,
    fused: int | None = 1,
    declined: tuple[str, ...] = (),
    dynamic: str = "",
    gap: str = "",
    broken: str = "",
) -> Callable[[T], T]:
    """Registers a function of tensors, or an nn.Module class without arguments."""

    def register(target: T) -> T:
        name = target.__name__
        if name in FORMULATIONS:
            raise ValueError(f"Two formulations are called {name}.")
        make: Callable[[], nn.Module] = target
        if not isinstance(target, type):
            make = type(name, (nn.Module,), {"forward": staticmethod(target)})
        FORMULATIONS[name] = Formulation(name, make, inputs, fused, declined, dynamic, gap, broken)
        return target

    return register


def _tensor(text: str, random: torch.Generator, seed: int) -> Tensor:
    dims, _, kind = text.partition(":")
    shape = [SIZES.get(name) or int(name) for name in dims.split()]
    if not kind:
        return GAIN * torch.randn(shape, generator=random)
    return _MAKERS[kind](shape, random, seed)


Maker = Callable[[list[int], torch.Generator, int], Tensor]


def _padding(shape: list[int], random: torch.Generator, seed: int) -> Tensor:
    """(B, T) bool, true at tokens: b + 1 are padded on the left, and one near the end is a hole."""
    batch, length = shape
    position = torch.arange(length)
    present = (position > torch.arange(batch)[:, None]) & (position != length - 2)
    if seed % 2:
        present[-1] = False
    return present


def _mask(shape: list[int], random: torch.Generator, seed: int) -> Tensor:
    """Bool, true where a query may look; the first key always, in even seeds."""
    keep = torch.rand(shape, generator=random) > 0.4
    keep[..., 0] = True
    if seed % 2:
        keep[-1] = False
    return keep


def _additive(fill: float) -> Maker:
    def make(shape: list[int], random: torch.Generator, seed: int) -> Tensor:
        return torch.where(_mask(shape, random, seed), 0.0, fill)

    return make


def _segments(shape: list[int], random: torch.Generator, seed: int) -> Tensor:
    """Ascending segment numbers along the last axis."""
    return (torch.rand(shape, generator=random) > 0.6).long().cumsum(-1)


_MAKERS: Mapping[str, Maker] = {
    "padding": _padding,
    "int_padding": lambda *a: _padding(*a).long(),
    "float_padding": lambda *a: _padding(*a).float(),
    "mask": _mask,
    "float_mask": lambda *a: _mask(*a).float(),
    "int_mask": lambda *a: _mask(*a).long(),
    "lowest": _additive(torch.finfo(torch.float32).min),
    "minus_inf": _additive(float("-inf")),
    "minus_1e4": _additive(-1e4),
    "segments": _segments,
    "positive": lambda shape, random, seed: 0.5 + torch.rand(shape, generator=random),
    "positions": lambda shape, random, seed: torch.arange(shape[-1]).expand(shape).contiguous(),
    "length": lambda shape, random, seed: torch.tensor(3 + seed % 2).expand(shape).contiguous(),
    "lengths": lambda shape, random, seed: torch.arange(shape[0]) + 2 - seed % 2,
    "twos": lambda *a: 2 * _mask(*a).long(),
}
