"""What stands on raise-softmax's proof is equal where nothing could be evaluated.

Spellings of a softmax are drawn, right ones and such as are wrong in one place: another axis, a sum
that is broadcast along the keys, other logits above the line. Evidence is switched off, so that a
rewrite stands on its proof alone, and both forms run on rows of every kind, hidden ones too.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from attngraph.errors import IRError
from attngraph.ir import Dim, Graph, Value, clone, format_graph, interpret, verify
from attngraph.ir.dims import substitute, symbol
from attngraph.passes import run
from attngraph.passes.rewriting.checked import Checked
from attngraph.passes.rewriting.outcomes import NotEvaluated
from tests.passes.making import Draw, Making, begun

pytestmark = pytest.mark.wide

A, B = symbol("a"), symbol("b")
FORMS = ("quotient", "reciprocal", "late", "logsumexp", "log of sum", "log_softmax", "plus one")
LIMIT = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2}
LOGS = {torch.float64: 1e9, torch.float32: 1e4, torch.float16: 0.0}
"""The largest fills beside which a log of the keys is left of x − log Σ exp(x), rounded."""


class Spelling:
    """A softmax of drawn logits, in one of `FORMS`."""

    def __init__(self, draw: Draw, form: str) -> None:
        self.make: Making = begun(draw)
        self.build = self.make.build
        make = self.make
        self.dtype = make.one_of(list(LIMIT))
        lead: list[Dim] = [make.one_of([1, 2, A]) for _ in range(make.number(0, 2))]
        self.shape = [*lead, make.one_of([1, 3, A, B]), make.one_of([1, 3, A, B])]
        self.axis = make.one_of([-1, -1, -1, -2])
        self.form = form

    def graph(self) -> Graph:
        x = self.make.input(self.dtype, self.shape)
        for _ in range(self.make.number(0, 2)):
            x = self.masked(x)
        return self.make.ended([getattr(self, "_" + self.form.replace(" ", "_"))(x)])

    def mask(self) -> Value:
        shape = [self.make.one_of([dim, dim, 1]) for dim in self.shape]
        return self.make.input(torch.bool, shape)

    def masked(self, x: Value) -> Value:
        lowest = torch.finfo(self.dtype).min
        fill = self.make.one_of([lowest, -math.inf, max(-1e9, lowest), -1e4])
        mask = self.mask()
        if self.make.flag():
            return self.build("aten.masked_fill.Scalar", x, mask, value=fill)
        low = self.build("aten.full", size=[], fill_value=fill, dtype=self.dtype)
        if self.make.flag():
            return self.build("aten.where.self", mask, x, low)
        zero = self.build("aten.full", size=[], fill_value=0.0, dtype=self.dtype)
        return self.build("aten.add.Tensor", x, self.build("aten.where.self", mask, zero, low))

    def other_axis(self) -> int:
        """Mostly the right one."""
        return int(self.make.one_of([self.axis] * 5 + [-3 - self.axis]))

    def shifted(self, x: Value) -> Value:
        kind = self.make.one_of(["no", "row", "row", "all", "given"])
        if kind == "no":
            return x
        if kind == "given":
            shape = list(self.shape)
            shape[self.other_axis()] = 1
            shift = self.make.input(self.dtype, shape)
        else:
            dims = list(range(-len(self.shape), 0)) if kind == "all" else [self.other_axis()]
            shift = self.build("aten.amax", x, dim=dims, keepdim=True)
        return self.build("aten.sub.Tensor", x, shift)

    def powers(self, x: Value) -> Value:
        op = self.make.one_of(["exp", "exp", "exp2", "pow"])
        if op == "pow":
            return self.build("aten.pow.Scalar", x, self=self.make.one_of([2, 10, 0.5]))
        return self.build(f"aten.{op}", x)

    def kept(self, powers: Value) -> Value:
        """The exponentials, some of them masked by zeros."""
        how = self.make.one_of(["no", "no", "product", "fill"])
        if how == "no":
            return powers
        mask = self.mask()
        if how == "fill":
            return self.build("aten.masked_fill.Scalar", powers, mask, value=0.0)
        kept = self.build("aten._to_copy", mask, dtype=self.dtype)
        return self.build("aten.mul.Tensor", powers, kept)

    def again(self, dims: list[int], reduced: Value) -> Value:
        """What was reduced without keeping its axis, with an axis of 1 where it was, mostly."""
        (dim,) = dims
        place = self.make.one_of([dim] * 4 + [-3 - dim])
        return self.build("aten.unsqueeze", reduced, dim=place)

    def total(self, terms: Value) -> Value:
        dims = [self.other_axis()] if self.make.number(0, 5) else [-2, -1]
        if len(dims) == 2 or self.make.flag():
            return self.build("aten.sum.dim_IntList", terms, dim=dims, keepdim=True)
        return self.again(dims, self.build("aten.sum.dim_IntList", terms, dim=dims))

    def _parts(self, x: Value) -> tuple[Value, Value]:
        x = self.shifted(x)
        terms = self.kept(self.powers(x))
        above = terms if self.make.number(0, 5) else self.kept(self.powers(x))
        if not self.make.number(0, 7):
            above = self.build("aten.transpose.int", above, dim0=-1, dim1=-2)
        return above, self.total(terms)

    def _quotient(self, x: Value) -> Value:
        return self.build("aten.div.Tensor", *self._parts(x))

    def _reciprocal(self, x: Value) -> Value:
        above, total = self._parts(x)
        inverse = self.build("aten.reciprocal", total)
        pair = (above, inverse) if self.make.flag() else (inverse, above)
        return self.build("aten.mul.Tensor", *pair)

    def _late(self, x: Value) -> Value:
        above, total = self._parts(x)
        values = self.make.input(self.dtype, [*self.shape[:-2], self.shape[-1], 3])
        return self.build("aten.div.Tensor", self.build("aten.matmul", above, values), total)

    def _logsumexp(self, x: Value) -> Value:
        dims = [self.other_axis()]
        if self.make.flag():
            total = self.build("aten.logsumexp", x, dim=dims, keepdim=True)
        else:
            total = self.again(dims, self.build("aten.logsumexp", x, dim=dims))
        return self.build("aten.exp", self.build("aten.sub.Tensor", x, total))

    def _log_of_sum(self, x: Value) -> Value:
        total = self.build("aten.log", self.total(self.build("aten.exp", x)))
        return self.build("aten.exp", self.build("aten.sub.Tensor", x, total))

    def _log_softmax(self, x: Value) -> Value:
        return self.build("aten.exp", self.build("aten.log_softmax.int", x, dim=self.axis))

    def _plus_one(self, x: Value) -> Value:
        kind = self.make.one_of(["none", "maximum", "positive"])
        shift = x
        if kind != "none":
            shift = self.build("aten.amax", x, dim=[self.other_axis()], keepdim=True)
            shift = self.build("aten.relu", shift) if kind == "positive" else shift
            x = self.build("aten.sub.Tensor", x, shift)
        terms = self.kept(self.build("aten.exp", x))
        total = self.total(terms)
        if kind == "none":
            total = self.build("aten.add.Scalar", total, other=self.make.one_of([1, 1.0, 2]))
        else:
            one = self.build("aten.exp", self.build("aten.neg", shift))
            total = self.build(
                "aten.add.Tensor", *((one, total) if self.make.flag() else (total, one))
            )
        return self.build("aten.div.Tensor", terms, total)


def _inputs(draw: Draw, graph: Graph) -> list[torch.Tensor]:
    """Logits of any row, and masks that hide nothing, something, and whole rows."""
    sizes = {name: draw(st.integers(max(info.low, 1), 4)) for name, info in graph.dims.items()}
    seed = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    made = []
    for value in graph.inputs:
        shape = [int(substitute(dim, sizes)) for dim in value.shape]
        if value.dtype == torch.bool:
            made.append(torch.rand(shape, generator=seed) < draw(st.sampled_from([0.0, 0.5, 1.0])))
        else:
            scale = draw(st.sampled_from([0.0, 1.0, 2.0]))
            made.append((torch.randn(shape, generator=seed) * scale).to(value.dtype))
    return made


def _differ(old: torch.Tensor, new: torch.Tensor, is_log: bool) -> bool:
    limit = max(LIMIT[old.dtype], 4 * LOGS[old.dtype] * torch.finfo(old.dtype).eps * is_log)
    if old.dtype != new.dtype or old.shape != new.shape:
        return True
    return not torch.allclose(old.double(), new.double(), rtol=limit, atol=limit, equal_nan=True)


def _told(*shown: Any) -> str:
    return "\n".join(format_graph(x) if isinstance(x, Graph) else str(x) for x in shown)


@pytest.mark.parametrize("form", FORMS)
def test_a_softmax_is_raised_where_its_proof_holds(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = NotEvaluated("nothing is evaluated here")
    monkeypatch.setattr(Checked, "_outcome", lambda *_: unknown)
    monkeypatch.setattr(Checked, "_where_masked", lambda *_: unknown)
    made: Counter[str] = Counter()

    @settings(
        max_examples=40,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    )
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        try:
            old = Spelling(data.draw, form).graph()
        except IRError:  # shapes that don't broadcast
            assume(False)
        new = clone(old)
        (result,) = run(new, "raise-softmax")
        tally: Any = result.tally
        assert tally.by_evaluation == 0
        if not tally.by_proof:
            return
        verify(new)
        made.update(node.op for node in new if "softmax" in node.op)
        for _ in range(3):
            inputs = _inputs(data.draw, old)
            try:
                (first,) = interpret(old, inputs)
            except RuntimeError:  # sizes that don't broadcast
                assume(False)
            (second,) = interpret(new, inputs)
            assert not _differ(first, second, "log" in form), _told(old, new, inputs, first, second)

    holds()
    assert made, "no softmax was raised"
