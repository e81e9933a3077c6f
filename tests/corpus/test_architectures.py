"""The corpus is listed once each, and a type of every kind of input builds and runs."""

from __future__ import annotations

import pytest
import torch

from tests.corpus.architectures import FirstTensor, PartOfModelError, build
from tests.corpus.rows import GIVEN, HELD_OUT, LISTS, REMAINING, not_built, parse_row, rows


def test_the_list_names_each_type_once_in_order() -> None:
    names = rows(GIVEN)
    assert len(names) == 129
    assert names == sorted(set(names))


def test_the_held_out_list_repeats_no_row() -> None:
    held_out = rows(HELD_OUT)
    assert len(held_out) == len({*held_out})
    assert not {*held_out} & {*rows(GIVEN)}


def test_a_type_is_a_row_or_has_a_reason() -> None:
    """What is in none of the lists wasn't looked into."""
    listed = {parse_row(text).model_type for name in LISTS for text in rows(name)}
    reasons = not_built()
    assert not listed & {*reasons}
    assert all(reasons.values())
    assert [*reasons] == sorted(reasons)
    assert len(rows(REMAINING)) == len({*rows(REMAINING)} - {*rows(GIVEN), *rows(HELD_OUT)})


def test_a_row_says_its_head_its_length_and_options() -> None:
    row = parse_row("phi head=CausalLM length=9 dims=batch,seq a.rope={'type':'yarn'} act=relu")
    assert (row.model_type, row.head, row.length) == ("phi", "CausalLM", 9)
    assert row.dims == ("batch", "seq")
    assert row.attention is None
    assert row.options == {"a.rope": {"type": "yarn"}, "act": "relu"}


def test_a_row_says_its_inputs_and_what_is_fixed() -> None:
    row = parse_row("yolos inputs.x=float[2,3] fixed.grid=[[1,2]] inputs.mask=None size=[3,4]")
    assert row.inputs == {"x": "float[2,3]", "mask": None}
    assert row.fixed == {"grid": [[1, 2]]}
    assert row.options == {"size": [3, 4]}


def test_an_image_has_a_placeholder_for_each_row_of_its_features() -> None:
    built = build("llava inputs.attention_mask=None")
    feed = dict(zip(built.input_names, built.args, strict=True))
    assert feed["input_ids"].shape == (3, 16 + 16)
    assert (feed["input_ids"] == 1).sum(1).tolist() == [16, 16, 16]


def test_a_tower_that_asks_for_a_grid_gets_the_patches_of_images_of_different_sizes() -> None:
    built = build("muse_glimmer_vision")
    assert built.input_names == ("pixel_values",)
    assert built.args[0].shape == (16 + 32 + 32, 3 * 2 * 8 * 8)
    with torch.no_grad():
        assert built.module(*built.args).isfinite().all()


def test_a_backbone_gives_the_last_map_of_its_features() -> None:
    built = build("rt_detr_resnet embedding_size=16 hidden_sizes=[8,8,16,16] depths=[1,1,1,1]")
    with torch.no_grad():
        assert built.module(*built.args).shape == (3, 16, 1, 1)


def test_patches_with_their_places_begin_with_row_and_column() -> None:
    built = build("kosmos_2_5_vision_model patch_embed_hidden_size=48")
    feed = dict(zip(built.input_names, built.args, strict=True))
    assert feed["flattened_patches"].shape == (3, 16, 2 + 48)
    assert feed["flattened_patches"][0, :5, :2].tolist() == [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1]]


def test_sizes_that_layers_have_of_their_own_are_shrunk_in_proportion() -> None:
    config = build("gemma4_text").module.model.config
    heads = [config.per_layer_config[layer].head_dim for layer in range(2)]
    assert (config.layer_types, heads) == (["sliding_attention", "full_attention"], [16, 32])


def test_a_dotted_key_is_an_item_of_a_dict() -> None:
    config = build("glm4v_text rope_parameters.mrope_section=[2,3,3]").module.model.config
    assert config.rope_parameters["mrope_section"] == [2, 3, 3]
    assert config.rope_parameters["rope_type"] == "default"


def test_a_config_that_no_model_is_made_of_is_a_part() -> None:
    with pytest.raises(PartOfModelError, match="no model of sam_mask_decoder with a forward"):
        build("sam_mask_decoder")


def test_an_input_of_an_unknown_form_is_named() -> None:
    with pytest.raises(ValueError, match=r"inputs\.pixel_values=float\(3\)"):
        build("vit inputs.pixel_values=float(3)")


def test_a_word_that_is_no_option_is_named() -> None:
    with pytest.raises(ValueError, match="'causal' in the row 'phi causal'"):
        parse_row("phi causal")


@pytest.mark.parametrize("model_type", ["electra", "marian", "deit", "aimv2", "unispeech"])
def test_a_tiny_model_gives_one_finite_tensor(model_type: str) -> None:
    built = build(model_type)
    assert isinstance(built.module, FirstTensor)
    assert not built.module.training
    assert len(built.args) == len(built.input_names)
    with torch.no_grad():
        output = built.module(*built.args)
    assert output.isfinite().all()


def test_an_implementation_that_a_type_lacks_is_transformers_own_error() -> None:
    with pytest.raises(ValueError, match="scaled_dot_product_attention"):
        build("codegen", "sdpa")
