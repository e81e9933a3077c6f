"""The weights that a file holds against those that its model compiles to, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import onnx_ir
import torch

from attngraph.dialect.quantized import BLOCK, dequantized
from attngraph.export.formats import Weights as Format
from attngraph.export.kernels import choose_all
from attngraph.export.lowering.emission.buffers import Buffers, part_joined
from attngraph.export.lowering.lower import lower, value_names
from attngraph.export.precision.codes import error_bound
from attngraph.export.precision.quantize import BITS, digest_of
from attngraph.export.target import Target
from attngraph.ir import Graph, Value
from attngraph.ir.ops import inputs_of
from attngraph.ir.traits import QUANTIZED

_ROUNDING = 4.0
"""Units in the last place, at a tensor's scale, between machines that sum in other orders."""
_FLIPPED = 1e-4
"""The share of quantized codes that such a difference may move to the next one."""


@dataclass
class Weights:
    """How many of the `total` weights were compared, a sentence part on each that is `different`,
    and the names of those that differ by rounding alone, as `computed` ones do between machines.
    """

    total: int
    compared: int = 0
    different: list[str] = field(default_factory=list)
    rounded: list[str] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """Notes on weights that differ without being wrong."""
        found = []
        if self.compared < self.total:
            found.append(
                f"{self.compared} of {self.total} weights were compared bit for bit: the file has "
                "none of the others' names, as where other sizes or kernels were chosen."
            )
        if self.rounded:
            found.append(
                f"{len(self.rounded)} weights that were computed differ from this machine's in "
                f"their last digits, such as {self.rounded[0]}."
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        return {"total": self.total, "compared": self.compared, "different": self.different}


def compare_weights(
    graph: Graph,
    model: onnx_ir.Model,
    target: Target,
    given: Mapping[str, torch.Tensor],
    buffers: Buffers | None = None,
) -> Weights:
    """The weights of the optimised `graph`, lowered anew, against the file's.

    `given` are the module's own, which no pass computed: they must be equal in every bit, in half
    precision as they round to it. Raises LoweringError as `lower` does.
    """
    static = buffers is not None
    if buffers is not None:
        part_joined(graph, buffers)
    kernels = choose_all(graph, target, static=static)
    ours = lower(graph, target=target, kernels=kernels, buffers=buffers)
    theirs = model.graph.initializers
    own = {_storage(data) for data in given.values()}
    weights = dict(_weights(graph, ours))
    found = Weights(len(weights))
    for name, mine in weights.items():
        value = theirs.get(name)
        if value is None or value.const_value is None:
            continue
        raw = getattr(mine, "raw", None)
        is_given = isinstance(raw, torch.Tensor) and _storage(raw) in own
        told = _difference(mine.numpy(), value.const_value.numpy())
        if told is None:
            continue
        found.compared += 1
        if told.rounds and not is_given:
            found.rounded.append(name)
        elif told.share:
            found.different.append(f"{name}{told}")
    return found


def take_chosen(
    graph: Graph,
    model: onnx_ir.Model,
    weights: Format,
    chosen: Mapping[str, str],
    originals: Mapping[str, torch.Tensor | None],
) -> None:
    """Gives a graph with the nearest codes those of its file that were chosen on data.

    They must be the ones that the file tells of, by their digests, and no further from the
    `originals` than codes may be; others are left for `compare_weights` to find.
    """
    names = value_names(graph)
    for linear in (node for node in graph if node.op in QUANTIZED):
        codes, scales = inputs_of(linear, "codes", "scales")
        weight = codes.name.removesuffix(f".{weights}")
        data, told = originals.get(weight), chosen.get(weight)
        held = _codes_in(model, names[codes], codes)
        if data is None or told is None or held is None or digest_of(held) != told:
            continue
        assert scales.data is not None
        rows = linear.op == "attn.int8_linear"
        wide = (
            held.float() * scales.data.float()[:, None]
            if rows
            else dequantized(held, scales.data.float(), BITS[weights])[:, : data.shape[1]]
        )
        limit = error_bound(BITS[weights], data.shape[1] if rows else BLOCK)
        if float((wide - data.float()).norm()) <= limit * float(data.float().norm()):
            codes.data = held


def _codes_in(model: onnx_ir.Model, name: str, codes: Value) -> torch.Tensor | None:
    """A file's codes as a graph has them: as they are, transposed, from two halves of 4 bits, or
    signed, as DequantizeLinear takes them.
    """
    held = model.graph.initializers
    tensors = {
        suffix: torch.from_numpy(_in_whole_bytes(value.const_value.numpy()))
        for suffix in ("", ".T", ".upper", ".lower", ".whole")
        if (value := held.get(name + suffix)) is not None and value.const_value is not None
    }
    if ".T" in tensors:
        return tensors[".T"].t().contiguous()
    if {".upper", ".lower"} <= tensors.keys():
        high, low = tensors[".upper"], tensors[".lower"]
        return torch.stack([high << 4 | low & 15, high & 240 | low >> 4], -1).flatten(-2)
    if ".whole" in tensors:
        signed = tensors[".whole"]
        if signed.numel() == math.prod(codes.shape):
            return (signed.view(torch.uint8) ^ 128).view(codes.shape)
        pairs = (signed.view(torch.uint8) & 15 ^ 8).view(*codes.shape, 2)
        return pairs[..., 0] | pairs[..., 1] << 4
    return tensors.get("")


def _in_whole_bytes(data: Any) -> Any:
    """A copy, where codes of 4 bits have a byte each."""
    return data.astype("i1") if data.dtype.name == "int4" else data.copy()


def _weights(graph: Graph, model: onnx_ir.Model) -> Iterator[tuple[str, Any]]:
    """The initializers that hold constants of the graph, not numbers that a lowering makes."""
    names = value_names(graph)
    constants = {names[value] for value in graph.constants.values() if value in names}
    for name, value in model.graph.initializers.items():
        stem = name.removesuffix(".T")
        known = stem in constants or any(stem.startswith(f"{each}.") for each in constants)
        if known and value.const_value is not None:
            yield name, value.const_value


@dataclass(frozen=True)
class _Difference:
    """The share of elements that differ, and whether rounding explains it. `rows` counts the
    matrix rows that hold one, of how many.
    """

    share: float
    rounds: bool
    rows: tuple[int, int]

    def __str__(self) -> str:
        rows, of = self.rows
        return f" ({rows} of {of} rows)" if of > 1 and rows < of else ""


def _difference(mine: Any, theirs: Any) -> _Difference | None:
    """How two weights differ; None if they can't be compared, as where one is quantized."""
    if mine.dtype != theirs.dtype:
        if not (_is_float(mine) and _is_float(theirs)):
            return None
        with numpy.errstate(over="ignore"):
            mine = mine.astype(theirs.dtype)
    if mine.shape != theirs.shape:
        return _Difference(1.0, False, (1, 1))
    if mine.size == 0:
        return _Difference(0.0, False, (0, 0))
    bits = f"u{mine.dtype.itemsize}"
    mine, theirs = numpy.ascontiguousarray(mine), numpy.ascontiguousarray(theirs)
    off = mine.view(bits) != theirs.view(bits)
    rows = off.reshape(off.shape[0], -1).any(1) if off.ndim > 1 else off.reshape(1, -1).any(1)
    share, counted = float(off.mean()), (int(rows.sum()), len(rows))
    if not share:
        return _Difference(0.0, False, counted)
    if not _is_float(mine):
        return _Difference(share, share <= _FLIPPED, counted)
    wide, other = mine.astype("f8"), theirs.astype("f8")
    finite = numpy.isfinite(wide)
    same = bool((finite == numpy.isfinite(other)).all())
    scale = float(numpy.abs(wide[finite]).max()) if finite.any() else 0.0
    error = numpy.abs(numpy.where(finite, wide - other, 0.0)).max() if same else numpy.inf
    eps = {2: 2.0**-10, 4: 2.0**-23, 8: 2.0**-52}[mine.dtype.itemsize]
    return _Difference(share, bool(error <= _ROUNDING * eps * scale), counted)


def _is_float(data: Any) -> bool:
    return bool(data.dtype.kind == "f" or data.dtype.name == "bfloat16")


def _storage(data: torch.Tensor) -> int:
    return data.untyped_storage().data_ptr()
