"""Codes chosen on data: a layer never loses more of its output on them than by nearest rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn
from torch.export import Dim

import attngraph
from attngraph.compiling import quantizing
from attngraph.dialect.quantized import dequantized
from attngraph.export.precision.calibrated import improved
from attngraph.export.precision.codes import error_bound
from attngraph.export.precision.quantize import BITS, ROWS, Rounding, Stored, stored
from attngraph.export.runtime.session import Session
from attngraph.export.target import parse_target
from attngraph.frontend.model import Model
from attngraph.verification.verify import verify_file

ROUNDINGS = [
    ("int8", None),
    ("int8", Rounding("int8", narrow=False)),
    ("int8", Rounding("int8", narrow=True)),
    ("int4", None),
]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(width: int = 80, rows: int = 300) -> torch.Tensor:
    """Rows that lie near a few directions, as what a layer is given does."""
    return drawn(rows, 12) @ drawn(12, width, seed=1) + 0.1 * drawn(rows, width, seed=2)


def weight_of(found: Stored, bits: int, width: int) -> torch.Tensor:
    if found.form == ROWS:
        return found.codes.double() * found.scales.double()[:, None]
    return dequantized(found.codes, found.scales.double(), bits)[:, :width]


def lost(found: Stored, bits: int, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """By row of the weight, the norm of what its products are off."""
    off = weight_of(found, bits, weight.shape[1]) - weight.double()
    return (x.double() @ off.T).norm(dim=0)


@pytest.mark.parametrize(("weights", "rounding"), ROUNDINGS)
@pytest.mark.parametrize("width", [80, 200])
def test_no_row_loses_more_and_most_lose_half(weights: Any, rounding: Any, width: int) -> None:
    weight, x, bits = drawn(40, width, seed=3), inputs(width), BITS[weights]
    weight[3] = 0.0
    plain = stored(weight, bits, rounding)
    found = improved(plain, weight, bits, x.T @ x, rounding)
    before, after = lost(plain, bits, weight, x), lost(found, bits, weight, x)
    assert bool((after <= before).all())
    # Neighbours that must not leave 16 bits are often in the way.
    narrow = rounding is not None and rounding.narrow
    assert float(after.norm() / before.norm()) < (0.9 if narrow else 0.5)
    assert torch.equal(found.scales, plain.scales)
    off = weight_of(found, bits, width) - weight.double()
    limit = error_bound(bits, width if found.form == ROWS else 32)
    norms = weight.double().norm(dim=1)
    assert bool((off.norm(dim=1) <= limit * norms * 1.0001).all())
    assert found.error == pytest.approx(float(off.norm() / norms.norm()), rel=1e-3)
    if narrow:
        wide = found.codes.int()
        assert int((wide.relu()[:, 1:] + wide.relu()[:, :-1]).max()) <= 128


@pytest.mark.parametrize("kind", ["none", "zeros", "infinite", "one row", "dead", "one feature"])
def test_data_that_say_little_never_make_it_worse(kind: str) -> None:
    weight, x = drawn(20, 64, seed=3), inputs(64)
    x = {
        "none": x[:0],
        "zeros": x * 0,
        "infinite": x * 1e30,
        "one row": x[:1],
        "dead": x * (torch.arange(64) % 3 > 0),
        "one feature": x * (torch.arange(64) == 5),
    }[kind]
    plain = stored(weight, 4, None)
    found = improved(plain, weight, 4, x.T @ x)
    assert bool((lost(found, 4, weight, x) <= lost(plain, 4, weight, x)).all())
    changed = not torch.equal(found.codes, plain.codes)
    assert changed == (kind in ("one row", "dead"))


class Two(nn.Module):
    """Two linears of one input, a third behind them; an outer one is tied to the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu() + self.second(x)
        result: torch.Tensor = self.second(self.third(hidden).tanh())
        return result


def two(**options: Any) -> attngraph.Optimized:
    torch.manual_seed(0)
    x = inputs(64, 320).view(4, 80, 64)
    return attngraph.optimize(Two().eval(), (x,), **options)


@pytest.mark.parametrize(
    ("weights", "further"),
    [
        ("int8", {"activations": "int8"}),
        pytest.param("int8", {}, marks=pytest.mark.slow),
        pytest.param("int4", {}, marks=pytest.mark.slow),
        pytest.param("int4", {"activations": "int8"}, marks=pytest.mark.slow),
        pytest.param("int4", {"portable": True}, marks=pytest.mark.slow),
        pytest.param("int8", {"portable": True}, marks=pytest.mark.slow),
    ],
)
def test_a_model_loses_less_and_its_file_is_verified(
    weights: Any, further: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, path = tmp_path / "data.npz", tmp_path / "two.onnx"
    np.savez(data, x=(drawn(320, 12, seed=9) @ drawn(12, 64, seed=1)).view(4, 80, 64).numpy())
    options = {"weights": weights, **further}
    model = two(**options, calibrate=data)
    monkeypatch.setattr(quantizing, "chosen_on", lambda *_, **__: {})
    plain = two(**options)
    assert plain.report.quantised is not None
    found = model.report.quantised
    assert found is not None
    assert set(found.chosen) == {f"{name}.weight" for name in ("first", "second", "third")}
    ratio = found.errors[0].rms / plain.report.quantised.errors[0].rms
    assert ratio < (0.9 if "activations" in further else 0.7)
    model.save(path)

    def verified() -> Any:
        torch.manual_seed(0)
        given = Model(Two().eval(), None, (inputs(64, 320).view(4, 80, 64),), {}, None)
        return verify_file(given, path, Session.open(path, parse_target("cpu")))

    assert verified().passed
    edited = onnx.load(path)
    codes = next(t for t in edited.graph.initializer if f".{weights}" in t.name)
    other = numpy_helper.to_array(codes).copy()
    other[0] ^= 1
    codes.CopyFrom(numpy_helper.from_array(other, codes.name))
    onnx.save(edited, path)
    assert not verified().passed


class Gelus(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(nn.functional.gelu(self.up(x)))
        return result


def test_what_a_sample_shows_helps_on_others_like_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = Gelus().eval()
    white, alike = drawn(2000, 64, seed=7), inputs(64, rows=1000)

    def off(sample: torch.Tensor, others: torch.Tensor) -> float:
        dims = ({0: Dim("rows", min=2)},)
        options: dict[str, Any] = {"weights": "int8", "activations": "int8"}
        model = attngraph.optimize(module, (sample,), dynamic_shapes=dims, **options)
        with torch.no_grad():
            exact = module(others).double()
        return float((model(others).double() - exact).norm() / exact.norm())

    kinds = (alike[:500], alike[500:]), (drawn(16, 64, seed=8), white)
    chosen = [off(*kind) for kind in kinds]
    monkeypatch.setattr(quantizing, "chosen_on", lambda *_, **__: {})
    nearest = [off(*kind) for kind in kinds]
    assert chosen[0] < 0.93 * nearest[0]
    assert chosen[1] < 1.02 * nearest[1]  # a few rows that say nothing of others


def test_codes_that_a_sample_chose_stay_near_the_weight() -> None:
    weight, x = drawn(40, 200, seed=3), inputs(200, rows=20)
    plain = stored(weight, 8, Rounding("int8", narrow=False))
    trusted = improved(plain, weight, 8, x.T @ x)
    found = improved(plain, weight, 8, x.T @ x, scarce=10.0)
    off = [weight_of(each, 8, 200) - weight.double() for each in (plain, found, trusted)]
    far = [each.norm(dim=1) / off[0].norm(dim=1) for each in off]
    assert float(far[1].max()) <= 1.2501
    assert float(far[2].max()) > 1.3
    assert not torch.equal(found.codes, plain.codes)
