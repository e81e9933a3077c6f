"""What stands on the algebra of masks is equal where no trial reached both sides of a condition.

Masks are drawn as trees of comparisons over positions, ids, lengths and bools, given as a bool
mask, as biases of finite or infinite fills, or both. The comparison is switched off, so that what
fold-masks and bound-keys make stands on their proof, and both forms run with rows hidden whole.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from attngraph.ir import (
    Builder,
    Dim,
    DimInfo,
    Graph,
    TensorType,
    Value,
    clone,
    format_graph,
    interpret,
    verify,
)
from attngraph.ir.dims import substitute, symbol
from attngraph.passes import run
from attngraph.passes.attention.remasking import Remasking
from attngraph.passes.rewriting.outcomes import Unreached
from tests.passes.making import Draw, Making

pytestmark = pytest.mark.wide

LOW = torch.finfo(torch.float32).min
BATCH, SEQ = symbol("batch"), symbol("seq")
ATOMS = ("keep", "pad id", "segments", "before", "window", "lengths", "rows", "counted", "constant")


class Masks:
    """An attention whose mask and bias are drawn."""

    def __init__(self, draw: Draw) -> None:
        graph = Graph("g")
        graph.dims.update({"batch": DimInfo(1, None, 3), "seq": DimInfo(1, None, 5)})
        self.make = Making(draw, graph, Builder(graph))
        self.build = self.make.build
        self.keys: Dim = self.make.one_of([SEQ, SEQ, 4, SEQ + 2])
        self.inputs: dict[str, Value] = {}
        self.x = self.input("x", torch.float32, BATCH, SEQ, 8)
        self.y = self.input("y", torch.float32, BATCH, self.keys, 8)

    def graph(self) -> Graph:
        bias: Value | None = None
        for _ in range(self.make.number(0, 2)):
            term = self.bias()
            bias = term if bias is None else self.build("aten.add.Tensor", bias, term)
        if self.make.number(0, 3) == 0:
            term = self.input("bias", torch.float32, 2, SEQ, self.keys)
            bias = term if bias is None else self.build("aten.add.Tensor", bias, term)
        mask = self.predicate(2) if bias is None or self.make.flag() else None
        attrs = {"heads": 2, "kv_heads": 2, "scale": 0.5}
        attrs["causal"] = self.make.number(0, 3) == 0
        attrs["masked_rows"] = self.make.one_of(["zero", "nan", "mean"])
        out = self.build("attn.attention", self.x, self.y, self.y, bias, mask, **attrs)
        return self.make.ended([out])

    def input(self, name: str, dtype: torch.dtype, *shape: Dim) -> Value:
        if name not in self.inputs:
            kind = TensorType(dtype, shape)
            self.inputs[name] = self.make.graph.add_input(name, kind)
        return self.inputs[name]

    def bias(self) -> Value:
        held = self.predicate(1)
        fill = self.make.one_of([-math.inf, LOW, -1e9, -1e4])
        zero = self.build("aten.full", size=[], fill_value=0.0, dtype=torch.float32)
        low = self.build("aten.full", size=[], fill_value=fill, dtype=torch.float32)
        if fill == -math.inf or self.make.flag():
            return self.build("aten.where.self", held, zero, low)
        absent = self.build("aten.logical_not", held)
        number = self.build("aten._to_copy", absent, dtype=torch.float32)
        return self.build("aten.mul.Scalar", number, other=fill)

    def predicate(self, depth: int) -> Value:
        """(B or 1, 1, S or 1, T)."""
        kind = self.make.one_of(["atom", "not", "and", "and", "or"]) if depth else "atom"
        if kind == "atom":
            return self.atom(self.make.one_of(ATOMS))
        if kind == "not":
            return self.build("aten.logical_not", self.predicate(depth - 1))
        sides = [self.predicate(depth - 1) for _ in range(2)]
        return self.build(f"aten.logical_{kind}", *sides)

    def places(self) -> tuple[Value, Value]:
        """Positions of queries (S, 1) and of keys (T)."""
        rows = self.build("aten.arange", end=SEQ)
        return self.build("aten.unsqueeze", rows, dim=1), self.build("aten.arange", end=self.keys)

    def over_keys(self, value: Value) -> Value:
        return self.build("aten.reshape", value, shape=[BATCH, 1, 1, self.keys])

    def lengths(self) -> Value:
        n = self.input("n", torch.int64, BATCH)
        return self.build("aten.reshape", n, shape=[BATCH, 1, 1, 1])

    def atom(self, kind: str) -> Value:
        queries, keys = self.places()
        offset = self.make.number(-2, 2)
        match kind:
            case "keep":
                return self.over_keys(self.input("keep", torch.bool, BATCH, self.keys))
            case "pad id":
                ids = self.input("ids", torch.int64, BATCH, self.keys)
                return self.over_keys(self.build("aten.ne.Scalar", ids, other=5))
            case "counted":
                ids = self.input("ids", torch.int64, BATCH, self.keys)
                real = self.build("aten.ne.Scalar", ids, other=5)
                count = self.build("aten.cumsum", real, dim=1)
                return self.over_keys(self.build("aten.gt.Scalar", count, other=0))
            case "segments" if self.keys == SEQ:
                ids = self.input("ids", torch.int64, BATCH, self.keys)
                own = self.build("aten.reshape", ids, shape=[BATCH, 1, SEQ, 1])
                return self.build("aten.eq.Tensor", own, self.over_keys(ids))
            case "before":
                return self.build("aten.le.Tensor", keys, self.moved(queries, offset))
            case "window":
                return self.build("aten.gt.Tensor", keys, self.moved(queries, offset - 2))
            case "lengths":
                return self.build("aten.lt.Tensor", keys, self.lengths())
            case "rows":
                return self.build("aten.lt.Tensor", queries, self.lengths())
        held = self.make.flag()
        return self.build("aten.full", size=[1, self.keys], fill_value=held, dtype=torch.bool)

    def moved(self, places: Value, by: int) -> Value:
        return self.build("aten.add.Scalar", places, other=by)


def _inputs(draw: Draw, graph: Graph) -> list[torch.Tensor]:
    """Lengths of none to more than all, ids of which some or all are padding."""
    sizes = {name: draw(st.integers(1, 5)) for name in graph.dims}
    seed = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    chance = draw(st.sampled_from([0.0, 0.4, 1.0]))
    made = []
    for value in graph.inputs:
        shape = [int(substitute(dim, sizes)) for dim in value.shape]
        if value.dtype == torch.bool:
            made.append(torch.rand(shape, generator=seed) < chance)
        elif value.dtype == torch.int64:
            high = 8 if value.name == "n" else 3
            drawn = torch.randint(0, high, shape, generator=seed)
            pads = torch.rand(shape, generator=seed) < 1 - chance
            made.append(drawn if value.name == "n" else drawn.masked_fill(pads, 5))
        else:
            made.append(torch.randn(shape, generator=seed))
    return made


@pytest.mark.parametrize("half", ["fold-masks", "fold-masks, bound-keys"])
def test_masks_are_folded_where_the_algebra_says_so(
    half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unreached = Unreached("nothing is compared here")
    monkeypatch.setattr(Remasking, "_compared", lambda *_: unreached)
    made: Counter[str] = Counter()

    @settings(
        max_examples=50,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    )
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        old = Masks(data.draw).graph()
        new = clone(old)
        results = run(new, half)
        if not sum(result.tally.by_proof for result in results):
            return
        verify(new)
        (site,) = [node for node in new if node.op == "attn.attention"]
        made.update(name for name in ("causal", "window") if site.attrs.get(name))
        made.update(["lengths"] * (len(site.inputs) > 5))
        made.update(["proved"])
        for _ in range(3):
            inputs = _inputs(data.draw, old)
            (first,), (second,) = interpret(old, inputs), interpret(new, inputs)
            # −1e4 takes four digits of the float32 scores that it hides
            assert torch.allclose(first, second, rtol=1e-3, atol=1e-3, equal_nan=True), "\n".join(
                [format_graph(old), format_graph(new), *map(str, (*inputs, first, second))]
            )

    holds()
    assert made["proved"] > 20
    assert made["causal"]
    assert not half.endswith("bound-keys") or made["window"] + made["lengths"]
