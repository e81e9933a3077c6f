"""Half precision: what is half in the file, how far it is from exact, and what must not be half.

There is no GPU here: the graph for CUDA is run by the CPU provider, which rounds to float16 between
kernels that compute in float32, and in bfloat16 by the interpreter.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.compiling.compiler import Model, analyse
from attngraph.compiling.precision_search import in_half, search
from attngraph.errors import UsageError
from attngraph.export.files.save import to_session
from attngraph.export.lowering.lower import lower
from attngraph.export.parity.budget import Parity, compare
from attngraph.export.parity.reference import Reference, ReferenceOutputs
from attngraph.export.precision import Group, Plan, convert
from attngraph.export.precision.policy import KINDS
from attngraph.export.target import parse_target
from attngraph.ir import Graph, interpret, verify
from attngraph.optimized import Optimized
from attngraph.reports.report import Report
from tests.models import CASES, Built, Case
from tests.models.kit import peaked, states

pytestmark = pytest.mark.wide

CPU, CUDA = parse_target("cpu"), parse_target("cuda:sm80")
BY_NAME = {case.name: case for case in CASES}
NAMES = ("bert-sdpa", "gpt2-eager", "llama-sdpa", "t5-eager", "encoder", "gqa")
each_case = pytest.mark.parametrize("case", [BY_NAME[name] for name in NAMES], ids=lambda c: c.name)
FLOAT, HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16
PRODUCTS = {"MatMul", "Gemm", "FusedMatMul"}


def graph_of(module: nn.Module, args: tuple[Tensor, ...], shapes: Any = None) -> Graph:
    """The optimised graph in float32."""
    return analyse(Model(module, None, args, {}, shapes))[0]


def on_cpu(model: ir.Model, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    with to_session(model, CPU) as session:
        return session.run(args)


@functools.cache
def _built(case: Case) -> tuple[Built, Graph]:
    """Compiled once for all that is asked of it: a conversion makes a new graph."""
    built = case.build()
    return built, graph_of(built.module, built.args, built.dynamic_shapes)


@each_case
def test_on_cuda_all_but_the_arithmetic_of_positions_and_masks_is_half(case: Case) -> None:
    built, graph = _built(case)
    converted = convert(graph, Plan(torch.float16)).graph
    verify(converted)
    model = lower(converted, target=CUDA)
    attentions = [node for node in model.graph if node.op_type.endswith("Attention")]
    assert len(attentions) == built.sites
    for node in (node for node in model.graph if node.op_type in PRODUCTS or node in attentions):
        floats = {v.dtype for v in node.inputs if v is not None and v.dtype in (FLOAT, HALF)}
        assert floats == {HALF}, node
    for value in (*model.graph.inputs, *model.graph.outputs):
        assert value.dtype != HALF
    weights = [value.const_value for value in model.graph.initializers.values()]
    wide = [t for t in weights if t is not None and t.dtype == FLOAT and t.size > 64]
    assert not wide
    casts = [n for n in model.graph if n.op_type == "Cast" and n.inputs[0].dtype in (FLOAT, HALF)]
    assert len(casts) <= 4  # the rotary tables, masks and the edges: none inside a layer


@each_case
def test_the_half_graph_for_cuda_is_within_the_budget(case: Case) -> None:
    built, graph = _built(case)
    model = lower(convert(graph, Plan(torch.float16)).graph, target=CUDA)
    reference = Reference(built.module, precision="fp16", converted=True)
    with to_session(model, CPU) as session:
        for sizes in ({}, *built.sizes):
            args = built.inputs(sizes) if sizes else built.args
            wanted = reference(args)
            parity = compare(wanted, wanted.in_its_dtypes(session.run(args)), "fp16")
            assert parity.passed, f"{sizes}: {parity}"


@pytest.mark.parametrize("name", ["bert-sdpa", "llama-sdpa", "encoder"])
def test_bfloat16_is_within_the_budget(name: str) -> None:
    built, graph = _built(BY_NAME[name])
    converted = convert(graph, Plan(torch.bfloat16)).graph
    verify(converted)
    reference = Reference(built.module, precision="bf16", converted=True)(built.args)
    outputs = interpret(converted, built.args)
    parity = compare(reference, reference.in_its_dtypes(outputs), "bf16")
    assert parity.passed, parity


@pytest.mark.parametrize("name", ["bert-sdpa", "llama-sdpa"])
def test_on_the_cpu_weights_are_half_and_products_are_not(name: str) -> None:
    built = BY_NAME[name].build()
    single = attngraph.optimize(built.module, built.args, verify="off")
    halved = attngraph.optimize(built.module, built.args, precision="fp16")
    report = halved.report
    assert report.parity is not None
    assert report.parity.passed
    assert report.parity.precision == "fp16"
    assert report.weight_bytes < 0.53 * single.report.weight_bytes
    assert report.weight_bytes_before == pytest.approx(single.report.weight_bytes, rel=0.02)
    assert any("stored in float16" in note for note in report.notes)
    read = {
        value.dtype
        for node in halved.model.graph
        if node.op_type in PRODUCTS or node.op_type.endswith("Attention")
        for value in node.inputs
        if value is not None
    }
    assert HALF not in read


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["bert-sdpa", "gqa"])
def test_a_model_that_is_half_is_compiled_as_it_is(name: str, dtype: torch.dtype) -> None:
    built = BY_NAME[name].build()
    report = attngraph.optimize(built.module.to(dtype), built.args).report
    assert report.precision == {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    told = any("nodes are casts" in note for note in report.notes)
    assert told == (report.precision == "bf16")
    assert report.parity is not None
    assert report.parity.precision == report.precision


class Filled(nn.Module):
    """Attention of two heads; `fill` hides the keys where `mask` is False, added or put in."""

    def __init__(self, fill: float, added: bool, wave: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.fill, self.added, self.wave = fill, added, wave

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2)
        scores = torch.sin(scores) if self.wave else scores
        hidden = ~mask[:, None, None, :]
        if self.added:
            scores = scores + hidden.float() * self.fill
        else:
            scores = scores.masked_fill(hidden, self.fill)
        return (torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2)


def padded() -> tuple[Tensor, Tensor]:
    """(3, 7, 16), whose last row has no key at all."""
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[0, :3] = False
    mask[2] = False
    return states(3, 7, 16), mask


@pytest.mark.parametrize("wave", [False, True], ids=["fused", "kept"])
@pytest.mark.parametrize("added", [False, True], ids=["filled", "added"])
@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -1e9, -1e4])
@pytest.mark.parametrize("provider", ["cpu", "cuda"])
def test_fills_that_float16_lacks_mean_the_same(
    provider: str, fill: float, added: bool, wave: bool
) -> None:
    module = peaked(Filled(fill, added, wave))
    args = padded()
    graph = graph_of(module, args)
    plan = Plan(torch.float16, "cuda" if provider == "cuda" else "cpu")
    model = lower(convert(graph, plan).graph, target=parse_target(provider))
    (output,) = on_cpu(model, args)
    with torch.no_grad():
        expected = module(*args)
    # eight features of products of 16, rounded to 11 bits at each of four steps
    assert float((output - expected).abs().max()) <= 16 * 2**-11 * float(expected.abs().max())


class Biased(nn.Module):
    """SDPA with a float mask that the caller makes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return attended.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_mask_with_unknown_fills_keeps_its_attention_in_float32(dtype: torch.dtype) -> None:
    module, (x, present) = peaked(Biased()), padded()
    mask = torch.where(present, 0.0, torch.finfo(torch.float32).min)[:, None, None].expand(
        3, 1, 7, 7
    )
    converted = convert(graph_of(module, (x, mask)), Plan(dtype))
    (site,) = [node for node in converted.graph if node.op == "attn.attention"]
    assert {value.dtype for value in site.inputs if value is not None} == {torch.float32}
    (note,) = converted.notes
    assert "stays in float32" in note
    assert "test_precision.py" in note
    if dtype == torch.float16:
        (output,) = on_cpu(lower(converted.graph, target=CUDA), (x, mask))
        with torch.no_grad():
            expected = module(x, mask)
        assert float((output - expected).abs().max()) <= 16 * 2**-11 * float(expected.abs().max())


def test_a_small_bias_is_half_with_its_attention() -> None:
    class Relative(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Biased()
            self.bias = nn.Parameter(torch.randn(1, 2, 7, 7))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, self.bias)

    converted = convert(graph_of(Relative().eval(), (states(3, 7, 16),)), Plan(torch.float16))
    model = lower(converted.graph, target=CUDA)
    (site,) = [node for node in model.graph if node.op_type == "Attention"]
    assert {value.dtype for value in site.inputs if value is not None} == {HALF}
    assert not converted.notes


def test_caches_are_half_and_other_inputs_are_not() -> None:
    from examples import cached_gpt

    module, args, shapes = cached_gpt.build()
    graph = graph_of(module, args, shapes)
    converted = convert(graph, Plan(torch.float16)).graph
    verify(converted)
    pasts = [v for v in converted.inputs if v.dtype.is_floating_point]
    assert pasts
    assert {value.dtype for value in pasts} == {torch.float16}
    floats = Counter(v.dtype for v in converted.outputs if v.dtype.is_floating_point)
    assert floats == {torch.float16: len(pasts), torch.float32: 1}


class FeedForward(nn.Module):
    """A residual feed-forward layer whose hidden activations are about `size`."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        with torch.no_grad():
            self.up.weight.mul_(size)
            self.down.weight.div_(size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, *sizes: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FeedForward(size) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_the_layer_that_overflows_is_found_and_stays_in_float32() -> None:
    torch.manual_seed(0)
    module, args = Stack(1.0, 1.0, 2e5, 1.0).eval(), (states(2, 5, 16),)
    wanted = Reference(module, precision="fp16", converted=True)(args)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in wanted.eager)
    report = Report("stack", "cuda", "fp16")

    def build(graph: Graph) -> Optimized:
        return Optimized(graph, lower(graph, target=CUDA), report, CPU)

    def check(optimized: Optimized) -> Parity:
        # onnxruntime's CPU provider leaves roundings out, so nothing would overflow
        outputs = interpret(optimized.graph, args)
        return compare(wanted, wanted.in_its_dtypes(outputs), "fp16")

    halved = in_half(graph_of(module, args), "fp16", CUDA, build, check)
    assert halved.parity is not None
    assert halved.parity.passed
    assert halved.keep
    assert {group.layer for group in halved.keep} == {"layers.2"}
    assert "projections" in {group.kind for group in halved.keep}
    assert {(entry["kind"], entry["layer"]) for entry in halved.kept} == set(halved.keep)
    assert any("layers.2 stay in float32" in note for note in halved.notes), halved.notes


def _measured(needed: set[Group]) -> Any:
    """A parity that fails by as much as is missing."""
    count = 0

    def measure(keep: frozenset[Group]) -> Parity:
        nonlocal count
        count += 1
        assert count < 60
        missing = len(needed - keep)
        eager = torch.ones(64, dtype=torch.float16)
        reference = ReferenceOutputs(("x",), (eager,), (eager.double(),))
        return compare(reference, [eager + missing * 0.25], "fp16")

    return measure


@pytest.mark.parametrize(
    "needed",
    [
        {Group("norms", "h.3")},
        {Group("attention", "h.0"), Group("attention", "h.7")},
        {Group("norms", "h.1"), Group("projections", "h.1")},
    ],
)
def test_search_keeps_what_is_needed_and_little_more(needed: set[Group]) -> None:
    halves = Counter({Group(kind, f"h.{layer}"): 2 for kind in KINDS for layer in range(8)})
    keep = search(halves, _measured(needed))
    assert needed <= keep
    assert {group.kind for group in keep} == {group.kind for group in needed}
    if len({group.layer for group in needed}) == 1:
        assert {group.layer for group in keep} == {group.layer for group in needed}


def test_search_gives_everything_up_where_nothing_helps() -> None:
    halves = Counter({Group("norms", "h.0"): 1, Group("projections", "h.0"): 1})
    assert search(halves, _measured({Group("norms", "elsewhere")})) == set(halves)


def test_bfloat16_on_the_cpu_is_refused() -> None:
    with pytest.raises(UsageError, match=r"CPU provider has no bfloat16 kernels.*--target cuda"):
        attngraph.optimize(Stack(1.0), (states(2, 5, 16),), precision="bf16")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_half_model_is_not_converted_to_another_precision(precision: Any) -> None:
    with pytest.raises(UsageError, match=r"Stack are float16.*leave out --precision"):
        attngraph.optimize(Stack(1.0).half(), (states(2, 5, 16).half(),), precision=precision)


def test_weights_beyond_the_range_stay_in_float32() -> None:
    module = Stack(1.0).eval()
    with torch.no_grad():
        module.layers[0].up.weight[0, 0] = 1e6
        module.layers[0].down.weight[:, 0] = 0
    graph = convert(graph_of(module, (states(2, 5, 16),)), Plan(torch.float16)).graph
    dtypes = {len(v.shape): set[torch.dtype]() for v in graph.constants.values()}
    for value in graph.constants.values():
        assert value.data is not None
        assert bool(torch.isfinite(value.data).all())
        dtypes[len(value.shape)].add(value.dtype)
    assert dtypes[2] == {torch.float16, torch.float32}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("added", [False, True], ids=["filled", "added"])
@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -1e9, -1e4])
def test_fills_keep_their_meaning_in_either_dtype(
    dtype: torch.dtype, fill: float, added: bool
) -> None:
    """In PyTorch, which has kernels for both: masked keys have no weight, an empty row a mean."""
    module, args = peaked(Filled(fill, added)), padded()
    (output,) = interpret(convert(graph_of(module, args), Plan(dtype)).graph, args)
    with torch.no_grad():
        expected = module(*args)
    step = torch.finfo(dtype).eps / 2
    assert float((output - expected).abs().max()) <= 16 * step * float(expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tables_of_rotary_embeddings_are_made_in_float32(dtype: torch.dtype) -> None:
    """Angles of positions beyond 2048 have no exact number in float16, and beyond 256 in bfloat16;
    only the cosines and sines themselves are rounded.
    """
    _, graph = _built(BY_NAME["llama-sdpa"])
    converted = convert(graph, Plan(dtype)).graph
    waves = [node for node in converted if node.op in ("aten.cos", "aten.sin")]
    assert waves
    seen = [value for node in waves for value in (*node.inputs, *node.outputs) if value]
    for value in seen:  # and all that the angles are made of
        assert value.dtype not in (torch.float16, torch.bfloat16)
        sources = value.producer.inputs if value.producer is not None else ()
        seen += [source for source in sources if source is not None and source not in seen]
    rotated = [node for node in converted if node.op == "attn.rotary"]
    assert {node.outputs[0].dtype for node in rotated} == {dtype}


class Centred(nn.Module):
    """A norm over tokens, which no operator has, then one over features, which is an RMS norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.rand(16) + 0.5), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)
        x = 1000 * self.out(x)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_of_norms_are_in_float32(dtype: torch.dtype) -> None:
    """Squares of 1000 have no number in float16."""
    torch.manual_seed(0)
    module, args = Centred().eval(), (1000 * states(3, 7, 16),)
    converted = convert(graph_of(module, args), Plan(dtype)).graph
    made = {node.op: node.outputs[0].dtype for node in converted}
    assert made["aten.mean.dim"] == torch.float32
    assert made["attn.rms_norm"] == dtype  # whose kernels sum in float32
    (output,) = interpret(converted, args)
    with torch.no_grad():
        expected = module(*args)
    step = torch.finfo(dtype).eps / 2
    assert float((output - expected).abs().max()) <= 16 * step * float(expected.abs().max())
    if dtype == torch.float16:
        (found,) = on_cpu(lower(converted, target=CUDA), args)
        assert float((found - expected).abs().max()) <= 16 * step * float(expected.abs().max())
