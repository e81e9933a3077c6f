"""A folder with a model that reads images or sound becomes parts that give eager's tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import attngraph
from attngraph import Multimodal
from attngraph.errors import CaptureError, UsageError
from tests.parity.multimodal import STEPS, TOKEN, eager, expected, images, prompt
from tests.parity.test_decode import common

pytestmark = pytest.mark.wide

_FAMILIES = {
    "llava_onevision": "image-text-to-text",
    "paligemma": "image-text-to-text",
    "qwen2_audio": "audio-text-to-text",
    "voxtral": "audio-text-to-text",
    "glmasr": "audio-text-to-text",
    "audioflamingo3": "audio-text-to-text",
}


@pytest.mark.slow
def test_parts_with_linears_may_have_them_in_codes() -> None:
    """The embeddings and the rule that joins have none, and were refused for it."""
    from transformers import (
        Gemma2Config,
        PaliGemmaConfig,
        PaliGemmaForConditionalGeneration,
        SiglipVisionConfig,
    )

    wide = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64}
    vision = SiglipVisionConfig(
        **wide, num_attention_heads=2, image_size=8, patch_size=4, projection_dim=64
    )
    text = Gemma2Config(**common(**wide, num_key_value_heads=2, head_dim=16))
    config = PaliGemmaConfig(
        vision_config=vision, text_config=text, image_token_id=TOKEN, projection_dim=64
    )
    torch.manual_seed(0)
    model = PaliGemmaForConditionalGeneration(config).eval()
    found = attngraph.optimize_multimodal(model, weights="int8")
    assert {name for name, each in found.reports.items() if each.quantised is not None} == {
        "vision_encoder.onnx",
        "decoder_model_merged.onnx",
    }


@pytest.mark.parametrize("family", _FAMILIES)
def test_a_folder_gives_the_tokens_of_the_eager_model(tmp_path: Path, family: str) -> None:
    eager(family).save_pretrained(tmp_path / "in")  # type: ignore[operator]
    made = attngraph.optimize_checkpoint(tmp_path / "in")
    assert made.task == _FAMILIES[family]
    made.save(tmp_path / "out")
    model = Multimodal.load(tmp_path / "out")
    for rows in ((0,), (1,), (1, 2), (2, 0, 1)):
        ids, mask = prompt(family, *rows)
        given = images(family, *rows) if any(rows) else {}
        found = model.generate(ids, STEPS, mask, eos_token_id=[], **given)
        assert torch.equal(found, expected(family, ids, mask, given)), rows
    if model.joining.sees == "prompt":
        _, cache = model(ids, mask)
        with pytest.raises(UsageError, match="Images stand in the first ids alone"):
            model(ids, None, cache, given)


def test_sounds_that_cannot_have_any_length_are_told(tmp_path: Path) -> None:
    """Samples of one length compile: see test_a_mask_of_rows_that_forward_applies_is_read."""
    eager("granite_speech").save_pretrained(tmp_path)  # type: ignore[operator]
    with pytest.raises(
        CaptureError, match=r"can't have any length: give attngraph.optimize_multim"
    ):
        attngraph.optimize_checkpoint(tmp_path)
