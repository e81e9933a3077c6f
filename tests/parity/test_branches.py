"""The check runs every branch of every `If` and every number of steps of a loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.export import Dim

import attngraph
from attngraph.checks.if_conditions import Condition, conditions_of
from attngraph.checks.reaching import Goal, largest_value, reach
from attngraph.errors import ParityError
from attngraph.export.kernels import Choice
from attngraph.export.kernels.table import ATTENTION, BLOCKS
from attngraph.export.lowering.attention import lower as attention
from attngraph.export.lowering.attention.forms import emit
from attngraph.export.lowering.attention.site import Emitted, Packed
from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.export.runtime.session import Session
from attngraph.export.target import Target
from attngraph.frontend.model import Model
from attngraph.ir import DimInfo
from attngraph.ir.parser import parse
from attngraph.optimized import Optimized
from attngraph.verification.verify import verify_file

LONG = 40


class Causal(nn.Module):
    """(B, S, 32) to the same, through causal attention."""

    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.projections = nn.Linear(width, 3 * width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.projections(x).chunk(3, -1)
        )
        context = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return context.transpose(1, 2).flatten(2)


def _model() -> Model:
    torch.manual_seed(0)
    axes = {0: Dim("batch", max=64), 1: Dim("seq", max=2048)}
    return Model(Causal().eval(), None, (torch.randn(2, 8, 32),), {}, (axes,), "Causal")


def _optimize() -> Optimized:
    model = _model()
    assert model.module is not None
    return attngraph.optimize(model.module, model.args, dynamic_shapes=model.dynamic_shapes)


Prepare = Callable[..., object]


@pytest.fixture(autouse=True)
def _long_from_40_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is fastest on the machine at hand."""

    def split(ctx: LoweringContext, choice: Choice, site: Packed, prepared: Prepare) -> Emitted:
        chosen = replace(choice, form=BLOCKS[0], below=ATTENTION, start=LONG)
        return emit(ctx, chosen, site, prepared)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "emit", split)


def _cases(optimized: Optimized) -> list[str]:
    assert optimized.report.parity is not None
    return list(dict.fromkeys(output.case for output in optimized.report.parity.outputs))


def test_the_smallest_size_that_enters_a_branch_is_a_case() -> None:
    optimized = _optimize()
    assert [node.op_type for node in optimized.model.graph].count("If") == 1
    assert f"batch=1, seq={LONG}" in _cases(optimized)
    assert optimized.report.parity is not None
    assert optimized.report.parity.passed


def test_a_wrong_long_branch_is_caught_as_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.emit

    def wrong(ctx: LoweringContext, choice: Choice, site: Packed, prepared: Prepare) -> Emitted:
        branch = ctx.branch

        def spoiled(condition: object, then: Callable[[], object], other: object) -> object:
            def off() -> object:
                return ctx.op("Mul", then(), ctx.constant(1.25, torch.float32))  # type: ignore

            return branch(condition, off, other)  # type: ignore

        ctx.branch = spoiled  # type: ignore
        try:
            return right(ctx, choice, site, prepared)  # type: ignore
        finally:
            ctx.branch = branch  # type: ignore

    monkeypatch.setattr(attention, "emit", wrong)
    with pytest.raises(ParityError, match=f"at batch=1, seq={LONG}"):
        _optimize()


def _scale_in_branch(path: Path, name: str) -> None:
    model = onnx.load(path)
    (chosen,) = (node for node in model.graph.node if node.op_type == "If")
    (graph,) = (held.g for held in chosen.attribute if held.name == name)
    node = next(node for node in graph.node if node.op_type == "Attention")
    for held in node.attribute:
        if held.name == "scale":
            held.f *= 3
    onnx.save(model, path)


@pytest.mark.parametrize("branch", ["then_branch", "else_branch"])
def test_verify_finds_a_wrong_scale_in_either_branch(branch: str, tmp_path: Path) -> None:
    path = tmp_path / "out.onnx"
    _optimize().save(path)
    with Session.open(path, Target("cpu")) as session:
        assert verify_file(_model(), path, session).parity.passed
    _scale_in_branch(path, branch)
    with Session.open(path, Target("cpu")) as session:
        found = verify_file(_model(), path, session)
    assert not found.parity.passed
    is_long = "seq=40" in found.parity.worst.case
    assert is_long == (branch == "then_branch")


class Steps(nn.Module):
    """A loop that nothing raises: its state goes through a sine."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4) / 2)

    def forward(self, x: Tensor) -> Tensor:
        def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            state = torch.sin(state @ self.weight + row)
            return state, state.clone()

        _, rows = scan(step, torch.zeros(2, 4), x, dim=0)
        assert isinstance(rows, Tensor)
        return rows


def test_a_loop_runs_one_step_and_several() -> None:
    torch.manual_seed(0)
    module = Steps().eval()
    axes = {0: Dim("time", max=64)}
    optimized = attngraph.optimize(module, (torch.randn(6, 2, 4),), dynamic_shapes=(axes,))
    assert [node.op for node in optimized.graph].count("attn.scan") == 1
    assert "time=1" in _cases(optimized)


DIMS = {"batch": DimInfo(1, 64), "seq": DimInfo(2, 4096), "past": DimInfo(0, 4096)}
SAMPLE = {"batch": 2, "seq": 8, "past": 3}


def _goal(outcome: Callable[..., object], *wanted: int) -> Goal:
    return Goal("it", lambda sizes: np.asarray(outcome(**sizes)).astype(int), wanted or (0, 1))


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (lambda seq, **_: seq >= 600, {"batch": 1, "seq": 600, "past": 1}),
        (lambda seq, past, **_: seq + past > 600, {"batch": 1, "seq": 600, "past": 1}),
        (lambda past, **_: past == 0, {"batch": 1, "seq": 1, "past": 0}),
        (lambda seq, **_: seq == 1, {"batch": 1, "seq": 1, "past": 0}),
        (lambda batch, seq, **_: (batch > 30) & (seq > 30), {"batch": 31, "seq": 31, "past": 1}),
        (
            lambda batch, seq, past: (batch > 30) & (seq > 30) & (past > 30),
            {"batch": 31, "seq": 31, "past": 31},
        ),
    ],
)
def test_the_least_sizes_that_enter(
    outcome: Callable[..., object], expected: dict[str, int]
) -> None:
    reached = reach([_goal(outcome)], [SAMPLE], DIMS)
    assert reached.sizes == [expected]
    assert reached.notes == []


def test_a_branch_that_no_size_enters_needs_none_and_a_large_one_is_told() -> None:
    assert reach([_goal(lambda seq, **_: seq > 5000)], [SAMPLE], DIMS).sizes == []
    reached = reach([_goal(lambda seq, **_: seq > 4000)], [SAMPLE], DIMS)
    assert reached.sizes == []
    assert "was not run: it takes batch=1, seq=4001" in reached.notes[0]


class OfImages(nn.Module):
    """(B, 6, 2 · H, 2 · W) to (B, H · W, 24), through attention over all patches."""

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width = x.shape[0], x.shape[2] // 2, x.shape[3] // 2
        x = x.reshape(batch, 6, height, 2, width, 2).permute(0, 2, 4, 3, 5, 1)
        heads = x.reshape(batch, height * width, 4, 6).transpose(1, 2)
        context = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return context.transpose(1, 2).flatten(2)


def test_a_branch_for_many_patches_takes_one_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all dims equal it would take many: a limit of 1,024 patches took 32 of 32 × 32."""
    monkeypatch.setitem(globals(), "LONG", 100)
    height, width = (Dim(name, min=1, max=32) for name in ("height", "width"))
    axes = {0: Dim("batch", min=1, max=64), 2: 2 * height, 3: 2 * width}
    images = torch.randn(2, 6, 4, 6)
    optimized = attngraph.optimize(OfImages().eval(), (images,), dynamic_shapes=(axes,))
    assert [node.op_type for node in optimized.model.graph].count("If") == 1
    assert "batch=1, height=10, width=10" in _cases(optimized)


def test_the_largest_value_counts_the_scores_of_an_attention() -> None:
    graph = parse(
        """
        graph @main {
          dim batch = 2 in 1..64
          dim seq = 8 in 1..4096
          input %x : f32[batch, 2*seq, 32]
          %y = attn.attention(%x, %x, %x) {heads = 4, kv_heads = 4, scale = 1.0}
          return %y
        }
        """
    )
    largest = largest_value(graph)
    assert largest({"batch": 3, "seq": 1}) == 3 * 2 * 32
    assert largest({"batch": 3, "seq": 100}) == 3 * 4 * 200 * 200
    told = reach(
        [_goal(lambda seq, **_: seq > 60)],
        [{"batch": 2, "seq": 8}],
        DIMS,
        largest=lambda _: 1 << 27,
    )
    assert told.sizes == []
    assert "batch=1, seq=61, which is too large to try" in told.notes[0]


def test_a_model_of_one_size_has_no_other_to_try() -> None:
    reached = reach([_goal(lambda: False)], [{}], {})
    assert (reached.sizes, reached.notes) == ([], [])


def _condition(text: str) -> Condition:
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        main (float[b, s, 4] x, float[b, p] y) => (float[b, s, 4] z) {{
            {text}
            z = If (c) <
                then_branch = left () => (float[b, s, 4] l) {{ l = Identity(x) }},
                else_branch = right () => (float[b, s, 4] r) {{ r = Neg(x) }}
            >
        }}"""
    )
    (found,) = conditions_of(onnx_ir.from_proto(model))
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "n = Shape <start = 1, end = 2> (x) m = Constant <value_ints = [7]> () "
            "g = GreaterOrEqual(n, m) a = Constant <value_ints = [0]> () c = Squeeze(g, a)",
            [False, True, True],
        ),
        (
            "n = Shape(x) i = Constant <value_int = 1> () s = Gather(n, i) k = Shape(y) "
            "p = Gather(k, i) t = Add(s, p) m = Constant <value_int = 10> () c = Less(t, m)",
            [True, True, False],
        ),
        (
            "n = Shape(x) i = Constant <value_int = 1> () s = Gather(n, i) "
            "two = Constant <value_int = 2> () q = Mod(s, two) one = Constant <value_int = 1> () "
            "e = Equal(q, one) c = Not(e)",
            [True, False, True],
        ),
        ("f = ReduceSum <keepdims = 0> (y) zero = Sub(f, f) c = Greater(f, zero)", None),
    ],
)
def test_conditions_are_read_as_functions_of_sizes(text: str, expected: list[bool] | None) -> None:
    seq = np.array([6, 7, 8])
    found = _condition(text).holds({"x": [2, seq, 4], "y": [2, 2]})
    assert (None if found is None else found.tolist()) == expected
