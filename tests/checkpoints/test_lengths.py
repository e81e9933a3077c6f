"""Which lengths of what is encoded an encoder-decoder's files take, and what is said of others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.export import Dim

import attngraph
from attngraph.decoding.compile_seq2seq import sources_of
from attngraph.deployment import compilers
from attngraph.errors import CaptureError
from attngraph.frontend.interface.shapes import Request
from attngraph.frontend.tracing.trace_errors import Specialised
from attngraph.ir.conditions import parse_condition
from attngraph.ir.ranges import Ranges
from tests.checkpoints.models import saved


def test_a_check_encodes_what_conditions_on_rows_and_lengths_allow() -> None:
    """A layer that makes one frame of ten samples has none for nine."""
    source = {"input_values": torch.ones(2, 400)}
    shapes = {"input_values": {0: Dim("rows"), 1: Dim("samples")}}
    encoder = SimpleNamespace(args=(source,), dynamic_shapes={"source": shapes})
    parts: Any = SimpleNamespace(encoder=encoder, whole=torch.nn.Linear(2, 2))
    condition = parse_condition("rows*(samples // 10 - 1) >= 0")
    ranges = Ranges({"rows": (1, None), "samples": (1, None)}, (condition,))
    wiring: Any = SimpleNamespace(mask=None)
    labels = [label for label, _ in sources_of(parts, ranges, wiring)]
    assert labels == ["samples=160"]


def _fixed(name: str) -> Specialised:
    """As of a model that works on blocks: its dims were asked for here, and not by the user."""
    request = Request(name, 0, 1, 7, "source", "source", None, None)
    return Specialised("The model fixes it to 7.", (request,), advice="Ask for name=auto.")


@pytest.mark.parametrize(
    ("error", "is_of_encoder"),
    [
        (_fixed("source[0]"), True),
        (_fixed("input_ids"), False),
        (CaptureError("torch.export can't trace Encoder at x.py:3: a view."), True),
        (CaptureError("torch.export can't trace CachedDecoder at x.py:3: a view."), False),
    ],
)
def test_an_encoder_of_fixed_lengths_says_how_it_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: CaptureError, is_of_encoder: bool
) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(compilers, "compile_seq2seq", failing)
    with pytest.raises(CaptureError) as caught:
        attngraph.optimize_checkpoint(saved(tmp_path, "bart"))
    told = str(caught.value)
    assert ("give attngraph.optimize_seq2seq samples of one length" in told) == is_of_encoder
    assert ("name=auto" in told) == (isinstance(error, Specialised) and not is_of_encoder)
