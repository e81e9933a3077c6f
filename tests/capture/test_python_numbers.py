"""Numbers that Python reads of a tensor as the model runs stay what the tensor holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

from attngraph.compiling.compiler import optimize
from attngraph.errors import CaptureError
from attngraph.frontend.capture import capture
from attngraph.ir import interpret
from tests.variants import some_wide

Formula = Callable[[Tensor, Tensor], Tensor]
SHAPES = ({0: Dim.AUTO, 1: Dim.AUTO}, None)


class Of(nn.Module):
    def __init__(self, formula: Formula) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.formula(x, t)


FORMULAS: dict[str, Formula] = {
    "factor": lambda x, t: x * float(t),
    "arithmetic": lambda x, t: x * (1 / float(t) + float(t) ** 2 - 3 * -t.item()),
    "of_a_size": lambda x, t: x * (float(t) / x.shape[1]),
    "of_a_sum": lambda x, t: x * (float(t) + float(x.sum())),
    "whole": lambda x, t: x * (int(t * 3) + 1) + (x > 0).long() * math.floor(t.item()),
    "rounded": lambda x, t: x * round(t.item() * 3) + math.ceil(float(t)) - float(t) % 2,
    "extreme": lambda x, t: x / max(t.item(), 1e-3) + min(float(t), 0.5),
    "bound": lambda x, t: x.clamp(min=float(t)) + x.clamp(-abs(float(t)), 1.5),
    "fill": lambda x, t: x.masked_fill(x > 0, float(t)) + torch.full_like(x, float(t)),
    "chosen": lambda x, t: torch.where(x > float(t), x, float(t)) + torch.tensor(float(t)),
    "alpha": lambda x, t: torch.add(x, x, alpha=float(t)),
    "in_place": lambda x, t: x.clone().mul_(float(t)).add_(x, alpha=float(t)),
    "power": lambda x, t: x.abs() ** float(t) + float(t * t + 1) ** x,
    "first": lambda x, t: float(t) - x + float(t) / (x.abs() + 1),
    "scale": lambda x, t: F.scaled_dot_product_attention(x, x, x, scale=float(t)),
    "integers": lambda x, t: x.long() * float(t) + (x.round() == round(float(t))),
    "of_an_integer": lambda x, t: x * float(t.long()) + float((t * 10).long()) / 4,
}


@pytest.mark.parametrize("name", some_wide(FORMULAS))
def test_a_number_is_what_the_tensor_holds(name: str) -> None:
    model = Of(FORMULAS[name])
    captured = capture(model, (torch.randn(2, 5, 8), torch.tensor(0.3)), dynamic_shapes=SHAPES)
    for size, number in ((4, -1.7), (9, 2.6), (3, 1.0)):
        given = (torch.randn(3, size, 8), torch.tensor(number))
        expected = model(*given)
        (found,) = interpret(captured.graph, given)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_a_temperature_that_python_reads_is_folded_into_a_fused_attention() -> None:
    def attend(x: Tensor, t: Tensor) -> Tensor:
        return (x @ x.mT / max(float(t), 0.1)).softmax(-1) @ x

    model = Of(attend)
    optimized = optimize(model, (torch.randn(2, 5, 8), torch.tensor(0.3)), dynamic_shapes=SHAPES)
    (site,) = optimized.report.sites
    assert site.status == "fused"
    for number in (-2.0, 0.05, 3.0):
        given = (torch.randn(1, 7, 8), torch.tensor(number))
        torch.testing.assert_close(optimized(*given), model(*given))


@pytest.mark.parametrize(
    ("formula", "sentence"),
    [
        (lambda x, t: x * (2.0 if float(t) > 0 else 1.0), "decides by a data-dependent condition"),
        (lambda x, t: F.leaky_relu(x, float(t)), "aten.leaky_relu .* reads at run time; keep it"),
        (lambda x, t: x[:, : int(t * 9)], "data-dependent|reads at run time"),
        (
            lambda x, t: x.topk(int(t * 9)).values,
            "aten.topk .* reads at run time; keep it a tensor, or",
        ),
    ],
    ids=["branch", "attribute", "size", "topk"],
)
def test_a_number_that_must_be_known_is_refused(formula: Formula, sentence: str) -> None:
    given = (torch.randn(2, 5, 8), torch.tensor(0.3))
    with pytest.raises(CaptureError, match=sentence):
        capture(Of(formula), given, dynamic_shapes=SHAPES)


def test_what_makes_a_number_of_a_size_is_told() -> None:
    """As Longformer does, whose chunks overlap; the condition is torch's, and no line decides."""

    def chunked(x: Tensor, t: Tensor) -> Tensor:
        half = torch.div(x.shape[1], 2, rounding_mode="trunc")
        parts = x.as_strided((x.shape[0], 2 * half - 1, 4), (8 * x.shape[1], 8, 1))
        return torch.einsum("bcx,bcy->bcxy", parts, parts) + t

    given = (torch.randn(2, 6, 8), torch.tensor(0.3))
    with pytest.raises(CaptureError, match=r"size is made of a number .* integers, as in n // 2"):
        capture(Of(chunked), given, dynamic_shapes=SHAPES)


@pytest.mark.parametrize("folder", ["site-packages", "home"])
def test_a_package_is_not_to_be_changed(folder: str, tmp_path: Path) -> None:
    """A subclass of its model is what there is to write."""
    file = tmp_path / folder / "branching.py"
    file.parent.mkdir()
    file.write_text(
        "import torch\n\nclass Branch(torch.nn.Module):\n    def forward(self, x, t):\n"
        "        return x.exp() if t.sum() > 0 else x.tanh()\n"
    )
    spec = spec_from_file_location("branching", file)
    assert spec is not None
    assert spec.loader is not None
    library = module_from_spec(spec)
    spec.loader.exec_module(library)
    given = (torch.randn(2, 5, 8), torch.tensor(0.3))
    with pytest.raises(CaptureError, match=r"torch.where") as told:
        capture(library.Branch(), given, dynamic_shapes=SHAPES)
    assert ("A subclass whose method" in str(told.value)) is (folder == "site-packages")
