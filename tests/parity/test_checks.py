"""A wrong pass or lowering is caught, named, and leaves no file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph import cli
from attngraph.errors import ParityError
from attngraph.export.lowering.emission import registry
from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.ir import Builder, Graph, Node, Remark
from attngraph.passes import Pass, registered
from tests.parity import block
from tests.parity.block import build, tensor_of

Spoil = Callable[[Graph, Node], None]


def _drop_mask(graph: Graph, node: Node) -> None:
    graph.set_inputs(node, node.inputs[:3])


def _double_scale(graph: Graph, node: Node) -> None:
    attrs = {**node.attrs, "scale": 2 * node.attrs["scale"]}
    wrong = Builder(graph, node, node.loc).node(node.op, *node.inputs, **attrs)
    for old, new in zip(node.outputs, wrong.outputs, strict=True):
        graph.replace_uses(old, new)
    graph.erase(node)


def _break_pass(monkeypatch: pytest.MonkeyPatch, name: str, spoil: Spoil) -> None:
    """From now on the pass spoils every attention once it has done its work."""
    kind = type(registered()[name]())
    run = kind.run

    def wrong(self: Pass, graph: Graph) -> list[Remark]:
        remarks = run(self, graph)
        for node in list(graph):
            if node.op == "attn.attention":
                spoil(graph, node)
        return remarks

    monkeypatch.setattr(kind, "run", wrong)


# A spoiled pass that runs several times would go on doubling; these run once.
WRONG_PASSES = pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("fuse-attention", _drop_mask),
        ("fold-masks", _double_scale),
        pytest.param("bound-keys", _drop_mask, marks=pytest.mark.wide),
    ],
)


@WRONG_PASSES
def test_a_wrong_pass_is_named_after_the_fact(
    name: str, spoil: Spoil, monkeypatch: pytest.MonkeyPatch
) -> None:
    _break_pass(monkeypatch, name, spoil)
    module, args = build()
    with pytest.raises(ParityError, match=f"The pass {name} is the first to diverge") as caught:
        attngraph.optimize(module, args)
    assert "out of its error budget" in str(caught.value)
    assert "Nothing was written." in str(caught.value)


@WRONG_PASSES
def test_a_wrong_pass_is_named_as_it_happens(
    name: str, spoil: Spoil, monkeypatch: pytest.MonkeyPatch
) -> None:
    _break_pass(monkeypatch, name, spoil)
    module, args = build()
    with pytest.raises(ParityError, match=f"After the pass {name} the graph is wrong"):
        attngraph.optimize(module, args, verify="each")


def test_without_verification_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a wrong result is handed over; the report says that it wasn't checked."""
    _break_pass(monkeypatch, "fold-masks", _drop_mask)
    module, args = build()
    wrong = attngraph.optimize(module, args, verify="off")
    assert wrong.report.parity is None
    assert "parity" not in wrong.report.timings
    assert wrong.report.to_dict()["parity"] is None
    with torch.no_grad():
        assert not torch.allclose(tensor_of(wrong(*args)), module(*args), atol=1e-2)


def test_verifying_each_pass_passes_where_all_are_right() -> None:
    module, args = build()
    report = attngraph.optimize(module, args, verify="each").report
    assert report.parity is not None
    assert report.parity.passed
    assert report.fused == 1


def _wrong_tanh(ctx: LoweringContext, node: Node) -> onnx_ir.Value:
    value = node.inputs[0]
    assert value is not None
    return ctx.op("Softsign", ctx.value(value))


def _one_percent_more(ctx: LoweringContext, node: Node) -> onnx_ir.Value:
    lowering = registry.registered("right.attention")
    assert lowering is not None
    values = lowering(ctx, node)
    assert isinstance(values, list)
    return ctx.op("Mul", values[0], ctx.constant(1.01, torch.float32))


@pytest.mark.parametrize(
    ("op", "wrong", "line"),
    [
        ("aten.tanh", _wrong_tanh, "return torch.tanh(self.out(context))"),
        ("attn.attention", _one_percent_more, "context = (scores.softmax(-1) @ value)"),
    ],
)
def test_a_wrong_lowering_is_named_with_the_line_it_comes_from(
    op: str, wrong: registry.Lowering, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = registry.registered(op)
    assert right is not None
    monkeypatch.setitem(registry._LOWERINGS, "right.attention", right)
    monkeypatch.setitem(registry._LOWERINGS, op, wrong)
    module, args = build()
    with pytest.raises(ParityError, match=r"The first ONNX value to diverge is %") as caught:
        attngraph.optimize(module, args)
    source = Path(block.__file__).read_text(encoding="utf-8").splitlines()
    number = next(index for index, text in enumerate(source, 1) if text.strip().startswith(line))
    assert f" = {op}, from " in str(caught.value)
    assert f"block.py:{number}" in str(caught.value)


def test_a_wrong_result_leaves_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _break_pass(monkeypatch, "fold-masks", _drop_mask)
    kept = tmp_path / "kept.onnx"
    kept.write_bytes(b"an earlier result")
    for path in (kept, tmp_path / "new.onnx"):
        command = ["optimize", "--factory", "tests.parity.block:build", "-o", str(path)]
        assert cli.run(command) not in (0, 70)
        error = capfd.readouterr().err
        assert "The pass fold-masks is the first to diverge" in error
    assert [file.name for file in tmp_path.iterdir()] == ["kept.onnx"]
    assert kept.read_bytes() == b"an earlier result"


class _WeakFill(torch.nn.Module):
    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return (-(x @ x.mT)).masked_fill(~keep, -1e4).softmax(-1) @ x


def test_scores_beyond_a_fill_are_compiled_as_eager_has_them() -> None:
    """A note says that none is to come near; a sample on which one does is compiled exactly."""
    keep = torch.ones(4, 4, dtype=torch.bool).tril()
    x = torch.randn(2, 4, 8)
    near = attngraph.optimize(_WeakFill(), (x, keep))
    assert near.report.fused == 1
    (note,) = [note for note in near.report.notes if "--exact" in note]
    assert "A fill of -10000 counts as -inf" in note
    wide = 100 * x
    far = attngraph.optimize(_WeakFill(), (wide, keep))
    assert [site.code for site in far.report.sites] == ["weak-fill"]
    assert [note for note in far.report.notes if "-10000" in note and "--exact" in note]
    found = far(wide, keep)
    assert torch.allclose(found, _WeakFill()(wide, keep))


class _ScaledLate(torch.nn.Module):
    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        scores = (x @ x.mT + (1.0 - keep.float()) * -1e9) * 0.3
        return scores.softmax(-1) @ x


def test_scores_that_a_mask_rounds_before_they_are_scaled_are_as_eager_has_them() -> None:
    """Of a row without keys, -1e9 leaves the multiples of 64: those of the scores, not of 0.3 times
    them."""
    keep = torch.tensor([[1.0, 1, 0, 1], [0, 0, 0, 0]])[:, None] > 0
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    near = attngraph.optimize(_ScaledLate(), (x, keep))
    assert near.report.fused == 1
    assert any("-3e+08" in each.what for each in near.report.reassociated)
    far = attngraph.optimize(_ScaledLate(), (10 * x, keep))
    assert [site.code for site in far.report.sites] == ["weak-fill"]
    assert [note for note in far.report.notes if "-3e+08" in note and "--exact" in note]
    assert torch.allclose(far(10 * x, keep), _ScaledLate()(10 * x, keep))


@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
def test_gates_that_are_all_small_are_computed_from_exponentials(gate: str) -> None:
    """onnxruntime's Sigmoid is 0 from −18 on: a row of nothing else would be refused."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x) / 8 - 30
            return F.silu(h) if gate == "silu" else torch.sigmoid(h) * x

    module, x = Gated(), torch.randn(2, 5, 8)
    optimized = attngraph.optimize(module, (x,), dynamic_shapes=({0: Dim("b"), 1: Dim("s")},))
    assert any("Sigmoid" in note for note in optimized.report.notes)
    for scale in (1.0, 300.0):  # to gates of 0 and of 1
        expected = module(x * scale)
        # e^h is off by h's roundings, of which each side has a few: |h| is about 100.
        rounding = 100 * torch.finfo(torch.float32).eps
        torch.testing.assert_close(optimized(x * scale), expected, rtol=4 * rounding, atol=1e-30)
    plain = attngraph.optimize(nn.Sequential(nn.Linear(8, 8), nn.SiLU()), (x,))
    assert not any("Sigmoid" in note for note in plain.report.notes)
