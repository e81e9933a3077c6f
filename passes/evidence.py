"""Evaluates a region before and after a rewrite, in float64, on inputs chosen to tell them apart.

Padding with holes, rows that may attend to nothing, masks of 0, 1 and 2, -inf and finfo.min among
the biases, large logits, batch 1 and sequence 1, and no two dims alike. Equal regions (the layers
of a model) are evaluated once.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from attngraph.ir import Graph, Node, ScalarType, Value
from attngraph.ir.dims import substitute
from attngraph.ir.ops import evaluate
from attngraph.passes.cse import hashable
from attngraph.passes.mask_evidence import backward_slice, trial_sizes

_KINDS = ("plain", "large", "holes", "masked", "open")
_CHANCE = {"plain": 0.7, "large": 0.8, "holes": 0.3, "masked": 0.0, "open": 1.0}
_TOLERANCE = 1e-6  # of float64 against itself: reassociation gives 1e-13, fills in float32 1e-8
_MOST_ELEMENTS = 1 << 21


@dataclass
class Evidence:
    """Compares regions of one graph. Remembers those it has compared."""

    graph: Graph
    _known: dict[Hashable, str | None] = field(default_factory=dict)

    def disagreement(
        self, pairs: Sequence[tuple[Value, Value]], leaves: Iterable[Value], biases: Iterable[Value]
    ) -> str | None:
        """Why a pair of (old, new) values differs; None where they agree wherever they can run.

        Both are functions of `leaves`, and of what lies above otherwise. `biases` are leaves that
        may hold -inf and finfo.min.
        """
        cut, special = set(leaves), set(biases)
        roots = [value for pair in pairs for value in pair]
        sampled, nodes = backward_slice(roots, lambda value: value in cut)
        key = _key(roots, sampled, nodes, special)
        if key not in self._known:
            self._known[key] = self._compare(pairs, sampled, nodes, special)
        return self._known[key]

    def _compare(
        self,
        pairs: Sequence[tuple[Value, Value]],
        sampled: Sequence[Value],
        nodes: Sequence[Node],
        special: set[Value],
    ) -> str | None:
        for sizes in trial_sizes(self.graph.dims):
            if _elements(nodes, sizes) > _MOST_ELEMENTS:
                continue
            for kind in _KINDS:
                memory = _run(sampled, nodes, sizes, kind, special, {old for old, _ in pairs})
                if memory is None:
                    continue  # the model itself rejects this input
                for old, new in pairs:
                    if new not in memory:
                        return f"at {_shown(sizes)} the rewritten region can't be evaluated"
                    if not _close(memory[new], memory[old]):
                        return f"at {_shown(sizes)} it gives other values ({kind})"
        return None


def _shown(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {size}" for name, size in sizes.items()) or "its size"


def _elements(nodes: Sequence[Node], sizes: Mapping[str, int]) -> int:
    most = 0
    for node in nodes:
        for value in node.outputs:
            if not isinstance(value.type, ScalarType):
                most = max(most, int(substitute(value.tensor_type.numel, sizes)))
    return most


def _key(
    roots: Sequence[Value], sampled: Sequence[Value], nodes: Sequence[Node], special: set[Value]
) -> Hashable:
    number: dict[Value, int] = {}
    head = []
    for value in sampled:
        number[value] = len(number)
        head.append((value.type, value in special, _identity(value)))
    body = []
    for node in nodes:
        inputs = tuple(None if value is None else number[value] for value in node.inputs)
        body.append((node.op, inputs, hashable(node.attrs)))
        for value in node.outputs:
            number[value] = len(number)
    return tuple(head), tuple(body), tuple(number[value] for value in roots)


def _identity(value: Value) -> Hashable:
    """Weights are sampled, so their data is no part of a region; a small constant's is."""
    data = value.data
    if data is None or data.numel() > 16 or data.is_complex():
        return None
    return hashable(data.flatten().tolist())


def _run(
    sampled: Sequence[Value],
    nodes: Sequence[Node],
    sizes: Mapping[str, int],
    kind: str,
    special: set[Value],
    needed: set[Value],
) -> dict[Value, Any] | None:
    """Every value of both regions; None where what the model wrote itself can't run."""
    known = dict(sizes)
    memory: dict[Value, Any] = {}
    try:
        for value in sampled:
            memory[value] = _sample(value, known, kind, value in special)
    except Exception:
        return None
    for node in nodes:
        if any(value is not None and value not in memory for value in node.inputs):
            continue
        inputs = [None if value is None else memory[value] for value in node.inputs]
        try:
            with torch.no_grad():
                results = evaluate(_widened(node), inputs, known)
        except Exception:
            continue
        memory.update(zip(node.outputs, results, strict=True))
    return memory if needed <= memory.keys() else None


class _Wide:
    """A node whose dtype attributes ask for float64 where the original's ask for less."""

    def __init__(self, node: Node, attrs: Mapping[str, Any]) -> None:
        self.op, self.attrs = node.op, attrs


def _widened(node: Node) -> Any:
    if not any(isinstance(value, torch.dtype) for value in node.attrs.values()):
        return node
    return _Wide(node, {name: _wide(value) for name, value in node.attrs.items()})


def _wide(value: Any) -> Any:
    is_narrow = isinstance(value, torch.dtype) and value.is_floating_point
    return torch.float64 if is_narrow else value


def _sample(value: Value, sizes: Mapping[str, int], kind: str, may_mask: bool) -> Any:
    if value.data is not None and (value.data.numel() <= 4096 or not _is_float(value)):
        return value.data.double() if _is_float(value) else value.data
    if isinstance(value.type, ScalarType):
        return sizes[value.type.name or ""]
    seed = torch.Generator().manual_seed(zlib.crc32(f"{value.name}{kind}".encode()))
    shape = [int(substitute(dim, sizes)) for dim in value.shape]
    there = torch.rand(shape, generator=seed) < _CHANCE[kind]
    if _is_float(value):
        drawn = torch.randn(shape, generator=seed, dtype=torch.float64)
        drawn = drawn * (8.0 if kind == "large" else 1.0)
        if may_mask and kind in ("holes", "masked"):
            low = -torch.inf if kind == "masked" else torch.finfo(torch.float32).min
            drawn = torch.where(there, drawn, low)
        return drawn
    if value.dtype == torch.bool:
        return there
    if value.dtype.is_complex:
        raise ValueError(f"%{value.name} is complex.")
    return (there * torch.randint(1, 3, shape, generator=seed)).to(value.dtype)


def _is_float(value: Value) -> bool:
    return value.dtype.is_floating_point


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    scale = float(expected[expected.isfinite()].abs().max()) if expected.isfinite().any() else 1.0
    return torch.allclose(
        found.double(),
        expected.double(),
        rtol=0,
        atol=_TOLERANCE * max(scale, 1e-3),
        equal_nan=True,
    )
