"""Activations in int8: rows that know nothing of each other, and kernels held against formulas."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.checks import rounded
from attngraph.cli import run
from attngraph.compiling import quantizing
from attngraph.dialect import quantized
from attngraph.errors import ParityError, ProviderError, UsageError
from attngraph.export.lowering.ops import quantized as lowering
from attngraph.export.precision.codes import packed_rows
from attngraph.export.precision.quantize import FINE, ROWS
from attngraph.export.runtime import saturation
from attngraph.export.runtime.session import Session
from attngraph.export.target import parse_target
from attngraph.frontend.model import Model
from attngraph.optimized import Optimized
from attngraph.verification.verify import verify_file

pytestmark = pytest.mark.wide

CPU = parse_target("cpu")
WEIGHTS = ("int8", "int4")
WIDTH = 80
EPS = torch.finfo(torch.float32).eps


class Layer(nn.Module):
    """Three projections of one input, an attention with padding, and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = self.norm(x)
        parts = (part(hidden) for part in (self.query, self.key, self.value))
        q, k, v = (part.unflatten(-1, (4, 20)).transpose(1, 2) for part in parts)
        attend = nn.functional.scaled_dot_product_attention
        x = x + attend(q, k, v, attn_mask=mask[:, None, None]).transpose(1, 2).flatten(2)
        result: Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return result


def inputs(batch: int = 3, seq: int = 7) -> tuple[Tensor, Tensor]:
    x = torch.randn(batch, seq, WIDTH, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(batch, seq, dtype=torch.bool)
    mask[1:, seq - 2 :] = False
    return x, mask


class Uneven(nn.Module):
    """The second of three linears is given one element that all others vanish beside."""

    outlier: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("outlier", torch.eye(WIDTH)[3] * 500)
        with torch.no_grad():
            self.second.weight[:, 3] = 0

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.third(self.second(self.first(x).maximum(self.outlier)).relu())
        return result


def uneven(**options: Any) -> Optimized:
    torch.manual_seed(0)
    return attngraph.optimize(
        Uneven().eval(), inputs()[:1], weights="int8", activations="int8", **options
    )


@functools.cache
def compiled(weights: Any, **options: Any) -> Optimized:
    torch.manual_seed(0)
    dims = {0: Dim("batch", max=16), 1: Dim("seq", max=32)}
    return attngraph.optimize(
        Layer().eval(),
        inputs(),
        dynamic_shapes=(dims, dims),
        weights=weights,
        activations="int8",
        **options,
    )


def one(weights: Any = "int8", **options: Any) -> Optimized:
    torch.manual_seed(0)
    return attngraph.optimize(
        nn.Linear(WIDTH, 48).eval(), inputs()[:1], weights=weights, activations="int8", **options
    )


@pytest.mark.parametrize("weights", WEIGHTS)
def test_an_outlier_that_weights_hide_costs_a_kernel_its_rounding(weights: Any) -> None:
    """Products with unsigned codes add up what the zero point takes away again."""
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 128).eval(), torch.randn(16, 32)
    with torch.no_grad():
        layer.weight[:, 3], x[:, 3] = 0.0, 60.0
    report = attngraph.optimize(layer, (x,), weights=weights, activations="int8").report
    assert report.parity is not None
    assert report.parity.passed


@pytest.mark.parametrize("weights", WEIGHTS)
def test_kernels_are_within_the_budget_of_rounding_part_by_part(weights: str) -> None:
    report = compiled(weights).report
    assert report.parity is not None
    assert report.parity.passed
    names = {output.name for output in report.parity.outputs}
    assert names == {"output_0", rounded.GIVEN, rounded.LINEARS, rounded.FUSED}
    for output in report.parity.outputs:
        if output.name != rounded.FUSED:
            assert output.budget < 1e-5, "of rounding in float32, not to int8"
    assert report.quantised is not None
    assert report.quantised.activations == "int8"
    ops = Counter(node.op_type for node in compiled(weights).model.graph)
    if weights == "int8":
        assert ops["MatMulIntegerToFloat"] == 5
        assert ops["QuantizeLinear"] == 3, "query, key and value share theirs"
        assert not ops["Transpose"], "codes are transposed while they are written"
    else:
        levels = {
            node.attributes["accuracy_level"].as_int()
            for node in compiled(weights).model.graph
            if node.op_type == "MatMulNBits"
        }
        assert levels == {4}


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("extreme", [1e4, 0.0, torch.nan, torch.inf])
def test_a_row_changes_no_other(weights: str, extreme: float) -> None:
    """Neither a neighbour in the batch nor what stands in padding."""
    x, mask = inputs()
    plain = compiled(weights)(x, mask)
    x[0] = extreme
    changed = compiled(weights)(x, mask)
    assert torch.equal(changed[1:], plain[1:])
    if extreme == extreme and abs(extreme) < torch.inf:
        x[1, 5:] = extreme
        padded = compiled(weights)(x, mask)
        assert torch.equal(padded[1, :5], plain[1, :5])
        assert torch.equal(padded[2], plain[2])


def test_codes_are_the_nearest_multiples_of_the_steps() -> None:
    model = one(verify="off")  # else the sample chooses them
    (x,) = inputs()[:1]
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, 48)
    weight, bias = layer.weight.detach(), layer.bias.detach().double()
    held, steps, _ = packed_rows(weight, narrow=saturation.saturates())
    stored = held.double() * steps.double().unsqueeze(-1)
    wide = x.double()
    step = wide.abs().amax(-1, keepdim=True) / 127
    codes = wide / step
    exact = (codes.round() * step) @ stored.T + bias
    size = wide.abs() @ stored.abs().T + bias.abs()
    near = ((codes - codes.floor() - 0.5).abs() < 2**-12) * step
    limit = 16 * EPS * size + near.double() @ stored.abs().T
    assert bool(((model(x).double() - exact).abs() <= limit).all())


@pytest.mark.parametrize("weights", WEIGHTS)
def test_what_it_costs_is_told_and_small(weights: str) -> None:
    x, mask = inputs()
    torch.manual_seed(0)
    layer = Layer().eval()
    with torch.no_grad():
        exact = layer.double()(x.double(), mask)
    report = compiled(weights).report
    assert report.quantised is not None
    (error,) = report.quantised.errors
    found = (compiled(weights)(x, mask).double() - exact).norm() / exact.norm()
    assert 0 < error.rms < {"int8": 0.01, "int4": 0.1}[weights]
    assert float(found) == pytest.approx(error.rms, rel=0.3)
    assert len(report.quantised.forms) == report.quantised.linears
    assert {linear.form for linear in report.quantised.forms} == {
        {"int8": "int8, one scale a row", "int4": "4 bits, blocks of 32"}[weights]
    }


def test_a_weight_that_one_scale_a_row_costs_too_much_has_blocks() -> None:
    layer = nn.Linear(WIDTH, 48)
    with torch.no_grad():
        layer.weight[:, 0] = 40.0  # the other elements vanish under its step
    model = attngraph.optimize(
        layer.eval(), inputs()[:1], weights="int8", activations="int8", verify="off"
    )
    assert "MatMulNBits" in {node.op_type for node in model.model.graph}
    layer = nn.Linear(WIDTH, 48)
    with torch.no_grad():
        layer.weight[:, ::32] *= 400
    assert packed_rows(layer.weight.detach(), narrow=False)[2] < 1


Wrong = Callable[[pytest.MonkeyPatch], None]


def _steps_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    real = quantized.row_steps
    for module in (quantized, rounded):
        monkeypatch.setattr(
            module,
            "row_steps",
            lambda x, **how: (real(x, **how)[0] / 1.01, real(x, **how)[1] * 1.01),
        )


def _half_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that cuts off where it should round."""
    real = lowering._peaks
    monkeypatch.setattr(
        lowering,
        "_peaks",
        lambda ctx, x, **how: ctx.op(
            "Mul", real(ctx, x, **how), ctx.constant(1.002, torch.float32)
        ),
    )


@pytest.mark.parametrize("wrong", [_steps_too_large, _half_a_step])
def test_another_formula_is_out_of_budget(wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch)
    with pytest.raises(ParityError, match="int8 kernels of Linear are out of their error budget"):
        one()


@pytest.mark.parametrize("seed", range(5))
def test_no_two_neighbours_leave_16_bits_where_a_kernel_adds_them_there(seed: int) -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(seed)).exp()
    weight = weight * torch.randn(96, generator=torch.Generator().manual_seed(seed)).sign()
    codes, _, error = packed_rows(weight, narrow=True)
    wide = codes.int()
    sums = torch.stack([wide.relu()[:, 1:] + wide.relu()[:, :-1]])
    assert int(sums.max()) * 255 < 2**15
    free = packed_rows(weight, narrow=False)
    assert free[2] <= error <= 2 * free[2]
    assert int(free[0].abs().max()) == 127


def test_a_file_of_wide_codes_is_refused_where_products_saturate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "wide.onnx"
    for module in (quantizing, saturation):
        monkeypatch.setattr(module, "saturates", lambda: False)
    one(verify="off").save(path)  # its products may be wrong here
    said = json.loads(Session.open(path, CPU).metadata[saturation.ROUNDING_KEY])
    assert not said["narrow"]
    monkeypatch.setattr(saturation, "saturates", lambda: True)
    with pytest.raises(ProviderError, match="would overflow on this CPU"):
        Session.open(path, CPU)
    monkeypatch.setattr(quantizing, "saturates", lambda: True)
    one(verify="off").save(path)
    assert Session.open(path, CPU)


def test_saturation_is_asked_of_the_kernel() -> None:
    assert saturation.saturates.__wrapped__() is saturation.saturates()


def test_models_in_half_precision_are_refused() -> None:
    with pytest.raises(UsageError, match="is for models in float32, and the weights of"):
        attngraph.optimize(
            nn.Linear(WIDTH, 48).half().eval(),
            (inputs()[0].half(),),
            weights="int8",
            activations="int8",
        )


@pytest.mark.parametrize(
    "options",
    [
        ["--weights", "int8"],
        pytest.param(
            ["--weights", "int4", "--cache", "static", "--max-length", "16"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_written_decoder_is_verified_with_its_codes(
    options: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, model = str(tmp_path / "out.onnx"), ["--factory", "examples.cached_gpt:build"]
    asked = [*model, "-o", out, "--decode", *options, "--activations", "int8"]
    assert run(["optimize", *asked, "--verify", "off"]) == 0
    capfd.readouterr()
    edited = onnx.load(out)
    assert run(["verify", *model, out, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["quantised"]["activations"] == "int8"
    cases = {output["case"]: output for output in found["parity"]["outputs"]}
    assert cases["decoding"]["error"] < cases["decoding"]["budget"] < 0.05
    ends = (f".{options[1]}", f".{options[1]}.T")
    codes = next(t for t in edited.graph.initializer if t.name.endswith(ends))
    other = numpy_helper.to_array(codes).copy()
    other[0] ^= 1
    codes.CopyFrom(numpy_helper.from_array(other, codes.name))
    onnx.save(edited, out)
    assert run(["verify", *model, out]) == 8
    told = capfd.readouterr().out
    assert "activations in int8" in told
    assert "are not those of examples.cached_gpt:build with its" in told


def test_the_table_says_which_linear_costs_what() -> None:
    found = uneven().report.quantised
    assert found is not None
    shares = {linear.weight: linear.share or 0.0 for linear in found.forms}
    assert shares["second.weight"] > 0.9
    assert sum(shares.values()) == pytest.approx(1)
    assert all(share > 0 for share in shares.values())


@functools.cache
def within(budget: str) -> Optimized:
    return uneven(budget=budget)


def test_a_budget_gives_more_bits_to_the_linears_that_cost_the_most() -> None:
    free, bound, tight = (
        model.report.quantised for model in (uneven(), within("2%"), within("0.6%"))
    )
    assert free is not None
    assert bound is not None
    assert tight is not None
    assert free.errors[0].rms > 0.1
    assert bound.errors[0].rms < 0.02
    forms = {linear.weight: linear.form for linear in bound.forms}
    assert forms["second.weight"] == FINE
    assert forms["first.weight"] == forms["third.weight"] == ROWS
    assert tight.errors[0].rms < 0.006
    forms = {linear.weight: linear.form for linear in tight.forms}
    assert set(forms.values()) == {ROWS, FINE, "float32"}
    assert (tight.linears, tight.total) == (2, 3)
    with pytest.raises(UsageError, match=r"within 0\.001% of the output's rms: allow more"):
        uneven(budget="0.001%")


@pytest.mark.parametrize("budget", ["2%", "0.6%"])
def test_a_file_that_was_made_for_a_budget_is_verified(budget: str, tmp_path: Path) -> None:
    path = tmp_path / "kept.onnx"
    model = within(budget)
    model.save(path)
    torch.manual_seed(0)
    original = Model(Uneven().eval(), None, inputs()[:1], {}, None)
    found = verify_file(original, path, Session.open(path, CPU))
    assert found.passed
    assert found.quantised is not None
    assert model.report.quantised is not None
    assert found.quantised.linears == model.report.quantised.linears


@pytest.mark.parametrize("largest", [1.0, 500.0])
def test_inputs_of_16_bits_are_off_by_half_a_step_of_the_second_code(largest: float) -> None:
    x = inputs()[0].double()
    x[..., 3] = largest
    codes = packed_rows(torch.randn(48, WIDTH), narrow=False)[0]
    steps = torch.ones(48, dtype=torch.float64)
    off = quantized.int8_linear(x, codes, steps, fine=True) - x @ codes.double().T
    half = x.abs().amax(-1, keepdim=True) / (127 * 254 * 2)
    assert float(off.abs().max()) > 0
    assert bool((off.abs() <= half * codes.double().abs().sum(-1)).all())


def test_the_kernels_of_a_second_code_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "FINER", 200)
    with pytest.raises(ParityError, match="int8 kernels of Uneven are out of their error budget"):
        uneven(budget="2%")


class Outliers(nn.Module):
    """A norm whose scale makes three features large, which only linears read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first, self.second = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        with torch.no_grad():
            self.norm.weight[::30] = 60.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        result: Tensor = self.second(hidden) * self.first(hidden).sigmoid()
        return result


def with_outliers(**options: Any) -> Optimized:
    torch.manual_seed(0)
    return attngraph.optimize(
        Outliers().eval(), inputs()[:1], weights="int8", activations="int8", **options
    )


def test_outliers_move_into_weights_and_the_file_is_verified(tmp_path: Path) -> None:
    path = tmp_path / "moved.onnx"
    model = with_outliers()
    model.save(path)
    quantised = model.report.quantised
    assert quantised is not None
    assert quantised.moved is not None
    assert quantised.moved.after < 0.6 * quantised.moved.before
    assert quantised.errors[0].rms < 1.1 * quantised.moved.after
    torch.manual_seed(0)
    original = Model(Outliers().eval(), None, inputs()[:1], {}, None)
    assert verify_file(original, path, Session.open(path, CPU)).passed


def test_outliers_are_looked_for_in_data_of_the_users(tmp_path: Path) -> None:
    x = inputs()[0]
    np.savez(tmp_path / "data.npz", x=(x * 3).numpy())
    np.savez(tmp_path / "other.npz", y=x.numpy())
    np.savez(tmp_path / "narrow.npz", x=x[..., :8].numpy())
    found = with_outliers(calibrate=tmp_path / "data.npz", verify="off").report.quantised
    assert found is not None
    assert found.moved is not None
    unverified = with_outliers(verify="off").report.quantised
    assert unverified is not None
    assert unverified.moved is None
    with pytest.raises(UsageError, match="has no x; it has y, and Outliers takes x"):
        with_outliers(calibrate=tmp_path / "other.npz")
    with pytest.raises(UsageError, match="can't be run on --calibrate"):
        with_outliers(calibrate=tmp_path / "narrow.npz")
