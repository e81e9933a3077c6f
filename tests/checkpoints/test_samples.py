"""What a checkpoint's model is traced with: its images, and text beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import attngraph
from attngraph.errors import CaptureError, UsageError
from attngraph.frontend.files.load import load
from tests.checkpoints.models import SMALL, saved
from tests.models.kit import peaked

pytestmark = pytest.mark.wide

_SIZES: dict[str, tuple[dict[str, Any], bool]] = {
    "cut out": (
        {"size": 20, "crop_size": {"height": 8, "width": 16}, "do_center_crop": True},
        False,
    ),
    "padded": ({"size": 4, "pad_size": [8, 16], "do_pad": True}, False),
    "not resized": ({"size": {"height": 64, "width": 64}, "do_resize": False}, False),
    "none": ({"size": {"height": 0, "width": -1}}, False),
    "longest": ({"size": {"longest_edge": 64}}, False),
    "any shape": ({"size": {"shortest_edge": 16}}, True),
}


@pytest.mark.parametrize("how", _SIZES)
def test_images_have_the_size_that_the_preprocessor_makes(tmp_path: Path, how: str) -> None:
    path = saved(tmp_path, "vit")
    settings, is_told = _SIZES[how]
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    loaded = load(path)
    expected = (8, 16) if how in ("cut out", "padded") else (16, 16)
    assert loaded.kwargs["pixel_values"].shape[-2:] == expected
    assert any("takes images of 16 by 16 alone" in note for note in loaded.notes) == is_told


def test_an_image_of_a_size_that_the_model_lacks_is_told_as_its_own_refusal(tmp_path: Path) -> None:
    path = saved(tmp_path, "vit")
    settings = {"size": {"height": 24, "width": 24}}
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(CaptureError) as raised:
        attngraph.optimize_checkpoint(path)
    said = str(raised.value)
    assert "itself fails on its sample inputs at transformers/models/vit" in said
    assert "(raise ValueError(…)): Input image size (24*24)" in said
    assert "that of its preprocessor: pixel_values (2, 3, 24, 24). If it takes others, desc" in said


@pytest.mark.parametrize(
    ("name", "ids", "pixels"),
    [
        ("clip", ["text_batch", "seq"], ["image_batch"]),
        ("blip", ["batch", "seq"], ["batch"]),
        ("layoutlmv3", ["batch", "seq"], ["batch"]),
    ],
)
def test_images_beside_text_are_as_many_where_the_model_pairs_them(
    tmp_path: Path, name: str, ids: list[str], pixels: list[str]
) -> None:
    loaded = load(saved(tmp_path, name))
    assert isinstance(loaded.dynamic_shapes, dict)
    for given, names in (("input_ids", ids), ("pixel_values", pixels)):
        assert [dim.__name__ for dim in loaded.dynamic_shapes[given].values()] == names
    rows = [loaded.kwargs[given].shape[0] for given in ("input_ids", "pixel_values")]
    assert (rows[0] == rows[1]) == (pixels == ["batch"])
    assert not loaded.notes


def test_a_text_that_is_matched_with_an_image_compiles(tmp_path: Path) -> None:
    path = saved(tmp_path, "blip")
    loaded = load(path)
    optimized = attngraph.optimize_checkpoint(path)
    inputs = {name: data[:1] for name, data in loaded.kwargs.items() if name != "use_cache"}
    with torch.no_grad():
        expected = loaded.module(**inputs)
    torch.testing.assert_close(optimized(**inputs)["itm_score"], expected["itm_score"])


@pytest.mark.slow
def test_an_attention_over_sound_is_tried_at_a_part_of_the_sample(tmp_path: Path) -> None:
    """At the usual sizes, a few samples, it has no frames; over 4,000 it is too large to try."""
    report = attngraph.optimize_checkpoint(saved(tmp_path, "sound")).report
    assert len(report.sites) == 1
    assert not report.declined
    # Of some thirty that a trace asks: one frame of one signal.
    assert report.relations == ["batch*(samples // 10 - 1) ≥ 2"]


def test_tokens_of_a_table_have_a_type_for_each_of_its_kinds(tmp_path: Path) -> None:
    """Without them TAPAS answers as if there were no rows and columns."""
    from transformers import TapasConfig, TapasForQuestionAnswering

    sizes = [3, 16, 16, 2, 2, 16, 10]
    config = TapasConfig(**SMALL, vocab_size=90, type_vocab_sizes=sizes)
    TapasForQuestionAnswering(config).save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert loaded.kwargs["token_type_ids"].shape == (*loaded.kwargs["input_ids"].shape, 7)


def test_boxes_lie_on_the_page(tmp_path: Path) -> None:
    from transformers import LayoutLMConfig, LayoutLMModel

    config = LayoutLMConfig(**SMALL, vocab_size=90, max_2d_position_embeddings=64)
    LayoutLMModel(config).save_pretrained(tmp_path)
    loaded = load(tmp_path)
    box = loaded.kwargs["bbox"]
    assert box.shape == (2, 8, 4)
    assert (box[..., :2] <= box[..., 2:]).all()
    assert box.max() < 64
    assert len(box.unique()) > 8
    assert loaded.module is not None
    loaded.module(**loaded.kwargs)


def test_a_model_that_takes_any_character_has_ids_too(tmp_path: Path) -> None:
    """CANINE has no table of tokens, and its config no number of them."""
    from transformers import CanineConfig, CanineForSequenceClassification

    config = CanineConfig(**SMALL, num_hash_buckets=50, local_transformer_stride=8)
    CanineForSequenceClassification(config).save_pretrained(tmp_path)
    assert load(tmp_path).kwargs["input_ids"].shape == (2, 8)


def test_what_a_model_takes_beside_its_samples_is_told(tmp_path: Path) -> None:
    (note,) = load(saved(tmp_path, "visual_bert")).notes
    assert note.startswith("VisualBertModel takes visual_embeds, visual_token_type_ids, image_text")
    assert "what it computes without them is compiled" in note


def test_eyes_that_a_config_lacks_are_not_opened(tmp_path: Path) -> None:
    loaded = load(saved(tmp_path, "blind layoutlmv3"))
    assert "pixel_values" not in loaded.kwargs
    assert any("takes pixel_values as well" in note for note in loaded.notes)


def test_a_decoder_in_a_list_of_models_that_see_is_one_of_text(tmp_path: Path) -> None:
    """Mistral 4, whose refusal named no input."""
    from transformers import Mistral4Config, Mistral4ForCausalLM

    widths = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = Mistral4Config(
        **{**SMALL, "max_position_embeddings": 64}, **widths, **experts, n_group=1, topk_group=1,
        vocab_size=90, num_key_value_heads=2, v_head_dim=16, bos_token_id=1, eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    Mistral4ForCausalLM(config).save_pretrained(tmp_path)
    task = load(tmp_path).task
    assert task is not None
    assert (task.name, task.kind) == ("text-generation", "decoder")


@pytest.mark.parametrize(
    ("kind", "others", "because"),
    [
        (
            "DeepseekVLHybrid",
            "pixel_values, high_res",
            "the use of high_res_pixel_values isn't known",
        ),
        (
            "Qwen2_5OmniThinker",
            "input_features, pixel_values",
            "the use of audio_feature_lengths, video_second_per_grid isn't known",
        ),
        ("MusicFlamingo", "input_features", "its get_audio_features takes input_ids too"),
        ("Gemma4Unified", "pixel_values", "what its get_audio_features returns isn't known"),
        ("Florence2", "pixel_values", "it is an encoder-decoder"),
        ("Lfm2Vl", "pixel_values, spatial_shapes", "the use of spatial_shapes isn't known"),
        ("Phi4Multimodal", "image_pixel_values", "how its class encodes image_pixel_values"),
    ],
)
def test_a_prompt_of_more_than_text_is_refused_before_weights_are_read(
    tmp_path: Path, kind: str, others: str, because: str
) -> None:
    import transformers

    name = f"{kind}For{'CausalLM' if kind.startswith('Phi') else 'ConditionalGeneration'}"
    config = getattr(transformers, f"{kind}Config")()
    config.architectures = [name]
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_text("never read")
    told = f"is a {name}, which takes {others}.* beside text, and no .* yet: {because}"
    with pytest.raises(UsageError, match=told):
        load(tmp_path)


def test_nor_does_an_encoder_decoder_drop_its_images() -> None:
    from transformers import Florence2Config, Florence2ForConditionalGeneration

    with torch.device("meta"):
        module = Florence2ForConditionalGeneration(Florence2Config())
    with pytest.raises(UsageError, match="takes pixel_values beside text"):
        attngraph.optimize_seq2seq(module)


@pytest.mark.slow
def test_frames_of_a_signal_whose_bias_is_of_their_square_compile(tmp_path: Path) -> None:
    """WavLM's bias, (frames, frames), asks whether frames² is 1: an open length was refused."""
    from transformers import WavLMConfig, WavLMForSequenceClassification

    torch.manual_seed(0)
    layers = {"conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2)}
    places = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
    config = WavLMConfig(**SMALL, **layers, **places, num_feat_extract_layers=2)
    module = WavLMForSequenceClassification(config).eval()
    module.save_pretrained(tmp_path)
    optimized = attngraph.optimize_checkpoint(tmp_path)
    for samples in (40, 111, 640):
        signal = torch.randn(2, samples)
        with torch.no_grad():
            expected = module(signal).logits
        torch.testing.assert_close(optimized(signal).logits, expected, rtol=1e-5, atol=2e-6)


def test_frames_of_speech_and_their_mask_are_made_of_the_config(tmp_path: Path) -> None:
    """Speech2Text's mask is of frames, of which its encoder makes four one."""
    from transformers import Speech2TextConfig, Speech2TextForConditionalGeneration

    torch.manual_seed(0)
    sizes = dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "conv_channels", "d_model"), 32)
    counts = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    config = Speech2TextConfig(
        **sizes, **counts, **heads, vocab_size=90, max_source_positions=60, max_target_positions=32,
        input_feat_per_channel=8,
    )  # fmt: skip
    model: Any = peaked(Speech2TextForConditionalGeneration(config).eval())
    model.save_pretrained(tmp_path)
    seq2seq = attngraph.optimize_checkpoint(tmp_path).result
    for frames in (24, 57):
        features, mask = torch.randn(2, frames, 8), torch.ones(2, frames, dtype=torch.long)
        mask[1, frames - 9 :] = 0
        expected = model.generate(
            features, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None
        )
        assert len(expected[:, 1:].unique()) > 1
        given = {"input_features": features, "attention_mask": mask}
        assert torch.equal(seq2seq.generate(given, 6, eos_token_id=[]), expected)


def test_a_head_without_a_padding_token_takes_one_row(tmp_path: Path) -> None:
    """It was refused; with the token it takes any number of them."""
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    grouped = {**SMALL, "num_key_value_heads": 1, "vocab_size": 40}
    for pad in (None, 3):
        torch.manual_seed(0)
        config = Qwen2Config(**grouped, pad_token_id=pad)
        module = peaked(Qwen2ForSequenceClassification(config))
        module.save_pretrained(tmp_path / str(pad))
        optimized = attngraph.optimize_checkpoint(tmp_path / str(pad))
        told = any("takes one row of text" in note for note in optimized.report.notes)
        assert told == (pad is None)
        for length in (1, 5, 12):
            ids = torch.randint(4, 40, (1 if pad is None else 3, length))
            with torch.no_grad():
                expected = module(ids).logits
            found = optimized(ids, torch.ones_like(ids)).logits
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kind", ["Bart", "T5"])
def test_heads_that_read_the_end_of_text_compile(tmp_path: Path, kind: str) -> None:
    """Their code fails on text without its end, which shorter samples were cut off."""
    import transformers

    own = {
        "Bart": {
            f"{part}_{name}": size
            for part in ("encoder", "decoder")
            for name, size in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 16))
        },
        "T5": {"num_heads": 2, "num_layers": 1, "d_kv": 8, "d_ff": 16, "decoder_start_token_id": 0},
    }
    config = getattr(transformers, f"{kind}Config")(
        **own[kind], d_model=16, vocab_size=40, eos_token_id=2, pad_token_id=0
    )
    torch.manual_seed(0)
    module = getattr(transformers, f"{kind}ForSequenceClassification")(config)
    peaked(module).save_pretrained(tmp_path)
    optimized = attngraph.optimize_checkpoint(tmp_path)
    for length in (5, 17):
        ids = torch.randint(4, 40, (3, length))
        ids[:, -1] = 2
        with torch.no_grad():
            expected = module(ids, attention_mask=torch.ones_like(ids)).logits
        found = optimized(ids, torch.ones_like(ids)).logits
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
