"""Quantized weights: linears of a graph become `attn.quantized_linear` or `attn.int8_linear`.

**Form.** `stored` decides for each weight. In floats, or in int4, it is cut into blocks. Where
activations are rounded to int8 and weights stored in int8, there is one scale for each row of the
weight, which has the fast product of integers; a weight that this costs too much has blocks.

**Step.** A weight is cut into blocks of BLOCK along its rows. With m the element of the largest
magnitude of a block, its step is s = |m| / (2^(b−1) − 1), and each element is rounded to the
nearest multiple of s, off by at most s / 2; zero stays zero. The zero point is the middle of the
codes. Codes of 4 bits go from −8 to 7, so a block may also have the step −m / 8, of which m is −8
times, or −m / 8.5, which is finer but cuts off m: what loses least of the block's squares. In
normally distributed elements that is 13 % less in rms.

**What a weight may lose.** Rounding to a step s is off by s / √12 (rms). In 32 normally distributed
elements m is 2.3 σ (rms), so such a weight is off by q = 2.3 / (√12 · (2^(b−1) − 1)) of its own
norm: 9.5 % in int4, 0.52 % in int8. A weight that would be off by more than 2 q (a few large
elements set the steps of all others) stays as it is. For a whole row of K elements m is about
√(2 ln K) σ.

**Saturation.** x86 CPUs without VNNI add the products of two neighbours, u8 × s8, in 16 bits. Where
the kernel does so (`saturates`), the step of a row is m₂ / 127 with m₂ the largest magnitude of the
sum of two neighbours of one sign. Rounded, their codes add up to 128, and 255 · 128 is below 2¹⁵.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import torch

from attngraph.analysis.experts.products import GROUPED
from attngraph.analysis.values.intervals import Intervals
from attngraph.dialect.experts import CODE_BITS
from attngraph.dialect.quantized import BLOCK
from attngraph.errors import UsageError
from attngraph.export.formats import Activations, Weights
from attngraph.export.precision.codes import error_bound, packed, packed_rows
from attngraph.ir import Builder, Graph, Node, Value
from attngraph.ir.ops import input_of, inputs_of, named_inputs
from attngraph.ir.storage import address_of
from attngraph.ir.traits import EXPERTS
from attngraph.mapped import Reader
from attngraph.metadata import record

BITS: dict[Weights, int] = {"int8": 8, "int4": 4}
SMALLEST = 1024
"""The fewest elements of a weight that is worth quantizing."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_WIDEST = 1 << 16
"""Elements of a row whose products with 8 bits, 255 · 127 each, add up in 32."""


@dataclass(frozen=True)
class OutputError:
    """What quantisation costs an output: the rms of its difference from the original model's over
    that one's own rms, and the share of rows (last axis) whose largest element is the same one.
    """

    name: str
    rms: float
    top1: float | None


@dataclass(frozen=True)
class Rounding:
    """How activations are rounded: to what, whether two neighbours of a weight must keep within 16
    bits (`narrow`), the linears that stay in float and those that are given 16 bits (`fine`), by
    the name of what they return, and the features that were divided by powers of two before
    (smooth.py), by the value's name.
    """

    activations: Activations
    narrow: bool
    keep: frozenset[str] = frozenset()
    moves: Mapping[str, str] = field(default_factory=dict)
    fine: frozenset[str] = frozenset()

    def to_json(self) -> str:
        """What `from_json` reads; names are sorted."""
        return json.dumps({**asdict(self), "keep": sorted(self.keep), "fine": sorted(self.fine)})

    @classmethod
    def from_json(cls, text: str) -> Rounding:
        """Raises ValueError for what `to_json` never writes."""
        return record(cls, text)


@dataclass
class Linear:
    """One linear: the weight that it has, how that is stored, and the value that it returns.

    `share` is what it has of the squared error of the first output, None where that was not
    measured; of one that has 16 bits or stays in float, what it would have with 8.
    """

    weight: str
    form: str
    returns: str
    share: float | None = None


@dataclass(frozen=True)
class Moved:
    """How many values had features divided by powers of two, and the error of the first output
    that this left on the samples, before and after.
    """

    values: int
    before: float
    after: float


@dataclass
class Quantised:
    """What was quantised: `linears` of the `total` with constant weights, and how many bytes their
    weights had and have. `activations` is what their inputs are rounded to, `forms` what became of
    each, `chosen` the digests of codes that were chosen on data. `weight_error` is the largest
    relative error of a weight, ‖Ŵ − W‖ / ‖W‖, and `bound` what it may be.
    `moved` is what moving outliers out of the activations gave. `kept` are sentences on what
    stayed. `errors`, one for each float output, is empty where verification was off.
    """

    weights: Weights
    linears: int = 0
    total: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    weight_error: float = 0.0
    bound: float = 0.0
    kept: list[str] = field(default_factory=list)
    errors: list[OutputError] = field(default_factory=list)
    moved: Moved | None = None
    activations: Activations | None = None
    forms: list[Linear] = field(default_factory=list)
    chosen: Mapping[str, str] = field(default_factory=dict)


def require_linears(graph: Graph, weights: Weights, source: str) -> None:
    """Raises UsageError where there is nothing to quantise."""
    total, chosen = linears_of(graph)
    if chosen:
        return
    found = f"none of its {total} linears" if total else "it has no linear, so none"
    raise UsageError(
        f"{source} can't have {weights} weights: {found} has a constant weight of at least "
        f"{SMALLEST} float elements, in rows of {BLOCK} or more, that nothing but linears reads. "
        "Leave out --weights."
    )


def quantise(
    graph: Graph,
    weights: Weights,
    rounding: Rounding | None = None,
    chosen: Mapping[str, Stored] = MappingProxyType({}),
) -> Quantised:
    """Quantizes the weights of the graph's linears, each where its error allows, with the `chosen`
    codes by a weight's name (calibrated.py), else the nearest.

    Works row by row, so that no second copy of a weight is held. Weights that an embedding reads
    too, small ones, and those inside of loops stay.
    """
    bits = BITS[weights]
    total, linears = linears_of(graph, frozenset() if rounding is None else rounding.keep)
    found = Quantised(weights, total=total, bound=error_bound(bits))
    found.activations = None if rounding is None else rounding.activations
    reader = Reader()
    builder, known = Builder(graph), Intervals()
    for value, nodes in linears.items():
        data = value.data
        assert data is not None
        held = chosen.get(value.name) or stored(data.detach(), bits, rounding)
        form, codes, scales, error = held
        reader.read(data)
        limit = error_bound(bits, data.shape[1] if form == ROWS else BLOCK)
        if not error <= limit:
            found.kept.append(_too_far(f"The weight {value.name}", found, error, limit))
            continue
        found.bound = max(found.bound, limit)
        found.linears += len(nodes)
        found.weight_error = max(found.weight_error, error)
        found.bytes_before += data.nbytes
        found.bytes_after += codes.nbytes + scales.nbytes
        constants = (
            builder.constant(codes, f"{value.name}.{weights}"),
            builder.constant(scales, f"{value.name}.scales"),
        )
        for node in nodes:
            x, bias = inputs_of(node, "input", "bias")
            build = builder.at(node, node.loc)
            if form == ROWS:
                fine = rounding is not None and node.output.name in rounding.fine
                one_sided = not fine and rounding is not None and is_one_sided(x, known)
                how = {"fine": True} if fine else {"one_sided": True} if one_sided else {}
                new = build("attn.int8_linear", x, *constants, bias, **how)
                told = FINE if fine else form
            else:
                rounds = {"rounds": True} if rounding else {}
                new = build("attn.quantized_linear", x, *constants, bias, bits=bits, **rounds)
                told = form
            found.forms.append(Linear(value.name, told, node.output.name))
            graph.replace(node, [new])
            if new.producer is not None:
                graph.take_place(new.producer, node)
        graph.erase_constant(value)
    if bits == CODE_BITS:
        _quantise_experts(graph, found)
    if grouped := sum(node.op in GROUPED for node in graph):
        why = "only int4, in blocks of 32 features, has an operator for them."
        found.kept.append(f"{grouped} products of experts stay as they are: {why}")
    kept = 0 if rounding is None else len(rounding.keep)
    if kept:
        found.kept.append(f"{kept} of {total} linears stay in float for the sake of the budget.")
    if left := total - sum(map(len, linears.values())) - kept:
        found.kept.append(
            f"{left} of {total} linears stay as they are: their weights are small, or read by an "
            "embedding too."
        )
    return found


def _too_far(what: str, found: Quantised, error: float, limit: float) -> str:
    return (
        f"{what} stays as it is: in {found.weights} it would be off by {error:.2g} of its norm, "
        f"and {limit:.2g} is the most."
    )


def _quantise_experts(graph: Graph, found: Quantised) -> None:
    """Quantizes the experts of mixtures, where the error of each of their matrices allows.

    The operator takes the codes of both products or of none. Each counts as a linear.
    """
    builder, form, limit = Builder(graph), _BLOCKS.format(CODE_BITS), error_bound(CODE_BITS)
    for node in [node for node in graph if node.op in EXPERTS]:
        sides = inputs_of(node, "up", "down")
        found.total += len(sides)
        if not all(_holds_experts(node, value) for value in sides) or {*sides} & {*graph.outputs}:
            continue
        made = [_packed_experts(value) for value in sides]
        error = max(each[2] for each in made)
        if not error <= limit:
            found.kept.append(_too_far(f"One of the experts {sides[0].name}", found, error, limit))
            continue
        given = named_inputs(node)
        for value, (codes, scales, error), side in zip(sides, made, ("up", "down"), strict=True):
            assert value.data is not None
            given[side] = builder.constant(codes, f"{value.name}.{found.weights}")
            given[f"{side}_scales"] = builder.constant(scales, f"{value.name}.scales")
            found.bytes_before += value.data.nbytes
            found.bytes_after += codes.nbytes + scales.nbytes
            found.weight_error = max(found.weight_error, error)
            found.forms.append(Linear(value.name, form, node.output.name))
        found.linears += len(sides)
        new = builder.at(node, node.loc)(node.op, *given.values(), **node.attrs)
        graph.replace(node, [new])
        if new.producer is not None:
            graph.take_place(new.producer, node)
        for value in sides:
            graph.erase_constant(value)


ROWS = "int8, one scale a row"
FINE = f"{ROWS}, inputs in 16 bits"
_BLOCKS = "{} bits, blocks of 32"


class Stored(NamedTuple):
    """The form that a weight takes, its codes and scales, and its relative error."""

    form: str
    codes: torch.Tensor
    scales: torch.Tensor
    error: float

    @property
    def digest(self) -> str:
        """The digest of the codes, by which a file tells which ones were chosen."""
        return digest_of(self.codes)


def digest_of(codes: torch.Tensor) -> str:
    """A digest that is equal for equal bytes."""
    return hashlib.sha256(codes.contiguous().numpy().tobytes()).hexdigest()[:32]


def stored(data: torch.Tensor, bits: int, rounding: Rounding | None) -> Stored:
    """A weight (N, K) with the codes that are nearest to it."""
    width = data.shape[1]
    if bits == 8 and rounding is not None and width <= _WIDEST:
        by_row = packed_rows(data, narrow=rounding.narrow)
        if by_row[2] <= error_bound(bits, width):
            return Stored(ROWS, *by_row)
    return Stored(_BLOCKS.format(bits), *packed(data, bits))


def _packed_experts(value: Value) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Matrices (E, N, K) as the codes and scales of `attn.moe`, and the largest of their errors."""
    assert value.data is not None
    codes, scales, errors = zip(
        *(packed(each, CODE_BITS) for each in value.data.detach()), strict=True
    )
    return torch.stack(codes).flatten(2), torch.stack(scales), max(errors)


def _holds_experts(node: Node, value: Value) -> bool:
    """Whether this is a constant of floats, read by the node alone, that can be cut into blocks."""
    data = value.data if value.is_constant else None
    if data is None or data.is_meta or data.dtype != torch.float32:
        return False
    return value.shape[-1] % BLOCK == 0 and [user for user, _ in value.uses] == [node]


def linears_of(graph: Graph, keep: Collection[str] = ()) -> tuple[int, dict[Value, list[Node]]]:
    """How many linears have a constant weight, and those to quantise by their weight."""
    of: dict[Value, list[Node]] = {}
    for node in graph:
        if node.op == "aten.linear":
            weight = input_of(node, "weight")
            if weight.is_constant and weight.data is not None:
                of.setdefault(weight, []).append(node)
    plain = {
        address_of(value.data)
        for value in graph.constants.values()
        if value.data is not None
        and not all(node.op == "aten.linear" and at == 1 for node, at in value.uses)
    }
    outputs = {*graph.outputs}
    chosen = {
        weight: nodes
        for weight, nodes in of.items()
        if weight.data is not None
        and _fits(weight.data)
        and address_of(weight.data) not in plain
        and weight not in outputs
        and all(len(input_of(node, "input").shape) > 1 for node in nodes)
        and not any(node.output.name in keep for node in nodes)
    }
    return sum(map(len, of.values())), chosen


def is_one_sided(x: Value, known: Intervals) -> bool:
    """Whether its elements reach at least twice as far to one side of 0 as to the other."""
    low, high = known.of(x)
    near, far = sorted((abs(low), abs(high)))
    return low < high and 2 * near <= far and near < math.inf


def _fits(data: torch.Tensor) -> bool:
    return (
        data.dim() == 2
        and data.dtype in _DTYPES
        and not data.is_meta
        and data.shape[1] >= BLOCK
        and data.numel() >= SMALLEST
    )
