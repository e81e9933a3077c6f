"""The suite's models are fit to test with: masks matter, and dims can be told apart."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.models import CASES, HEADS, KEPT, TRACED, Args, Case

MODELS = (*CASES, *KEPT)
MASKED = [case for case in MODELS if not case.name.startswith("vit")]

each_case = pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """As capture does: no gradients, and torch.nn's fused fast path off."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.no_grad():
        yield
    torch.backends.mha.set_fastpath_enabled(enabled)


@pytest.mark.parametrize("case", MASKED, ids=lambda case: case.name)
def test_dropping_a_mask_exceeds_the_error_budget_by_far(case: Case) -> None:
    built = case.build()
    outputs = _run(built.module, built.args)
    budget = 4 * _rounding(built.module, built.args, outputs)
    assert built.unmasked
    for name, (module, args) in built.unmasked.items():
        change = _distance(_run(module, args), outputs)
        assert change > 10_000 * budget, f"without its {name} mask the output moves by {change:.1e}"


@each_case
def test_sizes_tell_the_dims_apart(case: Case) -> None:
    built = case.build()
    names = {dim.__name__ for axes in built.dynamic_shapes for dim in axes.values()}
    traced = [TRACED[name] for name in names]
    assert min(traced) >= 2
    assert len({*traced, HEADS, HEADS // 2}) == len(traced) + 2
    assert len(built.sizes) == 2
    assert all(set(sizes) == names for sizes in built.sizes)
    assert tuple(inspect.signature(built.module.forward).parameters)[: len(built.args)] == (
        built.input_names
    )


@each_case
def test_building_twice_gives_the_same_model(case: Case) -> None:
    first, second = case.build(), case.build()
    for a, b in zip(_run(first.module, first.args), _run(second.module, second.args), strict=True):
        assert torch.equal(a, b)


def _run(module: nn.Module, args: Args) -> Args:
    outputs = module(*args)
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def _distance(actual: Args, expected: Args) -> float:
    """Largest relative distance over the outputs, in the norm of what is expected."""
    return max(
        float((a.double() - b.double()).norm() / b.double().norm())
        for a, b in zip(actual, expected, strict=True)
    )


def _rounding(module: nn.Module, args: Args, outputs: Args) -> float:
    """Relative distance of the float32 `outputs` from float64.

    Where float64 is not finite, float32's own tolerance: eager Llama takes its softmax in float32,
    where float64's lowest fill is minus infinity and a fully masked row NaN. So too where there is
    no float64: a grouped product of experts takes none.
    """
    double = tuple(arg.double() if arg.is_floating_point() else arg for arg in args)
    try:
        reference = _run(copy.deepcopy(module).double(), double)
    except RuntimeError as error:
        if "got Double" not in str(error):
            raise
        return 8 * torch.finfo(torch.float32).eps
    if not all(output.isfinite().all() for output in reference):
        return 8 * torch.finfo(torch.float32).eps
    return _distance(outputs, reference)
