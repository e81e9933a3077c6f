"""The error budget: what must pass, and the mistakes it must not let through."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from attngraph.errors import ParityError
from attngraph.export.formats import Precision
from attngraph.export.parity.budget import Parity, compare, merge
from attngraph.export.parity.reference import Reference, ReferenceOutputs
from tests.export.parity.residual_attention import Attention, run, sample

DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}

PRECISIONS = pytest.mark.parametrize("precision", DTYPES)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def setting(
    precision: Precision, fill: float = -math.inf
) -> tuple[Attention, tuple[torch.Tensor, torch.Tensor], ReferenceOutputs]:
    module = Attention(fill).to(DTYPES[precision])
    x, mask = sample()
    args = (x.to(DTYPES[precision]), mask)
    return module, args, Reference(module, precision=precision)(args)


@PRECISIONS
def test_eager_passes_against_its_own_error(precision: Precision) -> None:
    module, args, reference = setting(precision)
    parity = compare(reference, [run(module, *args)], precision)
    assert parity.passed
    assert parity.error == parity.reference_error > 0
    assert parity.reference == "float64"


def test_reordered_fp32_sums_pass() -> None:
    module, args, reference = setting("fp32")
    for _ in range(10):
        module.order = torch.randperm(32)
        output = run(module, *args)
        assert not torch.equal(output, reference.eager[0])
        assert compare(reference, [output], "fp32").passed


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_an_engine_that_computes_halves_in_fp32_passes(precision: Precision) -> None:
    module, (x, mask), reference = setting(precision)
    output = run(module.float(), x.float(), mask).to(DTYPES[precision])
    assert not torch.equal(output, reference.eager[0])
    assert compare(reference, [output], precision).passed


@PRECISIONS
def test_a_dropped_mask_fails(precision: Precision) -> None:
    module, (x, mask), reference = setting(precision)
    output = run(module, x, torch.ones_like(mask))
    assert not compare(reference, [output], precision).passed


@PRECISIONS
def test_a_single_wrong_element_fails_by_the_max_norm(precision: Precision) -> None:
    module, args, reference = setting(precision)
    output = run(module, *args)
    output[2, 3, 5] += 0.5
    worst = compare(reference, [output], precision).worst
    assert not worst.passed
    assert worst.norm == "max"


def test_one_wrong_element_in_a_million_fails() -> None:
    exact = torch.randn(1000, 1000, dtype=torch.float64)
    eager = exact.float()
    reference = ReferenceOutputs(("y",), (eager,), (exact,))
    output = eager.clone()
    output[500, 500] += 1e-4
    assert compare(reference, [eager], "fp32").passed
    assert not compare(reference, [output], "fp32").passed


def test_a_drift_under_the_largest_rounding_error_fails_by_the_rms_norm() -> None:
    exact = torch.randn(400, 100, dtype=torch.float64)
    noise = 1e-5 * torch.randn_like(exact)
    noise[0, 0] = 1e-4
    reference = ReferenceOutputs(("y",), ((exact + noise).float(),), (exact,))
    worst = compare(reference, [(exact + 8e-5).float()], "fp32").worst
    assert not worst.passed
    assert worst.norm == "rms"


def test_a_drift_of_a_thousandth_fails_in_fp32() -> None:
    module, args, reference = setting("fp32")
    assert not compare(reference, [run(module, *args) * 1.001], "fp32").passed
    assert not compare(reference, [run(module, *args) + 1e-3], "fp32").passed


def test_small_defects_fail_though_eager_is_sampled() -> None:
    module, (x, mask), reference = setting("fp32")
    assert not compare(reference, [run(module, x, mask) * (1 + 1e-4)], "fp32").passed
    unmasked = mask.clone()
    unmasked[1, 6] = True
    assert not compare(reference, [run(module, x, unmasked)], "fp32").passed
    module.epsilon = 1e-6
    wrong = run(module, x, mask)
    module.epsilon = 1e-5
    assert not compare(reference, [wrong], "fp32").passed


class OneDirection(torch.nn.Module):
    """A vector times one sum, of which most cancels."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(64))
        self.order: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        terms = torch.cat((x * self.weight, -0.97 * x * self.weight))[self.order]
        total = torch.zeros(())
        for term in terms.unbind():
            total = total + term
        return total * self.weight


@pytest.mark.wide
def test_a_model_of_one_ill_conditioned_direction_gets_the_budget_of_its_noise() -> None:
    lucky = 0  # runs of eager with an error too small for a budget
    for seed in range(40):
        torch.manual_seed(seed)
        module, x = OneDirection(), torch.randn(64)
        module.order = torch.randperm(128)
        reference = Reference(module, precision="fp32")((x,))
        module.order = torch.randperm(128)
        output = run(module, x)
        alone = replace(reference, sample=tuple)
        lucky += not compare(alone, [output], "fp32").passed
        assert compare(reference, [output], "fp32").passed, seed
        assert not compare(reference, [output * (1 + 1e-3)], "fp32").passed, seed
    assert lucky


def test_eager_is_sampled_only_where_its_one_run_doesnt_do() -> None:
    module, args, reference = setting("fp32")

    def sample() -> tuple[tuple[torch.Tensor, ...], ...]:
        raise AssertionError("sampled without need")

    assert compare(replace(reference, sample=sample), [run(module, *args)], "fp32").passed
    first, second = reference.sample(), reference.sample()
    assert all(torch.equal(a, b) for (a,), (b,) in zip(first, second, strict=True))
    assert len({str(tensor.flatten()[:50].tolist()) for (tensor,) in first}) == len(first)


def test_a_sample_that_takes_another_branch_widens_nothing() -> None:
    class Branches(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.where(x[:, :1] > 0.3, 2 * x, x).sub(3)

    x = torch.rand(8, 40) + 0.1
    x[:, 0] = torch.tensor(0.3)
    module = Branches()
    reference = Reference(module, precision="fp32")((x,))
    assert any(not torch.allclose(y, reference.eager[0]) for (y,) in reference.sample())
    wrong = reference.eager[0].clone()
    wrong[3] *= 2
    assert not compare(reference, [wrong], "fp32").passed


def test_finite_fills_in_an_output_dont_hide_the_rest() -> None:
    exact = torch.randn(8, 64, dtype=torch.float64)
    exact[:, 50:] -= 1e9
    eager = exact.float()
    reference = ReferenceOutputs(("y",), (eager,), (exact,))
    assert compare(reference, [eager], "fp32").passed
    output = eager.clone()
    output[:, :50] += 1e-3
    assert not compare(reference, [output], "fp32").passed
    output = eager.clone()
    output[0, 60] *= 1.01
    assert not compare(reference, [output], "fp32").passed


def test_nan_infinity_and_the_dtypes_minimum_stand_where_eager_has_them() -> None:
    exact = torch.randn(4, 40, dtype=torch.float64)
    eager = exact.float()
    for column, value in enumerate((math.nan, math.inf, -math.inf)):
        exact[0, column] = eager[0, column] = value
    exact[0, 3] = torch.finfo(torch.float64).min
    eager[0, 3] = torch.finfo(torch.float32).min
    reference = ReferenceOutputs(("y",), (eager,), (exact,))
    assert compare(reference, [eager], "fp32").passed
    for column in range(4):
        output = eager.clone()
        output[0, column] = 0.0
        assert not compare(reference, [output], "fp32").passed
    for value in (math.nan, math.inf):
        output = eager.clone()
        output[2, 7] = value
        assert not compare(reference, [output], "fp32").passed
    output = eager.clone()
    output[0, 2] = math.inf
    assert not compare(reference, [output], "fp32").passed


def test_where_eager_overflows_and_float64_doesnt_either_value_is_right() -> None:
    exact = torch.full((2, 40), 70000.0, dtype=torch.float64)
    exact[1] = 1000.0
    eager = exact.half()
    reference = ReferenceOutputs(("y",), (eager,), (exact,))
    assert compare(reference, [eager], "fp16").passed
    finite = eager.clone()
    finite[0] = 65504.0
    assert not compare(reference, [finite], "fp16").passed


def test_a_small_outputs_lucky_reference_doesnt_fail_it() -> None:
    """A scalar whose eager value is exact by accident is granted the noise of its neighbours."""
    exact = torch.randn(64, 64, dtype=torch.float64)
    eager = (exact * (1 + 1e-6 * torch.randn_like(exact))).float()
    scalar = torch.tensor(1.0, dtype=torch.float64)
    reference = ReferenceOutputs(("y", "loss"), (eager, scalar.float()), (exact, scalar))
    assert compare(reference, [eager, torch.tensor(1.000001)], "fp32").passed
    assert not compare(reference, [eager, torch.tensor(1.0001)], "fp32").passed


def test_an_exact_module_may_be_off_by_the_last_place_only() -> None:
    exact = torch.randn(64, 64).double()
    reference = ReferenceOutputs(("y",), (exact.float(),), (exact,))
    last_place = exact.float() * (1 + 2**-23)
    assert compare(reference, [last_place], "fp32").passed
    assert not compare(reference, [exact.float() * (1 + 1e-5)], "fp32").passed


def test_integers_and_bools_are_exact() -> None:
    top = torch.arange(100)
    flags = top > 50
    reference = ReferenceOutputs(("top", "flags"), (top, flags), (top, flags))
    assert compare(reference, [top, flags], "bf16").passed
    wrong = top.clone()
    wrong[7] += 1
    worst = compare(reference, [wrong, flags], "bf16").worst
    assert (worst.name, worst.error, worst.norm, worst.passed) == ("top", 0.01, "mismatch", False)
    assert not compare(reference, [top, ~flags], "bf16").passed


def test_shape_dtype_and_number_of_outputs_count() -> None:
    y = torch.randn(4, 5)
    reference = ReferenceOutputs(("y",), (y,), (y.double(),))
    for wrong in (y[:3], y.double(), y[None]):
        worst = compare(reference, [wrong], "fp32").worst
        assert not worst.passed
        assert "where the module returns" in worst.note
    with pytest.raises(ParityError, match=r"2 outputs and the module 1 \(y\)"):
        compare(reference, [y, y], "fp32")


def test_empty_and_zero_outputs_pass() -> None:
    for y in (torch.empty(0, 4), torch.zeros(3, 40), torch.tensor(0.0)):
        reference = ReferenceOutputs(("y",), (y,), (y.double(),))
        assert compare(reference, [y], "fp32").passed
    assert not compare(reference, [torch.tensor(1e-3)], "fp32").passed


def good_and_bad() -> tuple[Parity, Parity]:
    module, args, reference = setting("fp32")
    output = run(module, *args)
    broken = output.clone()
    broken[0, 0, 0] = math.nan
    return compare(reference, [output], "fp32"), compare(reference, [broken], "fp32")


def test_merged_cases_show_the_worst_with_its_label() -> None:
    good, bad = good_and_bad()
    merged = merge({"seq=5": good, "seq=9": bad})
    assert not merged.passed
    assert merged.worst.case == "seq=9"
    assert "FAILED" in str(merged)
    assert "at seq=9" in str(merged)
    assert "\n" not in str(merged)
    assert merge({"seq=5": good}).passed
    with pytest.raises(ParityError):
        merge({})


def test_to_dict_is_strict_json() -> None:
    for parity in good_and_bad():
        data = json.loads(json.dumps(parity.to_dict(), allow_nan=False))
        assert data["passed"] is parity.passed
        assert data["outputs"][0]["shape"] == [4, 10, 32]


class _Guarded(torch.nn.Module):
    """A bias of the caller's that hides keys: float16 overflows it, and has 0 in a hidden row."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.nan_to_num((x @ x.mT + bias).softmax(-1)) @ x


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_rows_that_a_half_computes_otherwise_may_be_either(precision: Precision) -> None:
    x, bias = torch.randn(2, 5, 8), torch.zeros(2, 5, 5)
    bias[1, 2] = torch.finfo(torch.float32).min
    reference = Reference(_Guarded(), precision=precision, converted=True)((x, bias))
    eager, single = reference.eager[0], _Guarded()(x, bias)
    assert not eager[1, 2].any()
    assert compare(reference, [single.to(eager.dtype)], precision).passed
    assert compare(reference, [eager], precision).passed
    for other in (single / 2, torch.where(bias[..., :1] < 0, single / 2, single), single.flip(1)):
        assert not compare(reference, [other.to(eager.dtype)], precision).passed
    without = replace(reference, single=())
    assert not compare(without, [single.to(eager.dtype)], precision).passed
