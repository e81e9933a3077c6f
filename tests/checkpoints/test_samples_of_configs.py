"""Inputs of kinds and sizes that a config says: series, sounds, pairs of images, tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim

import attngraph
from attngraph.checkpoints.folder import Folder
from attngraph.checkpoints.samples import samples_of
from attngraph.errors import UsageError
from attngraph.frontend.files.load import load
from tests.checkpoints.models import SMALL
from tests.models.kit import peaked

pytestmark = pytest.mark.wide


_LAYERS = {"layers": 1, "attention_heads": 2, "ffn_dim": 16}
_FORECAST: dict[str, Any] = {
    **{f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in _LAYERS.items()},
    "d_model": 16,
    "prediction_length": 4,
    "context_length": 12,
    "lags_sequence": [1, 2, 3],
    "num_time_features": 2,
    "num_dynamic_real_features": 1,
}
_PAST = ("past_values", "past_time_features", "past_observed_mask")
_SERIES = {*_PAST, "future_values", "future_time_features"}
_OF_CONFIG: dict[str, tuple[str, dict[str, Any], set[str], set[str]]] = {
    "T5": (
        "T5Model",
        {"num_heads": 2, "num_layers": 1, "d_kv": 8, "d_ff": 16, "d_model": 16, "vocab_size": 40},
        {"input_ids", "attention_mask", "decoder_input_ids"},
        {"batch", "seq", "decoder_seq"},
    ),
    "DecisionTransformer": (
        "DecisionTransformerModel",
        {"n_layer": 1, "n_head": 2, "hidden_size": 16, "state_dim": 3, "act_dim": 2},
        {"states", "actions", "rewards", "returns_to_go", "timesteps"},
        {"batch", "steps"},
    ),
    "PatchTST": (
        "PatchTSTForClassification",
        {
            **dict.fromkeys(("d_model", "ffn_dim"), 16),
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_input_channels": 3,
            "context_length": 16,
            "patch_length": 4,
            "patch_stride": 4,
            "num_targets": 2,
        },
        {"past_values"},
        {"batch"},
    ),
    "VideoMAE": (
        "VideoMAEModel",
        {**SMALL, "num_frames": 4, "image_size": 16, "patch_size": 8},
        {"pixel_values"},
        {"batch"},
    ),
    "TimeSeriesTransformer": (
        "TimeSeriesTransformerModel",
        {**_FORECAST, "input_size": 3, "num_static_real_features": 1}
        | {"num_static_categorical_features": 2, "cardinality": [5, 7]},
        {"static_categorical_features", "static_real_features", *_SERIES},
        {"batch"},
    ),
    "TimesFm": (
        "TimesFmModel",
        {**SMALL, "head_dim": 8, "context_length": 32, "patch_length": 8, "horizon_length": 8},
        {"past_values", "past_values_padding", "freq"},
        {"batch"},
    ),
}


@pytest.mark.parametrize("kind", _OF_CONFIG)
def test_what_a_model_needs_beside_its_main_input_follows_from_its_config(
    tmp_path: Path, kind: str
) -> None:
    """A decoder's ids, the parts of a trajectory, the channels of a series, the frames of a video:
    without them its folder failed as on wrong samples."""
    import transformers

    architecture, options, names, dims = _OF_CONFIG[kind]
    torch.manual_seed(0)
    module = getattr(transformers, architecture)(getattr(transformers, f"{kind}Config")(**options))
    peaked(module).eval().save_pretrained(tmp_path)
    loaded = load(tmp_path)
    given = {name for name, each in loaded.kwargs.items() if isinstance(each, torch.Tensor)}
    assert given == names
    optimized = attngraph.optimize_checkpoint(tmp_path)
    assert {str(s) for v in optimized.result.graph.inputs for s in v.shape} >= dims
    inputs = {name: loaded.kwargs[name][:1] for name in names}  # another size than the sample's
    with torch.no_grad():
        expected = module(**inputs)
    for name, found in optimized(**inputs).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-5, atol=1e-5)


def test_bins_are_those_of_the_part_that_listens_and_short_sounds_are_made_longer(
    tmp_path: Path,
) -> None:
    from transformers import ParakeetCTCConfig, ParakeetForCTC, Wav2Vec2Config, Wav2Vec2ForXVector

    encoder = {**SMALL, "num_mel_bins": 16, "subsampling_conv_channels": 8}
    config = ParakeetCTCConfig(encoder_config=encoder, vocab_size=20, pad_token_id=0)
    ParakeetForCTC(config).save_pretrained(tmp_path / "frames")
    assert load(tmp_path / "frames").kwargs["input_features"].shape == (2, 96, 16)
    layers = {"conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (40, 10)}
    places = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
    heads = {"tdnn_dim": (8, 8), "tdnn_kernel": (5, 7), "tdnn_dilation": (1, 1)}
    config = Wav2Vec2Config(**SMALL, **layers, **places, **heads, xvector_output_dim=8)
    Wav2Vec2ForXVector(config).save_pretrained(tmp_path / "wave")
    assert load(tmp_path / "wave").kwargs["input_values"].shape == (2, 16000)


@pytest.mark.parametrize("kind", ["TimeSeriesTransformer", "Informer", "Autoformer"])
def test_a_series_reaches_back_by_its_lags(tmp_path: Path, kind: str) -> None:
    """Its values lie further back than context_length says, and come with their times; without its
    future, the decoder would begin from nothing."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**_FORECAST)
    module = getattr(transformers, f"{kind}ForPrediction")(config)
    module.save_pretrained(tmp_path)
    given = load(tmp_path).kwargs
    shapes = {n: each.shape[1:] for n, each in given.items() if isinstance(each, torch.Tensor)}
    past, future = {"past_values", "past_observed_mask"}, {"future_values"}
    assert shapes == {
        **dict.fromkeys(past, (15,)),
        **dict.fromkeys(future, (4,)),
        "past_time_features": (15, 3),
        "future_time_features": (4, 3),
    }
    assert module(**given).params


def test_a_series_of_which_the_config_says_less_is_refused(tmp_path: Path) -> None:
    from transformers import TimeSeriesTransformerConfig, TimeSeriesTransformerModel

    config = TimeSeriesTransformerConfig(**{**_FORECAST, "lags_sequence": []})
    TimeSeriesTransformerModel(config).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="for whose input past_time_features attngraph has no"):
        load(tmp_path)


def test_images_that_are_compared_come_in_pairs(tmp_path: Path) -> None:
    from transformers import SuperGlueConfig, SuperGlueForKeypointMatching

    config = SuperGlueConfig(
        keypoint_detector_config={"model_type": "superpoint", "descriptor_decoder_dim": 16},
        hidden_size=16, keypoint_encoder_sizes=[8, 16], gnn_layers_types=["self", "cross"],
    )  # fmt: skip
    SuperGlueForKeypointMatching(config).save_pretrained(tmp_path)
    assert load(tmp_path).kwargs["pixel_values"].shape == (2, 2, 3, 224, 224)


def test_a_decoder_beside_text_and_images_has_ids_too(tmp_path: Path) -> None:
    from transformers import UdopConfig, UdopModel

    layers = {"num_heads": 2, "num_layers": 1, "d_kv": 8, "d_ff": 16, "d_model": 16}
    places = {"image_size": 32, "patch_size": 16, "decoder_start_token_id": 0}
    module = UdopModel(UdopConfig(vocab_size=40, **layers, **places)).eval()
    module.save_pretrained(tmp_path)
    given = load(tmp_path).kwargs
    assert given.keys() >= {"input_ids", "bbox", "pixel_values", "decoder_input_ids"}
    assert module(**given).last_hidden_state.shape == (2, 6, 16)


def test_a_decoder_of_nothing_else_has_rows_of_its_own(tmp_path: Path) -> None:
    from transformers import GPT2Config

    class Alone(torch.nn.Module):
        main_input_name = "decoder_input_ids"
        config = GPT2Config(vocab_size=40)

        def forward(self, decoder_input_ids: torch.Tensor) -> torch.Tensor:
            return decoder_input_ids

    found = samples_of(Folder(tmp_path, tmp_path, {}, ()), Alone(), None)
    assert found.kwargs["decoder_input_ids"].shape == (2, 6)


def test_an_image_has_a_task_in_each_row(tmp_path: Path) -> None:
    """OneFormer, whose class needs scipy for its loss."""
    from transformers import OneFormerConfig

    class Asked(torch.nn.Module):
        main_input_name = ("pixel_values", "task_inputs")
        config = OneFormerConfig(task_seq_len=7, text_encoder_vocab_size=50)

        def forward(self, pixel_values: torch.Tensor, task_inputs: torch.Tensor) -> torch.Tensor:
            return pixel_values.sum((1, 2, 3)) + task_inputs.sum(1)

    found = samples_of(Folder(tmp_path, tmp_path, {}, ()), Asked(), None)
    assert found.kwargs["task_inputs"].shape == (2, 7)
    assert found.kwargs["task_inputs"].max() < 50
    assert found.kwargs["pixel_values"].shape[0] == 2
    assert {str(dims[0]) for dims in found.shapes.values()} == {str(Dim("batch"))}


@pytest.mark.parametrize("kind", ["SequenceClassification", "ImageClassificationFourier"])
def test_inputs_of_any_kind_are_those_that_the_model_takes(tmp_path: Path, kind: str) -> None:
    """Perceiver calls text and images the same."""
    import transformers

    is_text = kind.startswith("Sequence")
    options = {
        "num_latents": 4,
        "d_latents": 32,
        "d_model": 32 if is_text else 261,
        "num_blocks": 1,
        "num_self_attends_per_block": 1,
        "num_self_attention_heads": 2,
        "num_cross_attention_heads": 1,
        "vocab_size": 90,
        "max_position_embeddings": 40,
    }
    torch.manual_seed(0)
    module = getattr(transformers, f"PerceiverFor{kind}")(transformers.PerceiverConfig(**options))
    module.eval().save_pretrained(tmp_path)
    if not is_text:
        loaded = load(tmp_path)
        assert [tuple(each.shape) for each in loaded.kwargs.values()] == [(2, 3, 56, 56)]
        return
    optimized = attngraph.optimize_checkpoint(tmp_path)
    for rows, length in ((1, 1), (3, 13), (2, 40)):
        ids = torch.randint(3, 90, (rows, length))
        mask = (torch.arange(length) < torch.tensor([[length], [7], [5]])[:rows]).long()
        with torch.no_grad():
            expected = module(ids, attention_mask=mask).logits
        torch.testing.assert_close(optimized(ids, mask).logits, expected, rtol=1e-5, atol=2e-6)
