"""A wrong pass or lowering is caught, named, and leaves no file; a right result is dependable."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph import cli
from attngraph.checks.check import Check
from attngraph.errors import CaptureError, ParityError, UsageError
from attngraph.export.files.save import save, to_session
from attngraph.export.formats import Weights
from attngraph.export.lowering.emission import registry
from attngraph.export.lowering.emission.context import LoweringContext
from attngraph.export.parity.budget import compare
from attngraph.export.target import Target
from attngraph.frontend.model import Model, trace
from attngraph.ir import Builder, Graph, Node, Remark, interpret
from attngraph.optimized import Optimized
from attngraph.passes import Pass, registered

WIDTH, HEADS = 16, 2


class Block(nn.Module):
    """Attention over x (B, S, 16) where `mask` (B, S) is true, then a nonlinearity."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.projections(3 * x).chunk(3, -1)
        )
        scores = query @ key.transpose(-1, -2) * 0.5
        scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
        context = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        return torch.tanh(self.out(context))


def build() -> tuple[Block, tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(0)
    module = Block().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.5, generator=random)
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[0, :3], mask[1, 5] = False, False
    return module, (torch.randn(3, 7, WIDTH, generator=random), mask)


@pytest.fixture(scope="module")
def optimized() -> Optimized:
    module, args = build()
    return attngraph.optimize(module, args, verify="off")


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
    [("fuse-attention", _drop_mask), ("fold-masks", _double_scale), ("bound-keys", _drop_mask)],
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
        assert not torch.allclose(_tensor(wrong(*args)), module(*args), atol=1e-2)


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
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    number = next(index for index, text in enumerate(source, 1) if text.strip().startswith(line))
    assert f" = {op}, from " in str(caught.value)
    assert f"test_checks.py:{number}" in str(caught.value)


def test_a_wrong_result_leaves_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _break_pass(monkeypatch, "fold-masks", _drop_mask)
    kept = tmp_path / "kept.onnx"
    kept.write_bytes(b"an earlier result")
    for path in (kept, tmp_path / "new.onnx"):
        command = ["optimize", "--factory", "tests.parity.test_checks:build", "-o", str(path)]
        assert cli.run(command) not in (0, 70)
        error = capfd.readouterr().err
        assert "The pass fold-masks is the first to diverge" in error
    assert [file.name for file in tmp_path.iterdir()] == ["kept.onnx"]
    assert kept.read_bytes() == b"an earlier result"


def _tensor(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    assert isinstance(output, Tensor)
    return output


def test_inputs_go_by_position_or_by_name(optimized: Optimized) -> None:
    _, (x, mask) = build()
    expected = _tensor(optimized(x, mask))
    for output in (optimized(x, mask=mask), optimized(mask=mask, x=x), optimized.run([x, mask])[0]):
        assert torch.equal(_tensor(output), expected)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda f, x, m: f(x, m, m), "3 inputs were given; there are x, mask"),
        (lambda f, x, m: f(x), "takes the inputs x, mask; got x"),
        (lambda f, x, m: f(x, x=m), "The input x was given twice"),
        (lambda f, x, m: f(x, padding=m), "takes the inputs x, mask; got x, padding"),
        (lambda f, x, m: f(x.double(), m), "'x' is float64; the model takes float32"),
        (lambda f, x, m: f(x, m.long()), "'mask' is int64; the model takes bool"),
        (lambda f, x, m: f(x[:, :, :8], m), r"'x' has shape \(3, 7, 8\)"),
        (lambda f, x, m: f(x[0], m), r"'x' has shape \(7, 16\)"),
        (lambda f, x, m: f(x, m.numpy()), "'mask' must be a torch.Tensor, not ndarray"),
    ],
)
def test_wrong_inputs_get_a_sentence(
    call: Callable[[Optimized, Tensor, Tensor], object], reason: str, optimized: Optimized
) -> None:
    _, (x, mask) = build()
    with pytest.raises(UsageError, match=reason) as caught:
        call(optimized, x, mask)
    assert str(caught.value).endswith(".")


def test_threads_share_one_session() -> None:
    module, (x, mask) = build()
    optimized = attngraph.optimize(module, (x, mask), verify="off")  # its session isn't open yet
    outputs: list[Tensor | None] = [None] * 8
    start = threading.Barrier(len(outputs))

    def work(index: int) -> None:
        start.wait()
        for _ in range(10):
            outputs[index] = _tensor(optimized((index + 1) * x, mask))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(outputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, output in enumerate(outputs):
        assert output is not None
        assert torch.equal(output, _tensor(optimized((index + 1) * x, mask)))


def test_threads_may_call_it_at_different_shapes() -> None:
    """While the main thread opens it anew, with other options."""
    module, args = build()
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq")}
    optimized = attngraph.optimize(module, args, dynamic_shapes=(dims, dims), verify="off")
    inputs = []
    for index in range(6):
        x = torch.randn(1 + index % 3, 2 + index, WIDTH)
        inputs.append((x, torch.ones(x.shape[:2], dtype=torch.bool)))
    expected = [_tensor(optimized(*pair)) for pair in inputs]
    outputs: list[list[Tensor]] = [[] for _ in inputs]

    def work(index: int) -> None:
        for _ in range(20):
            outputs[index].append(_tensor(optimized(*inputs[index])))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for _ in range(5):
        optimized.open(spinning=False)
    for thread in threads:
        thread.join()
    for found, wanted in zip(outputs, expected, strict=True):
        assert len(found) == 20
        for output in found:
            torch.testing.assert_close(output, wanted)


def test_it_opens_with_options_and_after_a_close(optimized: Optimized) -> None:
    _, (x, mask) = build()
    expected = optimized(x, mask)
    before = optimized.session
    opened = optimized.open(threads=1, graph_optimization="off")
    assert optimized.session is opened
    torch.testing.assert_close(optimized(x, mask), expected)
    with pytest.raises(UsageError, match="has no option 'device_id'"):
        optimized.open(provider_options={"device_id": 0})
    assert optimized.session is opened
    assert before.run([x, mask])  # whoever still has it may finish
    optimized.close()
    assert optimized.session is not opened
    torch.testing.assert_close(optimized(x, mask), expected)


@pytest.mark.parametrize("external_above", [1 << 30, 0])
def test_a_saved_file_gives_the_same_output(
    external_above: int, optimized: Optimized, tmp_path: Path
) -> None:
    _, (x, mask) = build()
    expected = _tensor(optimized(x, mask)).numpy()
    path = tmp_path / "model.onnx"
    save(optimized.model, path, external_above=external_above)
    files = ["model.onnx"] + ["model.onnx.data"] * (external_above == 0)
    assert sorted(file.name for file in tmp_path.iterdir()) == files
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [put.name for put in session.get_inputs()] == ["x", "mask"]
    (output,) = session.run(None, {"x": x.numpy(), "mask": mask.numpy()})
    np.testing.assert_array_equal(output, expected)
    with to_session(optimized.model, Target("cpu"), external_above=external_above) as opened:
        np.testing.assert_array_equal(opened.run([x, mask])[0].numpy(), expected)


def test_saving_by_name_is_saving_whole(optimized: Optimized, tmp_path: Path) -> None:
    optimized.save(tmp_path / "a.onnx")
    save(optimized.model, tmp_path / "b.onnx")
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def test_a_trace_that_is_another_function_is_told_from_a_wrong_pass() -> None:
    class Otherwise(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.softmax(-1) * (1.01 if torch.compiler.is_compiling() else 1.0)

    with pytest.raises(ParityError, match=r"what torch\.export traced of Otherwise") as caught:
        attngraph.optimize(Otherwise(), (torch.randn(4, 9),))
    assert "No pass is to blame" in str(caught.value)
    assert "Nothing was written" in str(caught.value)


class _Compares(torch.nn.Module):
    """Its own code asks whether two lengths are equal, which changes the result by a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        scores = x @ context.mT
        if x.shape[1] == context.shape[1]:
            scores = scores * self.factor
        return scores.softmax(-1) @ context


def test_a_trace_is_checked_where_dims_it_took_for_unequal_are_equal() -> None:
    args = (torch.randn(2, 5, 4), torch.randn(2, 7, 4))
    dims = ({1: Dim("seq", max=64)}, {1: Dim("context", max=64)})
    optimized = attngraph.optimize(_Compares(2.0), args, dynamic_shapes=dims)
    assert optimized.report.relations == ["seq ≠ context"]
    with pytest.raises(UsageError, match="compiled for sizes with seq ≠ context"):
        optimized(torch.randn(2, 7, 4), args[1])
    optimized = attngraph.optimize(_Compares(1.0), args, dynamic_shapes=dims)
    assert optimized.report.parity is not None
    assert "seq=7, context=7" in {output.case for output in optimized.report.parity.outputs}


class _Sparse(torch.nn.Module):
    """A sparse buffer, as Whisper's alignment heads are; forward reads it or doesn't."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("chosen", torch.eye(4).to_sparse())
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.chosen
        assert isinstance(chosen, Tensor)
        out: Tensor = self.linear(x)
        return out @ chosen.to_dense() if self.reads else out


def test_a_sparse_buffer_is_let_be_or_refused_by_name() -> None:
    optimized = attngraph.optimize(_Sparse(False), (torch.randn(3, 4),))
    assert optimized.report.parity is not None
    with pytest.raises(CaptureError, match="chosen is a sparse tensor"):
        attngraph.optimize(_Sparse(True), (torch.randn(3, 4),))


def test_a_derived_dim_has_its_size_in_every_case() -> None:
    class Ahead(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            keys, queries = torch.arange(x.shape[1]), torch.arange(y.shape[1])[:, None]
            later = keys > queries + x.shape[1] - y.shape[1]
            return (y @ x.mT).masked_fill(later, -torch.inf).softmax(-1) @ x

    batch, seq = Dim("batch"), Dim("seq")
    args = torch.randn(3, 9, 4), torch.randn(3, 7, 4)
    shapes = {0: batch, 1: seq + 2}, {0: batch, 1: seq}
    optimized = attngraph.optimize(Ahead().eval(), args, dynamic_shapes=shapes)
    assert [site.status for site in optimized.report.sites] == ["fused"]
    assert optimized.report.parity is not None
    assert optimized.report.parity.passed


def test_weights_without_numbers_are_named() -> None:
    module, x = nn.Linear(4, 4, device="meta"), torch.zeros(2, 4, device="meta")
    with pytest.raises(UsageError, match="weight of Linear is on the meta device"):
        attngraph.optimize(module, (x,))


class ByHand(nn.Module):
    """exp(x) / Σ exp(x): not a number where a caller's bias hides a whole row, as eager has it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        exponentials = (q @ k.mT * 0.3 + bias).exp()
        return exponentials / exponentials.sum(-1, keepdim=True) @ v


@pytest.mark.parametrize("length", [4, 40])
def test_a_row_that_a_caller_may_hide_is_tried_at_large_static_sizes_too(length: int) -> None:
    inputs = [torch.randn(2, 4, length, 6) for _ in range(3)]
    bias = torch.zeros(2, 1, length, length)
    optimized = attngraph.optimize(ByHand(), (*inputs, bias))
    assert [site.code for site in optimized.report.sites] == ["no-softmax"]
    bias[1, 0, 2] = torch.finfo(torch.float32).min
    expected = ByHand()(*inputs, bias)
    assert expected.isnan().any()
    torch.testing.assert_close(optimized(*inputs, bias), expected, equal_nan=True)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_a_model_that_returns_no_number_is_not_passed(
    broken: float, weights: Weights | None
) -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.LayerNorm(64)).eval()
    with torch.no_grad():
        module[2].weight[:, 3] = broken
    with pytest.raises(ParityError, match=r"no finite number.*2\.weight holds NaN") as caught:
        attngraph.optimize(module, (torch.randn(4, 64),), weights=weights)
    assert str(caught.value).endswith("Nothing was written.")


def test_a_sample_that_gives_no_number_is_refused_and_one_element_is_enough() -> None:
    x = torch.full((2, 5, 8), torch.nan)
    with pytest.raises(ParityError, match="Give sample inputs on which it returns numbers"):
        attngraph.optimize(nn.Linear(8, 8), (x,))
    x[0, 0] = 1.0
    parity = attngraph.optimize(nn.Linear(8, 8), (x,)).report.parity
    assert parity is not None
    assert parity.worst.compared == 8


class _HidesAll(nn.Module):
    """Two attentions whose masks leave each token hidden in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.ff = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for hidden in (mask != 0, mask == 0):
            scores = (x @ x.mT).masked_fill(hidden[:, None], torch.finfo(x.dtype).min)
            x = self.norm(x + self.ff(scores.softmax(-1) @ x))
        return x


def test_rows_that_are_all_padding_are_no_pass() -> None:
    args = (torch.randn(2, 8, 16), torch.ones(2, 8, dtype=torch.int64))
    with pytest.raises((ParityError, UsageError), match=r"padding|padded"):
        attngraph.optimize(_HidesAll().eval(), args, ignore_padded_rows=True)


class Summed(nn.Module):
    """The sum over the last axis, at once, or one element after the other."""

    def __init__(self, *, at_once: bool, factor: float = 1.0) -> None:
        super().__init__()
        self.at_once = at_once
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        if self.at_once:
            return x.sum(-1)
        total = x[..., 0] * self.factor
        for place in range(1, x.shape[-1]):
            total = total + x[..., place]
        return total


def test_rounding_in_half_is_not_called_another_trace() -> None:
    args = (torch.rand(4, 64, 128, generator=torch.Generator().manual_seed(0)).half(),)
    model = Model(Summed(at_once=True), None, args, {}, None, "Summed")
    check = Check(model, trace(model), "fp16")
    slow = attngraph.capture(Summed(at_once=False), args)
    exact, halves = check.references(args), interpret(slow, args)
    assert not compare(exact, halves, "fp16").passed
    assert check.of_trace(slow) == ""
    other = attngraph.capture(Summed(at_once=False, factor=1.25), args)
    assert "already differs from it at sample" in check.of_trace(other)
