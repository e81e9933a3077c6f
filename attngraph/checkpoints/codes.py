"""Weights of linears as quantized checkpoints store them, read row by row.

GPTQ (Frantar et al. 2022) packs columns of W (N, K) into integers of 32 bits along K, its zero
points along N, less one in its first version; AWQ (Lin et al. 2023) packs all along N, in an order
of its own; compressed-tensors packs rows along K, and zero points along N. In each of them
W[n, k] = (code[n, k] − zero[n, g(k)]) · scale[n, g(k)], with g(k) the group of a column.
bitsandbytes stores int8 with one scale a row, or looks codes of 4 bits up in a table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from attngraph.checkpoints.scheme import Scheme
from attngraph.errors import LoadError

Tensors: TypeAlias = Mapping[str, torch.Tensor]
_WORD = 32  # bits of an integer that holds codes
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column, of eight, whose code stands at each place of an integer, the lowest first."""
_TABLES = ("nf4", "fp4")


@dataclass(frozen=True)
class Codes:
    """A weight (N, K) of `bits` in groups: `read(a, b)` gives the codes (b − a, K), uint8, of rows.

    scales (N, G); zeros (N, G), uint8, None for the middle of the codes; groups (K,) tells the
    group of each column.
    """

    bits: int
    shape: tuple[int, int]
    read: Callable[[int, int], torch.Tensor]
    scales: torch.Tensor
    zeros: torch.Tensor | None
    groups: torch.Tensor

    def numbers(self, start: int, stop: int) -> torch.Tensor:
        """Rows of the weight, float32: exact, as a scale has no more digits than a half."""
        scales = self.scales[start:stop].float()
        zeros = 1 << self.bits - 1
        steps = self.read(start, stop).float()
        if self.zeros is None:
            steps -= zeros
        else:
            steps -= self.zeros[start:stop].float()[:, self.groups]
        return steps * scales[:, self.groups]


@dataclass(frozen=True)
class Numbers:
    """A weight (N, K) whose rows are looked up in a table: `numbers` gives them in float32."""

    shape: tuple[int, int]
    numbers: Callable[[int, int], torch.Tensor]


Stored: TypeAlias = Codes | Numbers


def take_stored(scheme: Scheme, weights: dict[str, torch.Tensor]) -> dict[str, Stored]:
    """Takes what belongs to quantized weights out of `weights`; gives these by module name.

    Raises LoadError where the parts of one don't fit together.
    """
    first, parts, make = _FORMATS[scheme.method]
    found: dict[str, Stored] = {}
    for name in [name for name in weights if first(name, weights)]:
        stem = name.rpartition(".")[0]
        held = {part: weights[f"{stem}.{part}"] for part in parts if f"{stem}.{part}" in weights}
        if state := next((k for k in weights if k.startswith(f"{stem}.weight.quant_state.")), None):
            held["state"] = weights[state]
        try:
            found[stem] = make(scheme, held)
        except (KeyError, ValueError, TypeError) as error:
            lost = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise LoadError(
                f"The weight of {stem} can't be read as {scheme.method} stores it: {lost}."
            ) from error
        for part in held:
            weights.pop(state if part == "state" and state else f"{stem}.{part}")
    return found


def unpack(packed: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """Codes (uint8) out of integers of 32 bits, along an axis of two, the lowest bits first."""
    if packed.dtype is not torch.int32 or packed.dim() != 2:
        raise ValueError(
            f"packed codes are a matrix of int32, not {packed.dtype} {tuple(packed.shape)}"
        )
    shifts = torch.arange(0, _WORD, bits, dtype=torch.int32)
    shifts = shifts[:, None] if axis == 0 else shifts
    apart = packed.unsqueeze(axis + 1) >> shifts & (1 << bits) - 1
    return apart.to(torch.uint8).flatten(axis, axis + 1)


def _gptq(scheme: Scheme, held: Tensors) -> Codes:
    packed, points, scales = held["qweight"], held["qzeros"], held["scales"]
    groups, rows = scales.shape
    each = int(scheme.settings.get("group_size") or -1)
    order, own = held.get("g_idx"), int(scheme.settings["bits"])
    fitting = [  # a layer may have bits of its own
        bits
        for bits in (own, *{4, 8} - {own})
        if points.shape == (groups, -(-rows * bits // _WORD))
        and (order is None or len(order) * bits == packed.shape[0] * _WORD)
    ]
    if not fitting:
        raise ValueError(
            f"qweight is {tuple(packed.shape)}, qzeros {tuple(points.shape)} and scales "
            f"{tuple(scales.shape)}, which fit together in neither 4 nor 8 bits"
        )
    bits = fitting[0]
    width = packed.shape[0] * _WORD // bits
    _require("qweight", packed, (packed.shape[0], rows))
    zeros = unpack(points, bits, 1)[:, :rows].T
    kind = scheme.settings.get("checkpoint_format") or scheme.settings.get("format")
    if kind != "gptq_v2":
        if int(zeros.max()) == (1 << bits) - 1:
            raise ValueError(
                f"its zero points are stored less one, and one is {(1 << bits) - 1}: whether that "
                f"is 0 or {1 << bits} its readers don't agree on; save it as gptq_v2"
            )
        zeros = zeros + 1

    def read(start: int, stop: int) -> torch.Tensor:
        return unpack(packed[:, start:stop], bits, 0).T

    if order is None:
        order = torch.arange(width) // (each if each > 0 else width)
        _require("scales", scales, (int(order[-1]) + 1, rows))
    return _grouped(bits, (rows, width), read, scales.T, zeros, order)


def _awq(scheme: Scheme, held: Tensors) -> Codes:
    packed, scales = held["qweight"], held["scales"]
    groups, rows = scales.shape
    bits, width = 4, packed.shape[0]
    of_word = _WORD // bits
    _require("qweight", packed, (width, rows // of_word))
    _require("qzeros", held["qzeros"], (groups, rows // of_word))
    place = torch.tensor(_AWQ_ORDER).argsort()

    def apart(words: torch.Tensor) -> torch.Tensor:
        codes = unpack(words, bits, 1).reshape(len(words), -1, of_word)
        return codes[..., place].flatten(1).T

    def read(start: int, stop: int) -> torch.Tensor:
        first = start // of_word
        codes = apart(packed[:, first : -(-stop // of_word)])
        return codes[start - first * of_word :][: stop - start]

    settings = scheme.settings
    each = int(settings.get("group_size", settings.get("q_group_size")) or -1)
    order = torch.arange(width) // (each if each > 0 else width)
    _require("scales", scales, (int(order[-1]) + 1, rows))
    return _grouped(bits, (rows, width), read, scales.T, apart(held["qzeros"]), order)


def _compressed(scheme: Scheme, held: Tensors) -> Codes:
    packed, scales = held["weight_packed"], held["weight_scale"]
    rows, width = (int(size) for size in held["weight_shape"])
    kinds = [group["weights"] for group in scheme.settings["config_groups"].values()]
    fitting = [
        kind
        for kind in kinds
        if tuple(packed.shape) == (rows, -(-width * int(kind["num_bits"]) // _WORD))
    ]
    if len({json.dumps(kind, sort_keys=True) for kind in fitting}) != 1:
        raise ValueError(
            f"weight_packed is {tuple(packed.shape)}, which is that of {len(fitting)} config_groups"
        )
    (kind, *_) = fitting
    bits = int(kind["num_bits"])
    scales = scales.reshape(1, 1).expand(rows, 1) if scales.numel() == 1 else scales
    groups = scales.shape[1]
    each = int(kind.get("group_size") or 0) if kind["strategy"] == "group" else width
    order = held.get("weight_g_idx")
    if order is None or bool((order < 0).any()):
        if each < 1 or -(-width // each) != groups:
            raise ValueError(f"{groups} groups of {each} columns are no {width}")
        order = torch.arange(width) // each
    zeros = held.get("weight_zero_point")
    if zeros is None:
        if not kind.get("symmetric", True):
            raise KeyError("weight_zero_point")
    elif zeros.dtype is torch.int32 and tuple(zeros.shape) != tuple(scales.shape):
        zeros = unpack(zeros, bits, 0)[:rows]
    else:
        zeros = (zeros.reshape(-1, zeros.shape[-1]).expand(rows, -1).int() + (1 << bits - 1)).byte()

    def read(start: int, stop: int) -> torch.Tensor:
        return unpack(packed[start:stop], bits, 1)[:, :width]

    return _grouped(bits, (rows, width), read, scales, zeros, order)


def _grouped(
    bits: int,
    shape: tuple[int, int],
    read: Callable[[int, int], torch.Tensor],
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    order: torch.Tensor,
) -> Codes:
    """Raises ValueError where the groups aren't those of scales and columns."""
    groups = order.long()
    _require("scales", scales, (shape[0], scales.shape[1]))
    if not scales.is_floating_point():
        raise ValueError(f"its scales are {scales.dtype}")
    if zeros is not None:
        _require("zero points", zeros, tuple(scales.shape))
        if bool((zeros == 1 << bits - 1).all()):
            zeros = None
    _require("groups", groups, (shape[1],))
    if groups.numel() and not 0 <= int(groups.min()) <= int(groups.max()) < scales.shape[1]:
        raise ValueError(f"a column is in group {int(groups.max())} of {scales.shape[1]}")
    return Codes(bits, shape, read, scales, zeros, groups)


def _bitsandbytes(scheme: Scheme, held: Tensors) -> Stored:
    if "state" in held:
        return _looked_up(held)
    weight, largest = held["weight"], held["SCB"]
    by_row = "weight_format" not in held or not int(held["weight_format"])
    if weight.dtype is not torch.int8 or weight.dim() != 2 or not by_row:
        raise ValueError("its int8 weight isn't stored row by row")
    _require("SCB", largest, (len(weight),))

    def read(start: int, stop: int) -> torch.Tensor:
        return (weight[start:stop].short() + 128).byte()

    scales = largest.float().unsqueeze(1) / 127
    rows, width = weight.shape
    order = torch.zeros(width, dtype=torch.long)
    return _grouped(8, (rows, width), read, scales, None, order)


def _looked_up(held: Tensors) -> Numbers:
    """Codes of 4 bits, the first in the upper half of a byte, each a place in a table of 16."""
    state = json.loads(bytes(held["state"].tolist()))
    rows, width = (int(size) for size in state["shape"])
    block, packed = int(state["blocksize"]), held["weight"].reshape(-1)
    table, largest = held["weight.quant_map"].float(), held["weight.absmax"]
    if state["quant_type"] not in _TABLES or len(table) != 16 or packed.dtype is not torch.uint8:
        raise ValueError(f"it is {state['quant_type']} in {packed.dtype}, not nf4 in uint8")
    if largest.dtype is torch.uint8:
        scales, map_ = held["weight.nested_absmax"].float(), held["weight.nested_quant_map"].float()
        of = torch.arange(len(largest)) // int(state["nested_blocksize"])
        largest = map_[largest.long()] * scales[of] + float(state["nested_offset"])
    _require("weight", packed, (-(-rows * width // 2),))
    _require("absmax", largest, (-(-rows * width // block),))

    def numbers(start: int, stop: int) -> torch.Tensor:
        first, last = start * width, stop * width
        words = packed[first // 2 : -(-last // 2)].long()
        codes = torch.stack([words >> 4, words & 15], 1).flatten()[first % 2 :][: last - first]
        scale = largest.float()[torch.arange(first, last) // block]
        return (table[codes] * scale).view(stop - start, width)

    return Numbers((rows, width), numbers)


def _require(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {tuple(tensor.shape)}, where {shape} belongs")


def _is_bitsandbytes(name: str, weights: Tensors) -> bool:
    stem, _, last = name.rpartition(".")
    return last == "weight" and (f"{stem}.SCB" in weights or f"{name}.absmax" in weights)


_FORMATS: Mapping[
    str,
    tuple[Callable[[str, Tensors], bool], tuple[str, ...], Callable[[Scheme, Tensors], Stored]],
] = {
    "gptq": (
        lambda name, _: name.endswith(".qweight"),
        ("qweight", "qzeros", "scales", "g_idx"),
        _gptq,
    ),
    "awq": (lambda name, _: name.endswith(".qweight"), ("qweight", "qzeros", "scales"), _awq),
    "compressed-tensors": (
        lambda name, _: name.endswith(".weight_packed"),
        (
            "weight_packed",
            "weight_scale",
            "weight_shape",
            "weight_zero_point",
            "weight_g_idx",
        ),
        _compressed,
    ),
    "bitsandbytes": (
        _is_bitsandbytes,
        (
            "weight",
            "SCB",
            "weight_format",
            "weight.absmax",
            "weight.quant_map",
            "weight.nested_absmax",
            "weight.nested_quant_map",
        ),
        _bitsandbytes,
    ),
}


def in_rows(shape: tuple[int, int], most: int = 4 << 20) -> list[slice]:
    """Slices of rows that have no more than so many elements, and begin at multiples of 32."""
    rows, width = shape
    step = max(_WORD, most // max(1, width) // _WORD * _WORD)
    count = math.ceil(rows / step)
    return [slice(at * step, min((at + 1) * step, rows)) for at in range(count)]
