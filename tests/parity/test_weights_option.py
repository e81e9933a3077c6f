"""Weights in int8 and int4: kernels within the budget of rounding, and the cost of bits told."""

from __future__ import annotations

import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
import pytest
import torch
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.cli import run
from attngraph.compiling.compiler import compile_model
from attngraph.dialect import quantized
from attngraph.dialect.quantized import BLOCK
from attngraph.errors import ParityError, UsageError
from attngraph.export.kernels.weight_only import FORMS, _measured, cost_on_cpu
from attngraph.export.precision.codes import error_bound, packed
from attngraph.export.precision.quantize import BITS
from attngraph.frontend.model import Model
from attngraph.optimized import Optimized
from attngraph.options import Options
from examples import cached_gpt
from tests.models.kit import BATCH, FEED_FORWARD, HEADS, HIDDEN, LAYERS, POSITIONS, SEQ, VOCABULARY

pytestmark = pytest.mark.wide

WEIGHTS = ("int8", "int4")
WIDTH = 80  # two blocks and a half
STORED = {"int8": 1 + 4 / BLOCK, "int4": 0.5 + 4 / BLOCK}
"""Bytes of an element: its code, and its part of a float32 scale."""
PRODUCTS = {"int8": 2, "int4": 1}
"""Products that a linear becomes on the CPU, where 8 bits are two halves."""


def _ids(*shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(0))


def _with_merged_products(
    module: nn.Module, args: tuple[Tensor, ...], shapes: Any, weights: Any
) -> Optimized:
    """As quantized weights have them, so that the bytes of both compare."""
    return compile_model(
        Model(module, None, args, {}, shapes), Options(weights=weights, decodes=True)
    )


@functools.cache
def bert(weights: Any) -> Optimized:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_hidden_layers=LAYERS,
        intermediate_size=FEED_FORWARD,
        vocab_size=VOCABULARY,
        max_position_embeddings=POSITIONS,
    )
    module = BertModel(config, add_pooling_layer=False).eval()
    mask = torch.ones(3, 9, dtype=torch.int64)
    dims = {0: BATCH, 1: SEQ}
    shapes = {"input_ids": dims, "attention_mask": dims}
    return _with_merged_products(module, (_ids(3, 9), mask), shapes, weights)


class Tied(nn.Module):
    """A GPT-like model: its head has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        layer = nn.TransformerEncoderLayer(
            HIDDEN, HEADS, FEED_FORWARD, batch_first=True, norm_first=True, dropout=0.0
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        hidden: Tensor = self.layers(self.embedding(ids), mask=mask, is_causal=True)
        logits: Tensor = self.head(hidden)
        return logits


@functools.cache
def gpt(weights: Any) -> Optimized:
    torch.manual_seed(0)
    shapes = {"ids": {0: BATCH, 1: SEQ}}
    return _with_merged_products(Tied().eval(), (_ids(3, 9),), shapes, weights)


def linear(weights: Any, module: nn.Module, dtype: torch.dtype = torch.float32) -> Optimized:
    x = torch.randn(5, 7, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    return attngraph.optimize(
        module.eval(), (x,), dynamic_shapes=({0: Dim("batch", max=64)},), weights=weights
    )


def rounded(weight: Tensor, bits: int) -> Tensor:
    """The nearest multiples of each block's step, in float64: in 4 bits of the best of three."""
    blocks = nn.functional.pad(weight, (0, -weight.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    steps = [largest.abs() / (2 ** (bits - 1) - 1)]
    steps += [-largest / 8, -largest / 8.5] if bits == 4 else []
    made = []
    for step in steps:
        codes = (blocks / step).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        made.append(codes.double() * step.double())
    errors = torch.stack([(each - blocks).square().sum(-1) for each in made])
    taken = torch.stack(made).gather(0, errors.argmin(0)[None, ..., None].expand(1, *blocks.shape))
    return taken[0].flatten(1)[:, : weight.shape[1]]


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("build", [bert, gpt])
def test_kernels_are_within_the_budget_of_rounding(build: Any, weights: str) -> None:
    report = build(weights).report
    assert report.parity.passed
    assert report.parity.precision == "fp32"
    assert report.parity.reference == "float64"
    assert len({output.case for output in report.parity.outputs}) >= 3, "sizes"
    ops = Counter(node.op_type for node in build(weights).model.graph)
    assert report.quantised.linears == 4 * LAYERS
    assert ops["MatMulNBits"] == PRODUCTS[weights] * report.quantised.linears


@pytest.mark.parametrize("weights", WEIGHTS)
def test_codes_are_the_nearest_multiples_of_the_step(weights: Any) -> None:
    torch.manual_seed(1)
    module = nn.Linear(WIDTH, 48)
    compiled = linear(weights, module)
    x = torch.randn(4, 7, WIDTH)
    weight, bias = module.weight.detach(), module.bias.detach().double()
    stored = rounded(weight, BITS[weights])
    found = compiled(x)
    assert isinstance(found, Tensor)
    exact = x.double() @ stored.T + bias
    # Sums of WIDTH products and a bias, and Ŵ itself is rounded when it is computed.
    limit = (WIDTH + 2) * torch.finfo(torch.float32).eps / 2
    scale = x.double().abs() @ stored.abs().T + bias.abs()
    assert bool(((found.double() - exact).abs() <= limit * scale).all())
    off = float((stored - weight).norm() / weight.norm())
    assert compiled.report.quantised is not None
    assert compiled.report.quantised.weight_error == pytest.approx(off, rel=1e-3)


@pytest.mark.parametrize("bits", BITS.values())
def test_a_normal_weight_loses_what_the_formula_says(bits: int) -> None:
    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    codes, scales, error = packed(weight, bits)
    finer, cut = (
        (0.87, 1.0) if bits == 4 else (1.0, 0.0)
    )  # the best of three steps, two of which cut
    assert error == pytest.approx(finer * error_bound(bits) / 2, rel=0.05)
    off = quantized.dequantized(codes, scales, bits) - weight
    limit = (0.5001 + cut) * scales.abs()[..., None]
    assert bool((off.abs().unflatten(1, (-1, BLOCK)) <= limit).all())


@pytest.mark.parametrize("sign", [1, -1])
def test_codes_of_four_bits_give_back_what_they_can_hold(sign: int) -> None:
    steps = torch.rand(40, 1, generator=torch.Generator().manual_seed(0)) + 0.1
    for last in (-8, -7):  # codes from -8 or from -7 to 7
        codes = torch.randint(last, 8, (40, BLOCK), generator=torch.Generator().manual_seed(1))
        codes[:, 0] = last
        weight = sign * codes * steps
        *_, error = packed(weight, 4)
        assert error < 1e-6


@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_report_says_what_bits_cost_on_the_cpu(weights: Any) -> None:
    times = _measured()[FORMS[weights]]
    (note,) = (note for note in bert(weights).report.notes if "CPU provider" in note)
    assert note == cost_on_cpu(weights)
    for rows, ratio in times.items():
        assert f"{ratio:g} × the time of float32 for {rows} row" in note


def test_the_form_of_8_bits_is_the_fastest_that_computes_in_float32() -> None:
    """Accuracy 4 rounds activations to 8 bits, which no budget of rounding in float32 admits."""
    times = {
        name: by_rows["1"]
        for name, by_rows in _measured().items()
        if name.startswith("int8, block 32") and "accuracy 4" not in name
    }
    assert min(times, key=times.__getitem__) == FORMS["int8"]
    assert len(times) > 2


def test_halves_of_codes_are_made_while_they_are_written() -> None:
    held = linear("int8", nn.Linear(WIDTH, 48)).model.graph.initializers
    halves = [t.const_value for name, t in held.items() if name.endswith((".upper", ".lower"))]
    assert len(halves) == 2
    assert all(isinstance(half, onnx_ir.LazyTensor) for half in halves)


def test_the_cost_is_measured_against_the_original_model() -> None:
    torch.manual_seed(1)
    module = nn.Linear(WIDTH, 48)
    found = []
    for weights in WEIGHTS:
        x = torch.randn(5, 7, WIDTH, generator=torch.Generator().manual_seed(0))
        compiled = attngraph.optimize(module.eval(), (x,), weights=weights)
        with torch.no_grad():
            exact = nn.functional.linear(x.double(), *(p.double() for p in module.parameters()))
        output = compiled(x)
        assert isinstance(output, Tensor)
        assert compiled.report.quantised is not None
        (error,) = compiled.report.quantised.errors
        assert error.rms == pytest.approx(float((output - exact).norm() / exact.norm()), rel=1e-6)
        same = output.argmax(-1) == exact.argmax(-1)
        assert error.top1 == pytest.approx(float(same.double().mean()))
        found.append(error.rms)
    assert 0 < 8 * found[0] < found[1], "a step of int8 is 18 times smaller"


@pytest.mark.parametrize("weights", WEIGHTS)
def test_linears_shrink_and_embeddings_stay(weights: str) -> None:
    for build in (bert, gpt):
        plain, report = build(None).report, build(weights).report
        found = report.quantised
        assert found.bytes_after == found.bytes_before / 4 * STORED[weights]
        saved = found.bytes_before - found.bytes_after
        held = build(weights).model.graph.initializers
        zeros = sum(t.const_value.nbytes for name, t in held.items() if "zero_points" in name)
        assert report.weight_bytes - zeros == pytest.approx(plain.weight_bytes - saved, abs=64)
        assert zeros <= found.bytes_after / 64
    tied = gpt(weights).report.quantised
    assert (tied.linears, tied.total) == (4 * LAYERS, 4 * LAYERS + 1)
    assert tied.kept == [
        "1 of 9 linears stay as they are: their weights are small, or read by an embedding too."
    ]


def _spiky(rows: int) -> nn.Linear:
    """One element of each block sets a step that all others vanish under."""
    module = nn.Linear(WIDTH, rows)
    with torch.no_grad():
        module.weight.fill_(0.49 / 7)
        module.weight[:, ::BLOCK] = 1.0
    return module


def test_a_weight_that_loses_too_much_stays() -> None:
    compiled = linear("int4", nn.Sequential(_spiky(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 48)))
    found = compiled.report.quantised
    assert found is not None
    assert (found.linears, found.total) == (1, 2)
    assert any("in int4 it would be off by" in note for note in compiled.report.notes)
    with pytest.raises(UsageError, match=r"can't have int4 weights\. The weight weight stays"):
        linear("int4", _spiky(48))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_half_precision_models(weights: Any) -> None:
    torch.manual_seed(1)
    report = linear(weights, nn.Linear(WIDTH, 48).half(), torch.float16).report
    assert report.precision == "fp16"
    assert report.parity is not None
    assert report.parity.passed
    assert report.quantised is not None
    assert report.quantised.linears == 1


def test_decoding_is_held_against_the_stored_weights() -> None:
    module, args, shapes = cached_gpt.build()
    decoder = attngraph.optimize_decoder(module, args, dynamic_shapes=shapes, weights="int8")
    report = decoder.report
    assert report.parity is not None
    assert report.parity.passed
    assert "decoding" in {output.case for output in report.parity.outputs}
    assert report.quantised is not None
    assert report.quantised.errors[0].rms > 1e-5
    assert decoder.generate(args[0], 4).shape == (args[0].shape[0], args[0].shape[1] + 4)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_portable_file_has_the_same_codes(weights: Any, tmp_path: Path) -> None:
    """In standard operators alone; sessions round no activations, or parity would have failed."""
    torch.manual_seed(2)
    module, x = nn.Linear(WIDTH + 5, 48).eval(), torch.randn(3, 7, WIDTH + 5)
    made = [
        attngraph.optimize(module, (x,), weights=weights, portable=portable, opset=21)
        for portable in (False, True)
    ]
    own, portable = (compiled.report.quantised for compiled in made)
    assert (own.weight_error, own.linears) == (portable.weight_error, portable.linears)
    made[1].save(tmp_path / "out.onnx")
    model = onnx.load(tmp_path / "out.onnx")
    assert {each.domain for each in model.opset_import} == {""}
    kind = {"int4": onnx.TensorProto.INT4, "int8": onnx.TensorProto.INT8}[weights]
    (codes,) = (each for each in model.graph.initializer if each.data_type == kind)
    assert list(codes.dims) == [48, -(-(WIDTH + 5) // BLOCK) * BLOCK]
    (exact,) = ReferenceEvaluator(model).run(None, {"input": x.numpy()})
    torch.testing.assert_close(made[1](x), torch.from_numpy(exact), rtol=1e-5, atol=1e-5)


def test_codes_read_otherwise_are_out_of_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    real = quantized.dequantized
    monkeypatch.setattr(quantized, "dequantized", lambda c, s, *how: real(c, s, *how) + s[0, 0])
    with pytest.raises(ParityError, match="int4 kernels of Linear are out of their error budget"):
        linear("int4", nn.Linear(WIDTH, 48))


def test_what_can_t_be_quantised() -> None:
    x = (torch.randn(2, WIDTH),)
    with pytest.raises(UsageError, match="weights is 'int2'; it can be int8, int4"):
        attngraph.optimize(nn.Linear(WIDTH, 48), x, weights="int2")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="it has no linear"):
        attngraph.optimize(nn.LayerNorm(WIDTH).eval(), x, weights="int8")
    with pytest.raises(UsageError, match="none of its 1 linears has"):
        attngraph.optimize(nn.Linear(WIDTH, 4).eval(), x, weights="int8")
    with pytest.raises(UsageError, match="leave out --precision fp16"):
        attngraph.optimize(nn.Linear(WIDTH, 48).eval(), x, weights="int8", precision="fp16")


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out.onnx")
    command = ["optimize", "--factory", "examples.cached_gpt:build", "-o", out]
    page = str(tmp_path / "out.html")
    assert run([*command, "--weights", "int4", "--decode", "--report", page]) == 0
    told = capfd.readouterr().out
    assert "of its rms" in told
    assert "top-1 the same in" in told
    assert " in int4" in Path(page).read_text()
    assert run([*command, "--weights", "int8", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)["quantised"]
    assert found["weights"] == "int8"
    assert found["bytes_after"] < found["bytes_before"]
    assert found["errors"][0]["rms"] > 0
    assert run([*command, "--weights", "int3"]) == 2
    assert "int3" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("weights", "decode"),
    [
        ("int8", False),
        ("int4", True),
        pytest.param("int8", True, marks=pytest.mark.slow),
        pytest.param("int4", False, marks=pytest.mark.slow),
    ],
)
def test_a_written_file_is_verified_with_its_weights(
    weights: str, decode: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, model = str(tmp_path / "out.onnx"), ["--factory", "examples.cached_gpt:build"]
    options = ["--weights", weights, *(["--decode"] if decode else [])]
    assert run(["optimize", *model, "-o", out, *options, "--verify", "off"]) == 0
    capfd.readouterr()
    assert run(["verify", *model, out, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["passed"]
    assert found["quantised"]["weights"] == weights
    assert found["quantised"]["weight_error"] <= found["quantised"]["bound"]
    rms = {error["name"]: error["rms"] for error in found["quantised"]["errors"]}
    assert all(cost > 1e-5 for cost in rms.values())
    assert ("decoding" in {output["case"] for output in found["parity"]["outputs"]}) == decode

    assert run(["verify", *model, out]) == 0
    told = capfd.readouterr().out
    assert f"with its weights in {weights}" in told
    assert "of its rms" in told
    edited = onnx.load(out)
    codes = next(tensor for tensor in edited.graph.initializer if f".{weights}" in tensor.name)
    other = numpy_helper.to_array(codes).copy()
    other[0] ^= 1  # a step more or less in one row
    codes.CopyFrom(numpy_helper.from_array(other, codes.name))
    onnx.save(edited, out)
    assert run(["verify", *model, out]) == 8
    assert "are not those of examples.cached_gpt:build with its" in capfd.readouterr().out
