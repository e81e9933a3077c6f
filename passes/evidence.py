"""Evaluates a region before and after a rewrite, in float64, on inputs chosen to tell them apart.

What the inputs are is in trials.py. Equal regions (the layers of a model) are evaluated once.
Weights have their real values, but are never multiplied at full size: the activations that meet a
large weight are zero in most places, and only the weight's rows that matter are read.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from attngraph.errors import IRError
from attngraph.ir import Graph, Node, ScalarType, Value
from attngraph.ir.dims import substitute
from attngraph.ir.ops import evaluate
from attngraph.passes.axes import COPIES, LAYOUTS, RESHAPES
from attngraph.passes.cse import hashable
from attngraph.passes.sparse_products import PRODUCTS, only_needed
from attngraph.passes.trials import ATTENTION, backward_slice, sample, shown, trial_sizes

TOLERANCE = 1e-6  # of float64 against itself: reassociation gives 1e-13, fills in float32 1e-8
_SMALL = 1 << 21  # elements of the largest tensor of a trial
_MOST_ELEMENTS = 1 << 24
_HEAVY = 1 << 16  # elements of a constant that stays as it is stored
_VIEWS = RESHAPES | LAYOUTS | COPIES


@dataclass
class Evidence:
    """Compares regions of one graph. Remembers those it has compared."""

    graph: Graph
    _known: dict[Hashable, str | None] = field(default_factory=dict)

    def disagreement(
        self,
        pairs: Sequence[tuple[Value, Value]],
        leaves: Iterable[Value],
        biases: Iterable[Value] = (),
        *,
        kinds: Sequence[str] = ATTENTION,
        tolerance: float = TOLERANCE,
        depth: int | None = None,
        unrounded: Mapping[Value, torch.Tensor] | None = None,
    ) -> str | None:
        """Why a pair of (old, new) values differs; None where they agree wherever they can run.

        Both are functions of `leaves`, and of what lies above otherwise, `depth` nodes at most.
        `biases` are leaves that may hold -inf and finfo.min. The tolerance is relative to the
        largest element; 0 asks for equal bits. `unrounded` are constants before they were rounded
        to their dtype.
        """
        cut = set(leaves)
        roots = [value for pair in pairs for value in pair]
        sampled, nodes = backward_slice(roots, cut.__contains__, depth)
        region = _Region(sampled, nodes, frozenset(biases))
        key = (region.key(roots), tuple(kinds), tolerance)
        if key not in self._known:
            self._known[key] = self._compare(pairs, region, kinds, tolerance, unrounded or {})
        return self._known[key]

    def _compare(
        self,
        pairs: Sequence[tuple[Value, Value]],
        region: _Region,
        kinds: Sequence[str],
        tolerance: float,
        unrounded: Mapping[Value, torch.Tensor],
    ) -> str | None:
        if region.lacks_data([old for old, _ in pairs]):
            return None
        fixed = region.fixed(unrounded)
        trials = trial_sizes(self.graph.dims)
        size = [region.elements(sizes, fixed) for sizes in trials]
        small = [sizes for sizes, count in zip(trials, size, strict=True) if count <= _SMALL]
        if not small and min(size) <= _MOST_ELEMENTS:  # static sizes: one trial, at full size
            small, kinds = [trials[size.index(min(size))]], kinds[:1]
        for sizes in small:
            for kind in kinds:
                memory = region.run(sizes, kind, fixed)
                if not all(old in memory for old, _ in pairs):
                    continue  # the model itself rejects this input
                for old, new in pairs:
                    if new not in memory:
                        return f"at {shown(sizes)} the rewritten region can't be evaluated"
                    if not _close(memory[new], memory[old], tolerance):
                        return f"at {shown(sizes)} it gives other values ({kind})"
        return None


@dataclass(frozen=True, slots=True)
class _Region:
    """The leaves and nodes of both forms, inputs first; `special` leaves may hold -inf."""

    leaves: Sequence[Value]
    nodes: Sequence[Node]
    special: frozenset[Value]

    def key(self, roots: Sequence[Value]) -> Hashable:
        """Equal for regions that differ in names and in the data of weights only."""
        number: dict[Value, int] = {}
        head = []
        for value in self.leaves:
            number[value] = len(number)
            head.append((value.type, value in self.special, _identity(value)))
        body = []
        for node in self.nodes:
            inputs = tuple(None if value is None else number[value] for value in node.inputs)
            body.append((node.op, inputs, hashable(node.attrs)))
            for value in node.outputs:
                number.setdefault(value, len(number))
        return tuple(head), tuple(body), tuple(number[value] for value in roots)

    def lacks_data(self, old: Sequence[Value]) -> bool:
        """Whether the rewrite made a constant without data, as of a graph without weights."""
        unknown = {v for v in self.leaves if v.is_constant and not _has_data(v)}
        if not unknown:
            return False
        cut = set(self.leaves)
        return bool(unknown - set(backward_slice(old, cut.__contains__)[0]))

    def fixed(self, unrounded: Mapping[Value, torch.Tensor]) -> dict[Value, Any]:
        """What doesn't change between trials: constants, and large ones laid out anew.

        Large ones keep the dtype in which they are stored, so most take no memory.
        """
        memory: dict[Value, Any] = {}
        heavy: set[Value] = set()
        for value in self.leaves:
            data = unrounded.get(value, value.data)
            if data is not None and not data.is_meta:
                is_heavy = data.numel() > _HEAVY
                memory[value] = data.detach() if is_heavy else widened(data.detach())
                heavy |= {value} if is_heavy else set()
        for node in self.nodes:
            if node.op in _VIEWS and node.inputs and all(value in heavy for value in node.inputs):
                try:
                    results = evaluate(node, [memory[v] for v in node.inputs if v], {})
                except (IRError, RuntimeError, IndexError, TypeError, ValueError):
                    continue
                memory.update(zip(node.outputs, results, strict=True))
                heavy.update(node.outputs)
        return memory

    def elements(self, sizes: Mapping[str, int], fixed: Mapping[Value, Any]) -> int:
        """The largest tensor that a trial would compute."""
        made = [value for node in self.nodes for value in node.outputs if value not in fixed]
        shapes = [value.tensor_type for value in made if not isinstance(value.type, ScalarType)]
        return max((int(substitute(shape.numel, sizes)) for shape in shapes), default=0)

    def run(
        self, sizes: Mapping[str, int], kind: str, fixed: Mapping[Value, Any]
    ) -> dict[Value, Any]:
        """Every value that can be computed in one trial."""
        known = dict(sizes)
        memory: dict[Value, Any] = dict(fixed)
        sparse = any(_is_heavy(tensor) for tensor in fixed.values())
        for value in self.leaves:
            if value not in memory:
                try:
                    special = value in self.special
                    memory[value] = sample(value, known, kind, may_mask=special, sparse=sparse)
                except (IRError, KeyError, RuntimeError, TypeError, ValueError):
                    return {}
        for node in self.nodes:
            made = [value for value in node.outputs if value not in memory]
            if not made or any(value is not None and value not in memory for value in node.inputs):
                continue
            inputs = [None if value is None else memory[value] for value in node.inputs]
            if node.op in PRODUCTS:
                inputs = only_needed(node, inputs)
            try:
                with torch.no_grad():
                    results = evaluate(wide_node(node), list(map(widened, inputs)), known)
            except Exception:
                continue  # operators raise what they like; the caller sees that the value lacks
            results_of = zip(node.outputs, results, strict=True)
            memory.update((value, result) for value, result in results_of if value in made)
        return memory


def _has_data(value: Value) -> bool:
    return value.data is not None and not value.data.is_meta


def _is_heavy(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.numel() > _HEAVY


def _identity(value: Value) -> Hashable:
    """The data of weights is no part of what a region is; a small constant's is."""
    data = value.data
    if data is None or data.is_meta or data.numel() > 16:
        return None
    return str(data.flatten().tolist())


class _Wide:
    """A node whose dtype attributes ask for float64 where the original's ask for less."""

    def __init__(self, node: Node, attrs: Mapping[str, Any]) -> None:
        self.op, self.attrs = node.op, attrs


def wide_node(node: Node) -> Any:
    """The node to evaluate on float64 in its place."""
    if not any(isinstance(value, torch.dtype) for value in node.attrs.values()):
        return node
    return _Wide(node, {name: _wide(value) for name, value in node.attrs.items()})


def _wide(value: Any) -> Any:
    if isinstance(value, torch.dtype) and value.is_complex:
        return torch.complex128
    is_narrow = isinstance(value, torch.dtype) and value.is_floating_point
    return torch.float64 if is_narrow else value


def widened(value: Any) -> Any:
    """A tensor of floats in float64; anything else as it is."""
    return value.to(_wide(value.dtype)) if isinstance(value, torch.Tensor) else value


def _close(found: Any, expected: Any, tolerance: float) -> bool:
    if not isinstance(found, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return bool(found == expected)
    if found.shape != expected.shape:
        return False
    if found.dtype.is_complex and expected.dtype.is_complex:
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    found, expected = found.double(), expected.double()
    finite = expected[expected.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    atol = tolerance * max(scale, 1e-3)
    return torch.allclose(found, expected, rtol=0, atol=atol, equal_nan=True)
