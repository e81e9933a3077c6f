"""Code that pads a sequence to whole chunks takes any length, whichever the sample has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from attngraph import optimize
from attngraph.errors import CaptureError
from attngraph.frontend.limits import _is_count
from attngraph.ir.conditions import parse_condition

CHUNK = 8


class Chunks(nn.Module):
    """Attention in chunks and a state over them, as state-space models are computed."""

    def __init__(self, *, differs: bool = False) -> None:
        super().__init__()
        self.differs = differs

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        missing = (CHUNK - length % CHUNK) % CHUNK
        padded = F.pad(x, (0, 0, 0, missing))
        parts = padded.reshape(batch, -1, CHUNK, width)
        within = (parts @ parts.mT / width).softmax(-1) @ parts
        sums = parts.sum(2)
        before = torch.cat([torch.zeros_like(sums[:, :1]), sums.cumsum(1)], 1)[:, :-1]
        made = (within + before.unsqueeze(2)).reshape(batch, -1, width)
        if missing > 0:
            made = made[:, :length] + (1.0 if self.differs else 0.0)
        return made


DIMS: dict[str, Any] = {
    "named": Dim("length"),
    "named to an end": Dim("length", min=2, max=300),
    "auto": Dim.AUTO,
}


@pytest.mark.parametrize("dim", DIMS)
def test_a_length_is_any_number_of_chunks_and_a_part(dim: str) -> None:
    model = Chunks().eval()
    optimized = optimize(model, (torch.randn(2, 21, 4),), dynamic_shapes=({1: DIMS[dim]},))
    with torch.no_grad():
        for length in (2, 7, 8, 9, 16, 17, 40, 131):
            x = torch.randn(2, length, 4)
            torch.testing.assert_close(optimized(x), model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [16, 21])
def test_a_padded_length_that_is_treated_otherwise_is_refused(length: int) -> None:
    x = torch.randn(2, length, 4)
    with pytest.raises(CaptureError, match="length"):
        optimize(Chunks(differs=True), (x,), dynamic_shapes=({1: Dim("length", min=2)},))


@pytest.mark.parametrize(("length", "chunk"), [(64, 64), (16, 64), (64, 16), (60, 16)])
def test_a_mamba_takes_any_length(length: int, chunk: int) -> None:
    """Whether the sample fills its chunks, or one of them, or less than that."""
    from transformers import Mamba2Config, Mamba2Model

    sizes = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 8, "vocab_size": 50}
    config = Mamba2Config(
        **sizes, n_groups=1, chunk_size=chunk, num_hidden_layers=1, use_cache=False
    )
    model = Mamba2Model(config).eval()
    shapes = ({1: Dim("length", max=512)},)
    optimized = optimize(model, (torch.randint(50, (1, length)),), dynamic_shapes=shapes)
    with torch.no_grad():
        for other in (1, 5, chunk - 1, chunk, chunk + 1, 3 * chunk, 3 * chunk + 2):
            ids = torch.randint(50, (1, other))
            wanted = model(ids).last_hidden_state
            actual = optimized(ids)["last_hidden_state"]
            torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=1e-4)


COUNTS = {
    "(n + 63) // 64 >= 2": True,
    "64 < 64*((n + 63) // 64)": True,
    "3*(n // 4) > 5": True,
    "3*(n // 4) > 6": False,
    "64 <= 64*(n // 4)": False,
    "n - 64*(n // 64) > 0": False,
    "64 < n": False,
}


@pytest.mark.parametrize("text", COUNTS)
def test_which_conditions_ask_for_two_chunks(text: str) -> None:
    assert _is_count(parse_condition(text)) is COUNTS[text]
