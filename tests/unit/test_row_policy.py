"""What a formula gives for rows whose keys are hidden, held against the formula on random rows."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attngraph.analysis.masks.fills import Fills
from attngraph.analysis.masks.row_policy import SOFTMAX, Formula, agree, rows
from attngraph.ir import Builder, interpret, parse

LOWEST = torch.finfo(torch.float32).min
FORMULAS = {
    "softmax": SOFTMAX,
    "plain": Formula(),
    "minus logsumexp": Formula(total="exponent"),
    "minus log of sum": Formula(total="summed"),
    "over exp of logsumexp": Formula(total="quotient"),
    "shifted over exp of logsumexp": Formula("maximum", "quotient"),
    "plus one": Formula(addend=True),
    "plus one, shifted": Formula("maximum", addend=True),
    "plus one, shifted by no less than 0": Formula("positive", addend=True),
    "normalised": Formula(normalised=True),
}
FILLS = (-1e4, -1e5, -1e9, -1e25, LOWEST, -math.inf)
ONE = """graph @main {{
  dim seq = 5 in 1..
  input %s : {dtype}[seq, seq]
  input %hides : bool[1, seq]
  %fill = aten.full() {{size = [], fill_value = {fill}, dtype = {dtype}}}
  %x = aten.where.self(%hides, %fill, %s)
  return %x
}}"""
TWO = """graph @main {{
  dim seq = 5 in 1..
  input %s : {dtype}[seq, seq]
  input %hides : bool[1, seq]
  input %keep : bool[seq, 1]
  %fill = aten.full() {{size = [], fill_value = {fill}, dtype = {dtype}}}
  %f = aten.where.self(%hides, %fill, %s)
  %zero = aten.full() {{size = [1, 1], fill_value = 0.0, dtype = {dtype}}}
  %open = aten.logical_not(%keep)
  %low = aten.where.self(%open, %fill, %zero)
  %x = aten.add.Tensor(%f, %low)
  return %x
}}"""


def _settled(text: str, formula: Formula) -> tuple[bool, bool]:
    """(whether a softmax takes the formula's place, whether with -inf in the place of fills)."""
    graph = parse(text)
    (x,) = graph.outputs
    found = Fills(x, (1,), graph.dims).settle(Builder(graph), formula, None, True, assume=False)
    return found is not None, found is not None and found.logits is not x


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(FORMULAS)),
    st.sampled_from(FILLS),
    st.sampled_from([ONE, TWO]),
    st.integers(1, 40),
    st.integers(0, 1 << 30),
)
def test_what_takes_a_formulas_place_is_equal_in_every_row(
    name: str, fill: float, text: str, keys: int, seed: int
) -> None:
    formula, source = FORMULAS[name], text.format(fill=fill, dtype="f32")
    is_raised, is_lowered = _settled(source, formula)
    graph = parse(source)
    draw = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(keys, keys, generator=draw) * 3]
    for value in graph.inputs[1:]:
        shape = [keys if dim != 1 else 1 for dim in value.shape]
        inputs.append(torch.rand(shape, generator=draw) < torch.rand((), generator=draw))
    if seed % 3 == 0:
        inputs[1][:] = True
    (x,) = interpret(graph, inputs)
    kept = torch.ones_like(x)
    low = x.masked_fill(x <= -9e3, -math.inf) if is_lowered else x
    if is_raised:
        assert agree(formula.weights(x, kept), formula.raised(low, kept))


DECIDED = {
    ("softmax", LOWEST): "as it is",
    ("plain", -1e9): "lowered",
    ("plain", -math.inf): "as it is",
    ("minus logsumexp", -1e4): "as it is",  # a mean, up to eps · 1e4
    ("minus logsumexp", -1e9): "stays",  # 1 each
    ("minus logsumexp", -math.inf): "as it is",
    ("minus log of sum", -1e9): "stays",  # infinite
    ("over exp of logsumexp", LOWEST): "lowered",
    ("shifted over exp of logsumexp", LOWEST): "stays",  # 1 each
    ("plus one", LOWEST): "as it is",  # 0
    ("plus one, shifted", LOWEST): "as it is",  # 1 / inf
    ("plus one, shifted", -math.inf): "stays",  # NaN, and 0
    ("plus one, shifted by no less than 0", -math.inf): "as it is",
    ("normalised", LOWEST): "as it is",
}


@pytest.mark.parametrize(("name", "fill"), DECIDED, ids=str)
def test_the_fill_decides_what_a_formula_becomes(name: str, fill: float) -> None:
    is_raised, is_lowered = _settled(ONE.format(fill=fill, dtype="f32"), FORMULAS[name])
    verdict = "lowered" if is_lowered else "as it is" if is_raised else "stays"
    assert verdict == DECIDED[name, fill]


@pytest.mark.parametrize("fill", [torch.finfo(torch.float64).min, -1e300])
def test_a_fill_that_float32_does_not_have_is_finite_in_float64(fill: float) -> None:
    """As a bias, too: x − log Σ exp(x) is 0 for each key of a hidden row, and no mean."""
    text = f"""graph @main {{
  dim seq = 5 in 1..
  input %s : f64[seq, seq]
  input %keep : bool[1, seq]
  %low = aten.full() {{size = [], fill_value = {fill}, dtype = f64}}
  %zero = aten.full() {{size = [], fill_value = 0.0, dtype = f64}}
  %bias = aten.where.self(%keep, %zero, %low)
  %x = aten.add.Tensor(%s, %bias)
  return %x
}}"""
    assert _settled(text, FORMULAS["minus logsumexp"]) == (False, False)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_rows_of_every_kind_have_each_combination_of_three_keys(dtype: str) -> None:
    found = rows(2, 0, {"f16": torch.float16, "bf16": torch.bfloat16}.get(dtype, torch.float32))
    assert found is not None
    kinds = {
        frozenset(zip(first.tolist(), second.tolist(), strict=True))
        for first, second in zip(*found.atoms, strict=True)
    }
    every = list(itertools.product((True, False), repeat=2))
    wanted = {frozenset(some) for n in (1, 2, 3) for some in itertools.combinations(every, n)}
    assert kinds == wanted


def test_too_many_kinds_of_rows_are_not_evaluated() -> None:
    assert rows(9, 0, torch.float32) is None
