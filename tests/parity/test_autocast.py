"""Float32 models that compute in a half inside: held to its rounding where it shows, and told."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.errors import ParityError
from attngraph.export.precision import half_inside
from attngraph.export.runtime.session import Session
from attngraph.export.target import parse_target
from attngraph.frontend.model import Model
from attngraph.verification.verify import verify_file

pytestmark = pytest.mark.wide

X = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0))
AUTO = ({0: Dim.AUTO, 1: Dim.AUTO},)


class Autocast(nn.Module):
    """x (B, S, 16): an attention under autocast, and a product that isn't."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.own = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), x)
        return y.float(), self.own(x)


def test_what_comes_of_a_half_is_held_to_its_rounding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Autocast().eval()
    optimized = attngraph.optimize(module, (X,), dynamic_shapes=AUTO)
    (note,) = (note for note in optimized.report.notes if "autocast" in note)
    assert "bf16" in note
    assert half_inside(attngraph.capture(module, (X,))) == ("bf16", {0})
    x = X[:1, :5] * 2
    with torch.no_grad():
        found, eager = optimized(x), module(x)
        exact, _ = copy.deepcopy(module).double()(x.double())
    assert (found[0] - exact).norm() <= 2 * (eager[0] - exact).norm()
    torch.testing.assert_close(found[1], eager[1])
    path = tmp_path / "model.onnx"
    optimized.save(path)
    model = Model(module, None, (X,), {}, AUTO, "Autocast")
    verified = verify_file(model, path, Session.open(path, parse_target("cpu")))
    assert verified.passed
    assert note in verified.notes


def test_what_does_not_come_of_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 output off by 1e-3, as a half would be."""
    evaluate = attngraph.Optimized.evaluate

    def off(self: Any, *args: Any) -> Any:
        first, second = evaluate(self, *args)
        return first, second * (1 + 1e-3)

    monkeypatch.setattr(attngraph.Optimized, "evaluate", off)
    with pytest.raises(ParityError, match="error budget"):
        attngraph.optimize(Autocast().eval(), (X,), dynamic_shapes=AUTO)


def test_a_half_that_is_only_stored_is_none() -> None:
    class Stores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(16, 16).half())

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.table.float().T + x.half().reshape(-1, 16)[0].float()

    assert half_inside(attngraph.capture(Stores(), (X,))) is None
