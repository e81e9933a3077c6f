"""Regions of a graph, evaluated in float64, or in the dtypes that they have.

Weights have their real values, but are never multiplied at full size: the activations that meet a
large weight are zero in most places, and only the weight's rows that matter are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch.utils.weak import WeakIdKeyDictionary

from attngraph.analysis.layout.generalize import Generalized, generalized
from attngraph.analysis.values.weights import Derivation
from attngraph.analysis.values.widening import _Again, wide_node, widened
from attngraph.errors import IRError
from attngraph.ir import Dim, Node, ScalarType, TensorType, Value
from attngraph.ir.dims import product, substitute
from attngraph.ir.hashing import structure
from attngraph.ir.ops import attribute, evaluate
from attngraph.ir.slices import backward_slice
from attngraph.ir.traits import ATTENTION, LAYOUT
from attngraph.passes.rewriting.sparse_products import PRODUCTS, only_needed
from attngraph.passes.rewriting.trials import Aims, sample

_HEAVY = 1 << 16  # elements of a constant that stays as it is stored


@dataclass(frozen=True, slots=True)
class Region:
    """The leaves and nodes of both forms, inputs first; `special` leaves may hold -inf.

    `known` are the leaves of the old form, which may be drawn. `derived` says of new constants what
    they are made of, `unrounded` what they were before they were rounded to their dtype.
    `as_typed` evaluates in the graph's own dtypes, in which fills overflow, absorb and round.
    """

    leaves: Sequence[Value]
    nodes: Sequence[Node]
    special: frozenset[Value] = frozenset()
    known: frozenset[Value] = frozenset()
    derived: Mapping[Value, Derivation] = field(default_factory=dict)
    unrounded: Mapping[Value, torch.Tensor] = field(default_factory=dict)
    general: Generalized | None = None
    as_typed: bool = False

    def generalized(
        self, pairs: Iterable[tuple[Value, Value]], dims: Iterable[str]
    ) -> Region | None:
        """The region with large static sizes that may be any; None where there are none.

        The constants of the old form are cut to the sizes; those of the new one keep theirs.
        """
        kept = {value for value in self.leaves if value.is_constant and value not in self.known}
        found = generalized(self.leaves, self.nodes, pairs, kept, dims)
        return None if found is None else replace(self, general=found)

    def freed(self, pairs: Iterable[tuple[Value, Value]], leaves: Iterable[Value]) -> Region:
        """The region as a function of some of its values too, which are drawn."""
        leaves = list(leaves)
        cut = {*self.leaves, *leaves}
        sampled, nodes = backward_slice([v for pair in pairs for v in pair], cut.__contains__)
        known = self.known.union(leaves)
        return replace(self, leaves=sampled, nodes=nodes, known=known)

    def shape(self, value: Value) -> tuple[Dim, ...]:
        """The value's own shape, or what it was generalised to."""
        return value.shape if self.general is None else self.general.shapes[value]

    def cuts(self, constant: Value) -> bool:
        """Whether trials see a part of a constant only."""
        return self.shape(constant) != constant.shape

    def key(self, roots: Sequence[Value]) -> Hashable:
        """Equal for regions that differ in names and in the data of weights only."""
        number: dict[Value, int] = {}
        head = []
        for value in self.leaves:
            number[value] = len(number)
            made = self.derived.get(value)
            sources = tuple(number.get(source, -1) for source in made.sources) if made else ()
            head.append((value.type, value in self.special, _identity(value), sources))
        body = structure(self.nodes, number)
        return tuple(head), body, tuple(number[value] for value in roots)

    def unknown(self) -> Value | None:
        """A constant of the new form alone that has no data and isn't made of what has a value."""
        for value in self.leaves:
            if value in self.known or not value.is_constant or has_data(value):
                continue
            made = self.derived.get(value)
            if made is None or not self.known.issuperset(made.sources):
                return value
        return None

    def _again(self, node: Node) -> Any:
        """The node, with the sizes among its attributes as they were generalised."""
        changed = None if self.general is None else self.general.attrs.get(node)
        return node if changed is None else _Again(node.op, {**node.attrs, **changed})

    def _typed(self, value: Value, data: Any) -> Any:
        """A leaf's data in the dtype in which the region is evaluated."""
        is_tensor = isinstance(data, torch.Tensor)
        return data.to(value.dtype) if self.as_typed and is_tensor else widened(data)

    def _evaluated(
        self, node: Node, inputs: Sequence[Any], sizes: Mapping[str, int]
    ) -> tuple[Any, ...]:
        again = self._again(node)
        if self.as_typed:
            return evaluate(again, inputs, sizes)
        return evaluate(wide_node(again), list(map(widened, inputs)), sizes)

    def fixed(self, sizes: Mapping[str, int], *, tail: bool = False) -> dict[Value, Any]:
        """What is the same for all trials at some sizes: constants, and large ones laid out anew.

        Large ones keep the dtype in which they are stored, so most take no memory. Of one that is
        cut the head is taken, or the `tail`.
        """
        memory: dict[Value, Any] = {}
        heavy: set[Value] = set()
        for value in self.leaves:
            data = self.unrounded.get(value, value.data)
            if data is not None and not data.is_meta:
                data = self._cut(value, data.detach(), sizes, tail)
                stays = is_heavy(data) and not self.as_typed
                memory[value] = data if stays else self._typed(value, data)
                heavy |= {value} if stays else set()
        for node in self.nodes:
            if node.op in LAYOUT and node.inputs and all(value in heavy for value in node.inputs):
                try:
                    inputs = [memory[value] for value in node.operands]
                    results = evaluate(self._again(node), inputs, sizes)
                except (IRError, RuntimeError, IndexError, TypeError, ValueError):
                    continue
                memory.update(zip(node.outputs, results, strict=True))
                heavy.update(node.outputs)
        return memory

    def _cut(
        self, value: Value, data: torch.Tensor, sizes: Mapping[str, int], tail: bool
    ) -> torch.Tensor:
        if self.general is not None:
            for axis, dim in enumerate(self.shape(value)):
                size, whole = int(substitute(dim, sizes)), data.shape[axis]
                if size < whole:
                    data = data.narrow(axis, whole - size if tail else 0, size)
        return data

    def has(self, sizes: Mapping[str, int]) -> bool:
        """Whether every shape of the region is one of numbers at these sizes."""
        try:
            self.elements(sizes, {})
        except IRError:
            return False
        return True

    def elements(self, sizes: Mapping[str, int], fixed: Mapping[Value, Any]) -> tuple[int, int]:
        """How many elements a trial would compute, and those of its largest tensor."""
        made = [value for node in self.nodes for value in node.outputs if value not in fixed]
        shapes = [self.shape(value) for value in made if not isinstance(value.type, ScalarType)]
        shapes += [scores for node in self.nodes if (scores := self._scores(node))]
        counts = [int(substitute(product(shape), sizes)) for shape in shapes]
        return sum(counts), max(counts, default=0)

    def _scores(self, node: Node) -> tuple[Dim, ...]:
        """The shape of the scores inside an attention; nothing for other nodes."""
        if node.op == "aten.scaled_dot_product_attention":
            query, key = (self.shape(value) for value in node.inputs[:2] if value is not None)
            return (*query[:-1], key[-2])
        if node.op in ATTENTION:
            query, key = (self.shape(value) for value in node.inputs[:2] if value is not None)
            return (*query[:2], attribute(node, "heads"), key[1])
        return ()

    def run(
        self,
        sizes: Mapping[str, int],
        kind: str,
        fixed: Mapping[Value, Any],
        aims: Aims | None = None,
        nudge: float = 0.0,
    ) -> dict[Value, Any]:
        """Every value that can be computed in one trial, as `sample` has its kind and `aims`.
        Floats that are drawn are off by a relative `nudge`, up or down. Sizes that are found in the
        trial, as that of `nonzero`, are those of what was found.

        Raises Misread where a value has another shape than the region was generalised to.
        """
        memory: dict[Value, Any] = dict(fixed)
        sparse = not self.as_typed and any(is_heavy(tensor) for tensor in fixed.values())
        drawn = [value for value in self.leaves if value not in memory]
        for value in drawn:
            if value in self.known or value not in self.derived:
                shape = None if isinstance(value.type, ScalarType) else self.shape(value)
                try:
                    found = sample(
                        value,
                        sizes,
                        kind,
                        may_mask=value in self.special,
                        sparse=sparse,
                        shape=shape,
                        aims=aims,
                    )
                    memory[value] = self._typed(value, _nudged(found, nudge))
                except (IRError, KeyError, RuntimeError, TypeError, ValueError):
                    return {}
        for value in drawn:
            if value not in memory:
                made_of = self.derived[value]
                memory[value] = made_of.compute([widened(memory[v]) for v in made_of.sources])
        sizes, found_out = dict(sizes), self._found_out()
        for node in self.nodes:
            made = [value for value in node.outputs if value not in memory]
            if not made or any(value is not None and value not in memory for value in node.inputs):
                continue
            inputs = [None if value is None else memory[value] for value in node.inputs]
            if node.op in PRODUCTS:
                inputs = only_needed(node, inputs)
            try:
                with torch.no_grad():
                    results = self._evaluated(node, inputs, sizes)
            except Exception:
                continue  # operators raise what they like; the caller sees that the value lacks
            results_of = zip(node.outputs, results, strict=True)
            memory.update((value, result) for value, result in results_of if value in made)
            if found_out:
                sizes |= _found(node, memory, found_out)
            self._check(node, memory, sizes)
        return memory

    def _found_out(self) -> set[str]:
        """Dims that no leaf has, but a value that is made of them."""
        if self.general is not None:
            return set()
        kinds = (value.type for node in self.nodes for value in node.outputs)
        shapes = (kind.shape for kind in kinds if isinstance(kind, TensorType))
        dims = {str(dim) for shape in shapes for dim in shape if isinstance(dim, sympy.Symbol)}
        for value in self.leaves if dims else ():
            dims -= value.type.symbols
        return dims

    def _check(self, node: Node, memory: Mapping[Value, Any], sizes: Mapping[str, int]) -> None:
        if self.general is None:
            return
        for value in node.outputs:
            shape = tuple(substitute(dim, sizes) for dim in self.shape(value))
            if tuple(memory[value].shape) != shape:
                raise Misread(f"%{value.name} is {tuple(memory[value].shape)}, not {shape}")


def _found(node: Node, memory: Mapping[Value, Any], dims: set[str]) -> dict[str, int]:
    """The sizes of those dims that a node's results are the first to have, which are taken out."""
    sizes = {}
    for value in node.outputs:
        shape = value.shape if isinstance(value.type, TensorType) else ()
        for dim, size in zip(shape, memory[value].shape if shape else (), strict=False):
            if isinstance(dim, sympy.Symbol) and str(dim) in dims:
                dims.discard(str(dim))
                sizes[str(dim)] = size
    return sizes


class Misread(Exception):
    """What was read of the sizes of a region isn't so."""


def has_data(value: Value) -> bool:
    return value.data is not None and not value.data.is_meta


def is_heavy(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.numel() > _HEAVY


def _nudged(drawn: Any, nudge: float) -> Any:
    if not nudge or not isinstance(drawn, torch.Tensor) or not drawn.dtype.is_floating_point:
        return drawn
    # By chance: those of every other element cancel in products of rows that are one number each.
    signs = 1 - 2 * torch.randint(0, 2, drawn.shape, generator=torch.Generator().manual_seed(1))
    return drawn.double() * (1 + nudge * signs.double())  # of integers it were float32, and 1


_SHOWN = 16
"""Elements of a constant up to which all are part of what a region is."""
_digests: Any = WeakIdKeyDictionary()
"""A version and a digest by tensor."""


def _identity(value: Value) -> Hashable:
    """The data of weights is no part of what a region is; that of small constants, masks and tables
    of integers is.
    """
    data = value.data
    if data is None or data.is_meta:
        return None
    if data.device.type != "cpu" or data.layout is not torch.strided:
        return id(data)
    if data.numel() <= _SHOWN:
        return str(data.flatten().tolist())
    return _digest(data) if _is_structure(data) else None


def _is_structure(data: torch.Tensor) -> bool:
    """Whether its elements choose, as those of a mask do: no floats, or floats of few kinds."""
    if not data.is_floating_point() and not data.is_complex():
        return True
    rows = data.detach()
    while rows.dim() > 1:  # the last row is the one that a causal mask shows most of
        rows = torch.cat([rows[0], rows[-1]]) if rows.dim() == 2 else rows[-1]
    return len(set(rows[:256].tolist())) <= _SHOWN // 2


def _digest(data: torch.Tensor) -> str:
    known = _digests.get(data)
    if known is None or known[0] != data._version:
        raw = data.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        known = data._version, hashlib.blake2b(raw, digest_size=16).hexdigest()
        _digests[data] = known
    return str(known[1])
