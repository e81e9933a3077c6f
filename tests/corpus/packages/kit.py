"""What a row of the packages' corpus is: a model, and its inputs at any batch size and length."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

Inputs = Callable[[int, int], Any]
"""From a batch size and a length to the arguments of a call: a tuple, or a dict of keywords."""


@dataclass(frozen=True)
class Row:
    """A model by the name of its package and its own; `make` builds it anew, with its inputs.

    `length` is the sample's, and `others` are those it is tried at unseen. An axis that follows the
    batch or the length in `inputs` is a dynamic dim; where nothing follows the length it is fixed.
    """

    package: str
    name: str
    make: Callable[[], tuple[nn.Module, Inputs]]
    length: int = 12
    others: tuple[int, ...] = (17, 8)
    batches: tuple[int, ...] = (3, 1)

    @property
    def label(self) -> str:
        """What the corpus calls it."""
        return f"{self.package} {self.name}"


ROWS: list[Row] = []
FILES = (
    "audio",
    "diffusion",
    "further",
    "memories",
    "sequences",
    "singles",
    "structures",
    "tables",
    "text",
    "vision",
    "vision_attention",
    "vision_dense",
    "vision_timm",
    "vision_vit",
    "advised",
)
ADVISED = ", advised"
"""Ends the name of a row that follows what is said of the row without it."""
CLASSES = 5
"""Of a classifier."""


def images(size: int) -> Inputs:
    """A batch of square images."""
    return lambda b, n: (torch.randn(b, 3, size, size),)


def row(name: str, **given: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Registers a factory under "package model"."""
    package, _, own = name.partition(" ")

    def take(make: Callable[[], Any]) -> Callable[[], Any]:
        ROWS.append(Row(package, own, make, **given))
        return make

    return take


def rows() -> list[Row]:
    """All rows; the packages are imported as each is made."""
    for name in FILES:
        importlib.import_module(f"tests.corpus.packages.{name}")
    return ROWS


def find(label: str) -> Row:
    """The row that is named so."""
    return next(row for row in rows() if row.label == label)


@dataclass(frozen=True)
class Built:
    """A row's model in eval mode with its sample, torch.export's dims, and unseen inputs."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dynamic_shapes: Mapping[str, Any] | tuple[Any, ...] | None
    unseen: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]] = field(default=())


def build(row: Row) -> Built:
    """Random weights of a fixed seed."""
    torch.manual_seed(0)
    module, inputs = row.make()
    module.eval()

    def made(batch: int, length: int, draw: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        torch.manual_seed(10000 * draw + 100 * batch + length)
        found = inputs(batch, length)
        return ((), found) if isinstance(found, dict) else (tuple(found), {})

    batch, other = 2, row.others[0] if row.others else row.length
    args, kwargs = made(batch, row.length)
    wider, longer = made(row.batches[0] if row.batches else batch, row.length), made(batch, other)
    dims = _Dims()
    shapes = pytree.tree_map(dims.of, (args, kwargs), wider, longer)
    dynamic = (shapes[0] if args else shapes[1]) if dims.found else None
    lengths = row.others or (row.length,) * len(row.batches)
    unseen = [made(b, n) for b, n in zip(row.batches, lengths, strict=False)]
    unseen.append(made(batch, row.length, draw=1))
    torch.manual_seed(7)
    return Built(module, args, kwargs, dynamic, unseen)


class _Dims:
    """Names an axis that follows the batch, and leaves one that follows the length to the trace."""

    def __init__(self) -> None:
        self.found = False

    def of(self, sample: Any, wider: Any, longer: Any) -> Any:
        if not isinstance(sample, Tensor):
            return None
        shape: dict[int, Any] = {}
        for axis, sizes in enumerate(zip(sample.shape, wider.shape, longer.shape, strict=True)):
            if len(set(sizes)) > 1:
                self.found = True
                shape[axis] = Dim.AUTO
        return shape or None


def first_of_equals() -> None:
    """Has topk take the first of equal scores, as a file does, for the rest of this process."""

    def topk(self: Any, k: int, dim: int = -1, largest: bool = True, **kwargs: Any) -> Any:
        values, places = torch.sort(self, dim=dim, descending=largest, stable=True)
        return values.narrow(dim, 0, k), places.narrow(dim, 0, k)

    setattr(torch.Tensor, "topk", topk)  # noqa: B010
