"""`attngraph attend` and `Optimized.attention`: the weights are eager's, and are drawn."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import attngraph
from attngraph.errors import UsageError
from attngraph.reports.content_policy import content_policy
from attngraph.reports.heat_map import heat_map
from examples import alignment

pytestmark = pytest.mark.wide

BERT = ("--factory", "examples.bert:build")
MODEL = ("--factory", "examples.transformer:build")


def test_the_weights_are_those_the_module_returns() -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    x = torch.randn(2, 5, 16)

    class Quiet(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return layer(x, x, x, need_weights=False)[0]

    quiet = Quiet()
    quiet.layer = layer
    (view,) = attngraph.optimize(quiet, (x,)).attention(x)
    _, weights = layer(x, x, x, average_attn_weights=False)
    assert view.checked
    torch.testing.assert_close(view.weights, weights.detach())


def test_a_model_without_attention_has_no_weights() -> None:
    with pytest.raises(UsageError, match="no attention whose weights"):
        attngraph.optimize(nn.Linear(2, 2), (torch.ones(1, 2),)).attention(torch.ones(1, 2))


def test_a_trained_aligner_looks_at_the_word_it_translates() -> None:
    model, args, shapes = alignment.build(steps=300)
    assert alignment.accuracy(model) > 0.95
    (view,) = attngraph.optimize(model, args, dynamic_shapes=shapes).attention(*args)
    looked_at = view.weights[:, 0].argmax(-1)
    right = torch.arange(alignment.LENGTH).flip(0).expand_as(looked_at)
    assert (looked_at == right).float().mean() > 0.8


def test_a_heat_map_names_its_tokens_and_shades_its_cells() -> None:
    drawn = heat_map(torch.eye(3), ["a", "<b>", "c"], ["x", "y", "z"])
    assert "&lt;b&gt;" in drawn
    assert drawn.count("<text") == 6
    assert "data:image/png;base64," in drawn


def test_the_page_is_written(attngraph: Any, tmp_path: Path) -> None:
    ran = attngraph("attend", *MODEL, "-o", "page.html", "--layers", "3", "--heads", "0,2")
    assert ran.code == 0, ran.err
    assert "3: decoder.0.cross" in ran.out
    assert "as eager's" in ran.out
    page = (tmp_path / "page.html").read_text("utf-8")
    assert re.findall(r"head \d", page) == ["head 0", "head 2"]
    styles = dict.fromkeys(re.findall(r"<style>(.*?)</style>", page, re.DOTALL))
    assert f'content="{content_policy(*styles)}"' in page
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_attentions_in_the_steps_of_a_loop_are_named(attngraph: Any) -> None:
    told = attngraph("attend", "--factory", "examples.attentive_decoder:build", "-o", "a.html")
    assert "attentive_decoder.py:95 holds an attention in each step" in told.sentence


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((*BERT, "--layers", "9"), "There is no attention 9; there are 0 (blocks.0.attention)"),
        ((*BERT, "--layers", "first"), "--layers 'first' is no list of numbers"),
        ((*MODEL, "--tokens", "a b"), "--tokens has 2 tokens where the length is 7 or 12"),
        ((*BERT, "--element", "5"), "There is no batch element 5; there are 0 to 2"),
    ],
)
def test_what_is_not_there_is_told(
    attngraph: Any, tmp_path: Path, options: tuple[str, ...], told: str
) -> None:
    assert told in attngraph("attend", "-o", "page.html", *options).sentence
    assert not (tmp_path / "page.html").exists()
