"""A mixture of experts becomes one op, however it is written, and a near miss stays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.export import Dim

import attngraph
from attngraph.analysis.experts import activation, reading
from attngraph.analysis.values.intervals import Intervals
from attngraph.compiling.pipeline import pipeline
from attngraph.export.precision.quantize import quantise
from attngraph.ir import Builder, Graph, TensorType, clone, interpret
from attngraph.ir.ops import input_of
from attngraph.ir.traits import EXPERTS
from attngraph.options import Options
from attngraph.passes import make, run
from attngraph.passes.fusion import fuse_experts
from attngraph.passes.rewriting.trials import sample, turns
from tests.parity import expert_near_misses as near_misses
from tests.parity import experts
from tests.parity.expert_near_misses import GATES, NEAR_MISSES, ROUTED_BY_ITSELF, SWITCHING
from tests.parity.experts import PUBLISHED, E, H

pytestmark = pytest.mark.wide

SLOW = {
    *(experts.Dense, experts.Masked, experts.All, experts.Rectified, experts.Shared),
    *(near_misses.Capacity, near_misses.Cleaned, near_misses.CutInput, near_misses.HalfLimits),
    *(near_misses.Halved, near_misses.Shortened, near_misses.Kept, near_misses.ScaledInside),
    near_misses.OneDiffers,
}
PASSES = ["split-complex", "canonicalize", "cse", "dce", "fuse-experts", "dce"]


@pytest.fixture(autouse=True)
def any_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read doesn't depend on which form is faster."""
    if "faster" not in request.node.name:
        monkeypatch.setattr(fuse_experts, "_is_slower", lambda *_: False)


@functools.cache
def _module(kind: type[torch.nn.Module]) -> torch.nn.Module:
    return kind().eval()


def _captured(kind: type[torch.nn.Module]) -> Graph:
    dims = {0: Dim("batch", max=16), 1: Dim("seq", max=64)}
    return attngraph.capture(_module(kind), (torch.randn(2, 7, H),), dynamic_shapes=(dims,))


def _fused(kind: type[torch.nn.Module]) -> Graph:
    graph = _captured(kind)
    results = run(graph, make(PASSES))
    assert not [r for result in results for r in result.remarks if r.code == "unequal"]
    return graph


def _count(graph: Graph) -> int:
    return sum(node.op in EXPERTS for node in graph)


def _assert_as_eager(kind: type[torch.nn.Module], graph: Graph) -> None:
    """At sizes that the capture never saw, one row among them, and with rows that tie."""
    for shape in ((1, 1), (3, 21)):
        x = torch.randn(*shape, H)
        x[0, 0] = 0
        (found,) = interpret(graph, [x])
        torch.testing.assert_close(found, _module(kind)(x), rtol=1e-5, atol=1e-5)


def _each(kinds: Sequence[type[torch.nn.Module]]) -> list[Any]:
    """As parameters, those that a quick run leaves out marked."""
    return [pytest.param(kind, marks=pytest.mark.slow if kind in SLOW else ()) for kind in kinds]


@pytest.mark.parametrize("kind", _each(PUBLISHED))
def test_a_mixture_is_one_op(kind: type[torch.nn.Module]) -> None:
    graph = _fused(kind)
    assert _count(graph) == 1
    _assert_as_eager(kind, graph)
    assert len(list(graph)) <= 14


@pytest.mark.parametrize("kind", _each(NEAR_MISSES))
def test_a_near_miss_stays(kind: type[torch.nn.Module]) -> None:
    graph = _fused(kind)
    assert _count(graph) == 0
    _assert_as_eager(kind, graph)


@pytest.mark.parametrize(("kind", "why"), near_misses.TOLD.items())
def test_why_experts_stay_is_told(kind: type[torch.nn.Module], why: str) -> None:
    graph = _captured(kind)
    said = [r.reason for result in run(graph, make(PASSES)) for r in result.remarks]
    assert _count(graph) == 0
    assert len([reason for reason in said if why in reason]) == 1
    _assert_as_eager(kind, graph)


@pytest.mark.parametrize("kind", _each([*SWITCHING, *GATES]))
def test_what_may_switch_beyond_the_trials_stays(kind: type[torch.nn.Module]) -> None:
    graph = _captured(kind)
    results = run(graph, make(PASSES))
    assert _count(graph) == 0
    assert [r for result in results for r in result.remarks if r.code == "experts-kept"]


@pytest.mark.parametrize("kind", _each(ROUTED_BY_ITSELF))
def test_the_op_routes_by_softmax_and_top_k_alone(kind: type[torch.nn.Module]) -> None:
    graph = _fused(kind)
    assert "attn.routed_moe" not in {node.op for node in graph}
    _assert_as_eager(kind, graph)


def test_a_limit_is_read_where_no_drawn_row_reaches_it() -> None:
    graph = _fused(near_misses.FarLimit)
    (node,) = (node for node in graph if node.op in EXPERTS)
    assert node.attrs["limit"] == 100
    x = torch.randn(2, 5, H) * 1e4
    (found,) = interpret(graph, [x])
    torch.testing.assert_close(found, _module(near_misses.FarLimit)(x), rtol=1e-5, atol=1.0)


@pytest.mark.parametrize(
    ("kind", "rows", "is_made"),
    [
        (experts.Stacked, None, False),  # of the rows that an expert takes
        (experts.Stacked, (1, 1), True),  # there is one row
        pytest.param(experts.Stacked, (2, 7), False, marks=pytest.mark.slow),
        (experts.Gathered, None, True),  # a matrix for each row
        (experts.Dense, None, True),  # all experts on every row, two of four
        (experts.All, None, False),
        pytest.param(experts.OneHot, None, True, marks=pytest.mark.slow),
    ],
)
def test_the_faster_form_is_taken(
    kind: type[torch.nn.Module], rows: tuple[int, int] | None, is_made: bool
) -> None:
    """One reason per case: what the operator's kernel does with each row, and the form doesn't."""
    if rows is None:
        graph = _captured(kind)
    else:
        graph = attngraph.capture(_module(kind), (torch.randn(*rows, H),))
    run(graph, make(PASSES))
    assert _count(graph) == is_made


class _Wide(experts.Stacked):
    """Experts whose first matrices can be cut into blocks of codes."""

    def __init__(self, hidden: int) -> None:
        torch.nn.Module.__init__(self)
        torch.manual_seed(0)
        self.gate = torch.nn.Linear(64, E, bias=False)
        self.w1, self.w3 = (torch.nn.Parameter(torch.randn(E, hidden, 64) / 8) for _ in range(2))
        self.w2 = torch.nn.Parameter(torch.randn(E, 64, hidden) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x)


def _in_codes(module: torch.nn.Module) -> Graph:
    x = torch.randn(7, 64)
    graph = attngraph.capture(module, (x,), dynamic_shapes=({0: Dim("rows", max=64)},))
    run(graph, [*make(PASSES[:-2]), fuse_experts.FuseExperts(in_codes=True)])
    return graph


def test_where_codes_are_faster_experts_are_in_int4() -> None:
    module, x = _Wide(hidden=96).eval(), torch.randn(7, 64)
    graph = _in_codes(module)
    infinite = clone(graph)
    found = quantise(graph, "int4")
    (node,) = (node for node in graph if node.op in EXPERTS)
    assert input_of(node, "up_scales") is not None
    assert found.linears == 2
    assert found.bytes_after * 6 < found.bytes_before
    assert not [line for line in found.kept if "experts" in line]
    (made,) = interpret(graph, [x])
    assert (made - module(x)).norm() <= found.bound * module(x).norm()

    (node,) = (node for node in infinite if node.op in EXPERTS)
    down = input_of(node, "down")
    down.data = down.data.clone()
    down.data[0, 0, 0] = torch.inf
    kept = quantise(infinite, "int4").kept
    assert [line for line in kept if "experts" in line]
    (node,) = (node for node in infinite if node.op in EXPERTS)
    assert input_of(node, "up_scales") is None


def test_where_codes_do_not_fit_the_faster_form_stays() -> None:
    assert _count(_in_codes(_Wide(hidden=72).eval())) == 0


def test_rows_that_are_dropped_by_number_are_no_mixture() -> None:
    """At the sizes of trials none are."""
    assert _count(_fused(near_misses.CutRows)) == 0


def _swapped(read: Callable[..., Any]) -> Callable[..., Any]:
    """A reading that takes the gate for the linear half."""
    wrong = {"halves": "swapped halves", "pairs": "swapped pairs"}

    def changed(*given: Any) -> Any:
        found = read(*given)
        if found is None or found.order not in wrong:
            return None
        return activation.Activation(
            found.kind, wrong[found.order], found.alpha, found.beta, found.limit
        )

    return changed


def _reversed(read: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: list(reversed(read(*given)))


def _first_only(read: Callable[..., Any]) -> Callable[..., Any]:
    """A reading of the biases that has none."""
    return lambda *given: []


MUTANTS = [
    (reading, "read_activation", _swapped, experts.Stacked),
    (fuse_experts, "_by_number", _reversed, experts.Modules),
    (fuse_experts, "_all_there", _first_only, experts.Clamped),
]


@pytest.mark.parametrize(("home", "name", "mutate", "kind"), MUTANTS)
def test_a_wrong_reading_makes_nothing(
    monkeypatch: pytest.MonkeyPatch,
    home: Any,
    name: str,
    mutate: Callable[..., Any],
    kind: type[torch.nn.Module],
) -> None:
    monkeypatch.setattr(home, name, mutate(getattr(home, name)))
    graph = _fused(kind)
    assert _count(graph) == 0
    _assert_as_eager(kind, graph)


def test_trials_choose_each_expert_even_in_one_row() -> None:
    graph = Graph()
    scores = graph.add_input("scores", TensorType(torch.float32, (1, E)))
    for count in range(1, E + 1):
        seen: set[int] = set()
        for kind in turns(E, count):
            drawn = sample(scores, {}, kind, may_mask=False, sparse=False)
            assert isinstance(drawn, torch.Tensor)
            seen.update(drawn[0].topk(count).indices.tolist())
        assert seen == {*range(E)}


@pytest.mark.parametrize(
    ("options", "is_there"),
    [
        (Options(), True),
        (Options(exact=True), False),
        (Options(weights="int8"), False),
        (Options(weights="int4"), True),
        (Options(target="cuda"), False),
        (Options(portable=True), False),
        (Options(precision="fp16"), False),
    ],
)
def test_who_runs_the_pass(options: Options, is_there: bool) -> None:
    """Its operator sums in another order, is onnxruntime's own, and was tried in float32 alone."""
    assert ("fuse-experts" in {item.name for item in pipeline(**options.of_pipeline())}) == is_there


def test_other_dtypes_stay() -> None:
    module = experts.Gathered().double().eval()
    graph = attngraph.capture(module, (torch.randn(2, 7, H).double(),))
    run(graph, make(PASSES))
    assert _count(graph) == 0


class _DoubledWeights(experts.Gathered):
    """What experts give is summed in float64, by weights that no operator takes in float32."""

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).double().softmax(-1).topk(self.count, -1)
        hidden = torch.einsum("th,tkih->tki", x, self.w1[chosen]).relu()
        made = torch.einsum("tki,tkhi->tkh", hidden, self.w2[chosen])
        return (made * weights[..., None]).sum(1).float()


def test_a_router_in_another_dtype_than_the_rows() -> None:
    """Scores are widened for a softmax: the op takes them as they were. Weights are not rounded."""
    x, rows = torch.randn(5, H), Dim("rows", max=64)
    for module, count in ((experts.Doubled().eval(), 1), (_DoubledWeights().eval(), 0)):
        optimized = attngraph.optimize(module, (x,), dynamic_shapes=({0: rows},))
        assert _count(optimized.graph) == count
        more = torch.randn(9, H)
        torch.testing.assert_close(optimized(more), module(more), rtol=1e-5, atol=1e-5)


def test_clamped_weights_have_bounds() -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType(torch.float32, (2, 3)))
    build = Builder(graph)
    for numbers, bounds in (
        ({"min": 0.25}, (0.25, torch.inf)),
        ({"min": -1.0, "max": 2.0}, (-1.0, 2.0)),
        ({"min": 3.0, "max": 2.0}, (2.0, 2.0)),  # as torch has it
        ({"max": -5.0}, (-torch.inf, -5.0)),
    ):
        assert Intervals().of(build("aten.clamp", x, **numbers)) == bounds


class _Hiding(experts.Gated):
    """Scores of experts that a row may not take are -inf, in front of the choice."""

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        gate = self.weigh(self.gate(x).masked_fill(~keep, -torch.inf))
        hidden = torch.relu(torch.einsum("th,eih->tei", x, self.w1))
        return (torch.einsum("tei,ehi->teh", hidden, self.w2) * gate[..., None]).sum(1)


def test_a_row_of_hidden_experts_is_as_in_eager() -> None:
    """None, one and all of them hidden: where all are, a softmax is NaN in every place."""
    module, rows = _Hiding().eval(), Dim("rows", max=64)
    sample = torch.randn(5, H), torch.rand(5, E) > 0.3
    optimized = attngraph.optimize(module, sample, dynamic_shapes=({0: rows}, {0: rows}))
    assert _count(optimized.graph) == 1
    x, keep = torch.randn(3, H), torch.ones(3, E, dtype=torch.bool)
    keep[1, 1:], keep[2] = False, False
    found, expected = optimized(x, keep), module(x, keep)
    assert expected.isnan().any(1).tolist() == [False, False, True]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
