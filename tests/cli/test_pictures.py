"""What a page draws: the nodes of an attention before and after, and what its mask hides."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import torch
from torch import Tensor, nn

import attngraph
from attngraph.reports.pictures import drawing, pictures


class Causal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        scores = x @ x.transpose(-1, -2)
        seen = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril()
        return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ x


def _rows(url: str) -> list[list[bool]]:
    """Which pixels of a PNG are dark."""
    data = base64.b64decode(url.removeprefix("data:image/png;base64,"))
    width, height = struct.unpack(">II", data[16:24])
    body = zlib.decompress(data[data.index(b"IDAT") + 4 : data.index(b"IEND") - 8])
    lines = [body[at * (3 * width + 1) + 1 :][: 3 * width] for at in range(height)]
    return [[line[3 * x] < 200 for x in range(width)] for line in lines]


def test_an_attention_is_drawn_as_it_was_as_it_is_and_with_its_mask() -> None:
    made: Any = attngraph.optimize(Causal(), (torch.randn(2, 5, 8),))
    (site,) = made.report.sites
    found = pictures([site], made.graph, made.origin, made.model)[site.location, site.module]
    assert "softmax" in found.before
    assert "softmax" not in found.after
    assert "Attention" in found.after
    assert _rows(found.mask) == torch.ones(5, 5).tril().bool().tolist()
    assert found.at == "5 queries × 5 keys"
    assert found.line.startswith("return scores.masked_fill")


class Padded(nn.Module):
    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        scores = (x @ x.transpose(-1, -2)).masked_fill(hidden[:, None], float("-inf"))
        return scores.softmax(-1) @ x


def test_a_mask_that_is_true_where_keys_are_hidden_hides_none_in_its_picture() -> None:
    hidden = torch.arange(5).expand(2, 5) > 3
    made: Any = attngraph.optimize(Padded(), (torch.randn(2, 5, 8), hidden))
    (site,) = made.report.sites
    found = pictures([site], made.graph, made.origin, made.model)[site.location, site.module]
    assert _rows(found.mask) == torch.ones(5, 5).bool().tolist()


def test_names_in_a_drawing_are_escaped_and_many_nodes_are_counted() -> None:
    assert "&lt;b&gt;" in drawing({1: "<b>", 2: "c"}, [(1, 2)])
    assert drawing(dict.fromkeys(range(80), "op"), []).count("<rect") == 0
    assert drawing({}, []) == ""
