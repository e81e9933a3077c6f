"""fold-masks: what it shares, and that a wrong proof or a wrong reading doesn't get through."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch

from attngraph.analysis.layout.index_maps import aligned
from attngraph.analysis.masks import bands
from attngraph.analysis.masks import reading as mask_reading
from attngraph.analysis.masks.predicates import (
    KEY,
    QUERY,
    TRUE,
    Domain,
    Predicate,
    at_most,
    elements,
    substitute,
)
from attngraph.analysis.masks.terms import magnitude
from attngraph.ir import Graph, Remark, format_graph, interpret, parse, verify
from attngraph.ir.dims import substitute as substitute_sizes
from attngraph.passes import run
from attngraph.passes.attention import fold_masks
from attngraph.passes.attention.fold_masks import FoldMasks

FIXTURES = Path(__file__).parent / "fold-masks"


def _fold(name: str, *, no_masked_rows: bool = False) -> tuple[str, Graph, list[Remark]]:
    graph = parse((FIXTURES / f"{name}.ir").read_text().partition("// ----")[0])
    before = format_graph(graph)
    return before, graph, FoldMasks(no_masked_rows).run(graph)


def _kept(name: str, *, no_masked_rows: bool = False) -> str:
    """The remark of a graph that the pass left as it was."""
    before, graph, remarks = _fold(name, no_masked_rows=no_masked_rows)
    verify(graph)
    assert format_graph(graph) == before
    return remarks[0].reason


def test_a_proof_that_always_succeeds_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Domain, "_bounded", lambda self, expr: True)
    assert "other values" in _kept("window")


def test_a_wrong_claim_about_rows_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Domain, "always_a_key", lambda self, predicate: True)
    assert "other values" in _kept("padding-nan-rows")
    assert "other values" in _kept("multiplier-of-bools")


def test_other_data_read_as_a_triangle_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def triangle(allowed: torch.Tensor, index: Any) -> Predicate:
        return at_most(index[-1] - index[-2])

    monkeypatch.setattr(mask_reading, "band", triangle)
    assert "other values" in _kept("static-mask")


def test_a_lost_conjunct_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fold_masks, "conjuncts", lambda p: [part for part in p.operands if part.expr.has(KEY)][:1]
    )
    assert "other values" in _kept("band-of-triangles")


def test_summed_finite_fills_taken_for_one_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Domain, "always_a_key", lambda self, predicate: True)
    assert "other values" in _kept("two-finite-fills-stay")


def test_a_comparison_read_as_its_neighbour_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {**mask_reading._COMPARISONS, "lt": lambda a, b: at_most(a - b)}
    monkeypatch.setattr(mask_reading, "_COMPARISONS", wrong)
    monkeypatch.setattr(mask_reading.Reader, "_learn", lambda *args: None)
    assert "other values" in _kept("window")


def test_rows_with_keys_are_compared_under_an_assumption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold_masks, "conjuncts", lambda p: p.operands[:1])
    assert "other values" in _kept("finite-fill", no_masked_rows=True)


def test_an_assumption_counts_only_where_it_is_needed() -> None:
    for name, assumed in [("finite-fill", ["no-fully-masked-rows"]), ("finite-fill-causal", [])]:
        graph = parse((FIXTURES / f"{name}.ir").read_text().partition("// ----")[0])
        (result,) = run(graph, [FoldMasks(no_masked_rows=True)])
        assert result.findings.assumed == assumed
        said = result.remarks[0].reason.endswith("assumed that no row is fully masked")
        assert said == bool(assumed)


def test_layers_with_equal_masks_are_folded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    fold = fold_masks._fold
    monkeypatch.setattr(
        fold_masks, "_fold", lambda *args, **kw: calls.append(args) or fold(*args, **kw)
    )
    _, graph, remarks = _fold("repeated-masks")
    assert len(calls) == 1
    assert len(remarks) == 2
    masks = {node.inputs[4] for node in graph if node.op == "attn.attention"}
    assert len(masks) == 1


@pytest.mark.parametrize("name", sorted(path.stem for path in FIXTURES.glob("*.ir")))
def test_adversarial_masks_give_the_same_attention(name: str) -> None:
    """Rows without keys, mask values of 0 to 2, holes, lengths of 1: in float32, as it runs."""
    text = (FIXTURES / f"{name}.ir").read_text().partition("// ----")[0]
    before, after = parse(text), parse(text)
    FoldMasks().run(after)
    for length, batch in ((1, 1), (4, 2)):
        for kind in range(3):
            inputs = [_input(value, length, batch, kind) for value in before.inputs]
            expected, found = interpret(before, inputs), interpret(after, inputs)
            for a, b in zip(expected, found, strict=True):
                # a softmax and a product over at most 6 keys, of values up to about 4
                atol = 6 * 4 * torch.finfo(a.dtype).eps
                torch.testing.assert_close(b, a, rtol=0, atol=atol, equal_nan=True)


def _input(value: Any, length: int, batch: int, kind: int) -> torch.Tensor:
    sizes = {"batch": batch, "seq": length, "target": length, "source": length + 2}
    sizes["past"] = length - 1
    shape = [substitute_sizes(dim, sizes) for dim in value.shape]
    seed = torch.Generator().manual_seed(len(value.name) + kind)
    if value.dtype.is_floating_point:
        made = torch.randn(shape, generator=seed).to(value.dtype)
        if kind == 2 and value.name not in "qkv":
            made[..., 0] = -torch.inf
        return made
    if kind == 0:
        return torch.zeros(shape, dtype=value.dtype)
    return torch.randint(0, 2 if value.dtype == torch.bool else 3, shape, generator=seed).to(
        value.dtype
    )


@pytest.mark.parametrize(
    ("low", "high"), [(-3, 0), (0, 0), (-1, 2), (0, 5), (-5, 5), (2, 2), (-5, -1)]
)
def test_bands_of_data_are_read_back(low: int, high: int) -> None:
    offsets = torch.arange(6)[None, :] - torch.arange(6)[:, None]
    allowed = (offsets >= low) & (offsets <= high)
    for data in (allowed, ~allowed):
        if data.all() or not data.any():
            continue
        found = bands.band(data, (QUERY, KEY))
        assert found is not None
        for q, k in itertools.product(range(6), repeat=2):
            at = substitute(substitute(found, QUERY, q), KEY, k)
            assert (Domain((1, 1, 6, 6), {}).simplify(at) == TRUE) == bool(data[q, k])


def test_no_band_is_seen_in_other_data() -> None:
    assert (
        bands.band(torch.tensor([[True, False], [False, False]]).repeat(2, 2), (QUERY, KEY)) is None
    )
    assert bands.progression(torch.tensor([0, 1, 3]), (KEY,)) is None
    assert bands.progression(torch.tensor([[4, 6, 8]]), (QUERY, KEY)) == 4 + 2 * KEY


def test_bounds_end_at_what_is_not_known() -> None:
    graph = parse("""graph @main {
      input %x : f32[4]
      constant %c = [1.0, -3.0] : f32[2]
      constant %m = -3.4028234663852886e+38 : f32[]
      %twice = aten.mul.Scalar(%c) {other = 2.0}
      %sum = aten.add.Tensor(%twice, %c)
      %overflow = aten.add.Tensor(%m, %m)
      %half = aten._to_copy(%m) {dtype = f16}
      %tanh = aten.tanh(%x)
      %expm1 = aten.expm1(%c)
      return %x
    }""")
    bounds = {v.name: magnitude(v) for v in graph.values()}
    assert bounds["sum"] == 9
    assert bounds["tanh"] == 1
    unknown = {name for name, bound in bounds.items() if bound == float("inf")}
    assert unknown == {"x", "overflow", "half", "expm1"}


def test_an_operand_is_aligned_to_the_right() -> None:
    graph = parse("graph @main {\n input %x : bool[1, 5]\n return %x\n}")
    assert aligned(graph.inputs[0], (0, 0, QUERY, KEY)) == (0, KEY)


def test_a_sum_of_positions_is_not_read_from_one_of_them() -> None:
    graph = parse("""graph @main {
      dim seq = 5 in 1..32
      input %x : f32[seq]
      %positions = aten.arange() {end = seq} : i64[seq]
      %sums = aten.cumsum(%positions) {dim = 0} : i64[seq]
      %ones = aten.full() {size = [seq], fill_value = 1, dtype = i64} : i64[seq]
      %counts = aten.cumsum(%ones) {dim = 0} : i64[seq]
      return %x
    }""")
    seq = graph.inputs[0].shape[0]
    reader = mask_reading.Reader(Domain((1, 1, seq, seq), graph.dims))
    values = {value.name: value for value in graph.values()}
    for place in (KEY, sympy.Integer(3)):
        assert elements(reader.read(values["sums"], (place,)))
    assert reader.read(values["counts"], (KEY,)) == KEY + 1
