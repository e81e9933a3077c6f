"""The models of examples/, with their own dims, under the suite's sizes and weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.overrides import TorchFunctionMode

from examples import bahdanau, einsum_attention, gqa, nanogpt
from tests.models.kit import (
    HIDDEN,
    LAYERS,
    TRACED,
    Args,
    Built,
    Case,
    Sizes,
    peaked,
    present,
    states,
    tokens,
)


class Unfilled(nn.Module):
    """The same module with every `masked_fill` left out."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Tensor) -> Tensor:
        with _NoFill():
            return self.module(*args)


class _NoFill(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.masked_fill else func(*args, **(kwargs or {}))


def _decoder(module: nn.Module, shapes: tuple[dict[int, Dim]]) -> Built:
    """A module over token ids (B, T)."""

    def inputs(sizes: Sizes) -> Args:
        return (tokens(sizes["batch"], sizes["seq"]),)

    peaked(module)
    unmasked = {"causal": (Unfilled(module), inputs(TRACED))}
    return Built(module, inputs, ("input_ids",), shapes, LAYERS, unmasked)


def _nanogpt() -> Built:
    module, _, shapes = nanogpt.build()
    return _decoder(module, shapes)


def _gqa() -> Built:
    module, _, shapes = gqa.build()
    return _decoder(module, shapes)


def _einsum() -> Built:
    module, _, shapes = einsum_attention.build()  # peaked as it is

    def inputs(sizes: Sizes) -> Args:
        batch, seq = sizes["batch"], sizes["seq"]
        return states(batch, seq, HIDDEN), present(batch, seq)

    x, mask = inputs(TRACED)
    unmasked = {"padding": (module, (x, torch.ones_like(mask)))}
    return Built(module, inputs, ("x", "mask"), shapes, LAYERS, unmasked)


def _bahdanau() -> Built:
    module, _, shapes = bahdanau.build()

    def inputs(sizes: Sizes) -> Args:
        batch, source = sizes["batch"], sizes["source"]
        target_ids = tokens(batch, sizes["target"], seed=1)
        return tokens(batch, source), present(batch, source), target_ids

    peaked(module)
    source_ids, mask, target_ids = inputs(TRACED)
    unmasked = {"padding": (module, (source_ids, torch.ones_like(mask), target_ids))}
    names = ("source_ids", "mask", "target_ids")
    return Built(module, inputs, names, shapes, 1, unmasked)


CASES = (Case("nanogpt", _nanogpt), Case("gqa", _gqa), Case("einsum", _einsum))
ADDITIVE = Case("bahdanau", _bahdanau)
