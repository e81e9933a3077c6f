"""Every pass alone on random well-typed graphs: equal in float64 before and after, verifier clean.

The graphs are made of what attention models are made of, in any order: projections, heads, scores,
masks, softmaxes in several spellings, contexts, norms, rotations. What fails is shrunk and printed
as the first half of a fixture (fixtures.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from attngraph.ir import (
    Builder,
    DimInfo,
    Graph,
    TensorType,
    Value,
    clone,
    format_graph,
    interpret,
    verify,
)
from attngraph.ir.dims import symbol
from attngraph.passes import registered
from attngraph.passes.rewriting import manager
from tests.passes.fixtures import Fixture, inputs_for, sizes_of, widened

B, S, H, D, M = symbol("b"), symbol("s"), 2, 4, 8
X, HEADS, SCORES = (B, S, M), (B, H, S, D), (B, H, S, S)
_UNEQUAL = {"pack-tokens"}  # leaves rows that are padding unspecified
PASSES = [name for name in registered() if name not in _UNEQUAL]
_FILLS = (-math.inf, -1e9, torch.finfo(torch.float32).min)


class Drawing:
    """A graph that grows by steps; `known` are its values by their shapes."""

    def __init__(self, draw: Callable[[st.SearchStrategy[int]], int], dtype: torch.dtype) -> None:
        self._draw, self.dtype = draw, dtype
        self.graph = Graph("main")
        self.graph.dims.update({"b": DimInfo(1, 9, 2), "s": DimInfo(1, 9, 5)})
        self.build = Builder(self.graph)
        self.known: dict[tuple[object, ...], list[Value]] = {}
        self.masks: list[Value] = []
        self.keep(self.graph.add_input("x", TensorType(dtype, X)))

    def pick(self, count: int) -> int:
        return self._draw(st.integers(0, count - 1))

    def keep(self, value: Value) -> Value:
        self.known.setdefault(tuple(value.shape), []).append(value)
        return value

    def last(self, shape: tuple[object, ...]) -> Value:
        """One of the last values of a shape, made where there is none."""
        found = self.known.get(shape, [])
        if not found:
            _MAKE[shape](self)
            found = self.known[shape]
        return found[-1 - self.pick(min(len(found), 3))]

    def constant(self, *shape: int) -> Value:
        seed = torch.Generator().manual_seed(self.graph.created)
        data = torch.randn(shape, generator=seed, dtype=self.dtype) / M**0.5
        return self.build.constant(data, "weight")


def _linear(d: Drawing) -> None:
    x = d.last(X)
    bias = d.constant(M) if d.pick(2) else None
    d.keep(d.build("aten.linear", x, d.constant(M, M), bias))


def _pointwise(d: Drawing) -> None:
    shape = (X, HEADS)[d.pick(2)]
    x = d.last(shape)
    match d.pick(6):
        case 0:
            d.keep(d.build("aten.gelu", x))
        case 1:
            d.keep(d.build("aten.mul.Tensor", x, d.build("aten.sigmoid", x)))
        case 2:
            d.keep(d.build("aten.add.Tensor", x, d.last(shape)))
        case 3:
            d.keep(d.build("aten.mul.Scalar", x, other=(0.5, 2.0, -1.0)[d.pick(3)]))
        case 4:
            d.keep(d.build("aten.mul.Tensor", x, d.constant(shape[-1])))
        case _:
            d.keep(d.build("aten.add.Tensor", x, d.constant(1, shape[-1])))


def _norm(d: Drawing) -> None:
    x = d.last(X)
    if d.pick(2):
        square = d.build("aten.mul.Tensor", x, x)
        mean = d.build("aten.mean.dim", square, dim=[-1], keepdim=True)
        d.keep(d.build("aten.mul.Tensor", x, d.build("aten.rsqrt", _plus(d, mean, 1e-5))))
    else:
        gain, bias = d.constant(M), d.constant(M)
        d.keep(d.build("aten.layer_norm", x, gain, bias, normalized_shape=[M], eps=1e-5))


def _plus(d: Drawing, x: Value, number: float) -> Value:
    return d.build("aten.add.Scalar", x, other=number)


def _heads(d: Drawing) -> None:
    if d.pick(2) and X in d.known:
        _linear(d)
    split = d.build("aten.reshape", d.last(X), shape=[B, S, H, D])
    d.keep(d.build("aten.permute", split, dims=[0, 2, 1, 3]))


def _merge(d: Drawing) -> None:
    back = d.build("aten.permute", d.last(HEADS), dims=[0, 2, 1, 3])
    d.keep(d.build("aten.reshape", back, shape=[B, S, M]))


def _rotate(d: Drawing) -> None:
    x = d.last(HEADS)
    one = d.build("aten.slice.Tensor", x, dim=3, start=0, end=D // 2)
    two = d.build("aten.slice.Tensor", x, dim=3, start=D // 2, end=D)
    turned = d.build("aten.cat", d.build("aten.neg", two), one, dim=-1)
    places = d.build("aten._to_copy", d.build("aten.arange", end=S), dtype=d.dtype)
    column = d.build("aten.reshape", places, shape=[S, 1])
    half = d.build("aten.mul.Tensor", column, d.constant(1, D // 2))
    angles = d.build("aten.cat", half, half, dim=-1)
    left = d.build("aten.mul.Tensor", x, d.build("aten.cos", angles))
    right = d.build("aten.mul.Tensor", turned, d.build("aten.sin", angles))
    d.keep(d.build("aten.add.Tensor", left, right))


def _scores(d: Drawing) -> None:
    q, k = d.last(HEADS), d.last(HEADS)
    d.keep(d.build("aten.matmul", q, d.build("aten.permute", k, dims=[0, 1, 3, 2])))


def _mask(d: Drawing) -> Value:
    """Bool, and broadcasts with scores."""
    place = d.build("aten.arange", end=S)
    rows = d.build("aten.reshape", place, shape=[S, 1])
    match d.pick(5):
        case 0:
            mask = d.build("aten.le.Tensor", place, rows)
        case 1:
            apart = d.build("aten.abs", d.build("aten.sub.Tensor", place, rows))
            mask = d.build("aten.lt.Scalar", apart, other=3)
        case 2:
            kept = d.graph.add_input(f"kept_{len(d.graph.inputs)}", TensorType(torch.bool, (B, S)))
            mask = d.build("aten.reshape", kept, shape=[B, 1, 1, S])
        case 3:
            kind = TensorType(torch.int64, (B,))
            lengths = d.graph.add_input(f"lengths_{len(d.graph.inputs)}", kind)
            column = d.build("aten.reshape", lengths, shape=[B, 1, 1, 1])
            mask = d.build("aten.lt.Tensor", place, column)
        case _:
            mask = d.build("aten.ge.Tensor", place, rows)
    if d.masks and d.pick(2):
        mask = d.build("aten.__and__.Tensor", mask, d.masks[-1])
    d.masks.append(mask)
    return mask


def _masked(d: Drawing) -> None:
    scores, mask = d.last(SCORES), _mask(d)
    low = d.build.constant(torch.tensor(_FILLS[d.pick(3)], dtype=d.dtype), "fill")
    if d.pick(2):
        d.keep(d.build("aten.where.self", mask, scores, low))
    else:
        zero = d.build.constant(torch.tensor(0.0, dtype=d.dtype), "zero")
        d.keep(d.build("aten.add.Tensor", scores, d.build("aten.where.self", mask, zero, low)))


def _scaled(d: Drawing) -> None:
    scores = d.last(SCORES)
    if d.pick(3):
        d.keep(d.build("aten.mul.Scalar", scores, other=0.3))
    else:
        d.keep(d.build("aten.add.Tensor", scores, d.constant(1, H, 1, 1)))


def _softmax(d: Drawing) -> None:
    scores = d.last(SCORES)
    match d.pick(4):
        case 0:
            top = d.build("aten.amax", scores, dim=[-1], keepdim=True)
            power = d.build("aten.exp", d.build("aten.sub.Tensor", scores, top))
            total = d.build("aten.sum.dim_IntList", power, dim=[-1], keepdim=True)
            d.keep(d.build("aten.div.Tensor", power, total))
        case 1:
            d.keep(d.build("aten.exp", d.build("aten.log_softmax.int", scores, dim=-1)))
        case axis:
            d.keep(d.build("aten.softmax.int", scores, dim=-1 if axis == 2 or d.pick(4) else -2))


def _context(d: Drawing) -> None:
    d.keep(d.build("aten.matmul", d.last(SCORES), d.last(HEADS)))


_MAKE: dict[tuple[object, ...], Callable[[Drawing], None]] = {HEADS: _heads, SCORES: _scores}
_STEPS = (_linear, _pointwise, _norm, _heads, _merge, _rotate, _scores, _scaled, _masked)
_IN_ORDER = (_linear, _heads, _scores, _scaled, _masked, _softmax, _context, _merge)


@st.composite
def graphs(draw: Callable[..., int], dtype: torch.dtype) -> Graph:
    """Some steps in any order, and often those of an attention with others between them."""
    d = Drawing(draw, dtype)
    steps = (*_STEPS, _softmax, _context)
    if draw(st.integers(0, 3)):
        for step in _IN_ORDER:
            step(d)
            if not draw(st.integers(0, 2)):
                steps[d.pick(len(steps))](d)
    for _ in range(draw(st.integers(1, 6))):
        steps[d.pick(len(steps))](d)
    values = [value for found in d.known.values() for value in found if value.producer]
    outputs = list(dict.fromkeys([values[-1], values[d.pick(len(values))]]))
    d.graph.set_outputs(outputs, [f"o{place}" for place in range(len(outputs))])
    return d.graph


def _assert_equal(old: Graph, new: Graph, inputs: list[torch.Tensor], dtype: torch.dtype) -> None:
    """In float64, up to the rounding of new weights to their dtype."""
    results = (interpret(graph, inputs) for graph in (old, new))
    for before, after in zip(*results, strict=True):
        finite = before[before.isfinite()].abs()
        scale = float(finite.amax()) if finite.numel() else 0.0
        atol = 1000 * torch.finfo(dtype).eps * scale
        torch.testing.assert_close(after, before, rtol=0, atol=atol, equal_nan=True)


def _holds(old: Graph, name: str, dtype: torch.dtype) -> None:
    new = clone(old)
    try:
        registered()[name]().run(new)
        verify(new)
        wide, wide_new = widened(old), widened(new)
        for sizes in sizes_of(old):
            inputs = inputs_for(wide, sizes, Fixture(Path(), "", None, [], "", ""))
            _assert_equal(wide, wide_new, inputs, dtype)
    except Exception as error:
        error.add_note(f"# claim: …\n# pass: {name}\n{format_graph(old, loc=False)}// ----")
        raise


def _tried(names: list[str], examples: int, is_canonical: bool) -> None:
    dtype = torch.float32 if is_canonical else torch.float64

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(graphs(dtype))
    def holds(old: Graph) -> None:
        if is_canonical:
            registered()["canonicalize"]().run(old)
        for name in names:
            _holds(old, name, dtype)

    holds()


@pytest.mark.parametrize("is_canonical", [False, True], ids=["drawn", "canonical"])
def test_passes_alone_keep_random_graphs(is_canonical: bool) -> None:
    _tried(PASSES, 3, is_canonical)


@pytest.mark.slow
@pytest.mark.parametrize("is_canonical", [False, True], ids=["drawn", "canonical"])
@pytest.mark.parametrize("name", PASSES)
def test_a_pass_alone_keeps_random_graphs(name: str, is_canonical: bool) -> None:
    _tried([name], 150, is_canonical)


@pytest.mark.slow
@pytest.mark.defect
def test_a_wrong_pass_is_found_and_printed_as_a_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        def run(self, graph: Graph) -> list[object]:
            for node in list(graph):
                if node.op == "aten.mul.Scalar":
                    graph.replace_uses(node.output, node.inputs[0])
            return []

    monkeypatch.setitem(manager._PASSES, "dce", Wrong)
    with pytest.raises(AssertionError) as caught:
        _tried(["dce"], 30, is_canonical=False)
    assert "# pass: dce\ngraph @main" in "".join(caught.value.__notes__)
