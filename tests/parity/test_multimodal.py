"""Compiled models that read images give the tokens of eager models, wherever the images stand."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph import Multimodal
from attngraph.decoding.multimodal import VISION
from attngraph.errors import ParityError, UsageError
from attngraph.frontend.image_grids import Places, patches_placed, within_segments
from attngraph.frontend.image_samples import sample_images
from attngraph.frontend.modalities import is_joined
from attngraph.frontend.multimodal import Join, Parts, Vision, of_images
from attngraph.inference import inference
from attngraph.verification.verify_multimodal import verify_multimodal
from tests.models.kit import HIDDEN, VOCABULARY, peaked
from tests.parity.test_decode import common

TOKEN, STEPS = 7, 10


def _llava() -> nn.Module:
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    vision = CLIPVisionConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        image_size=8, patch_size=4,
    )  # fmt: skip
    text = LlamaConfig(**common(num_hidden_layers=1))
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_id=TOKEN)
    )


def _gemma3() -> nn.Module:
    """A window that is shorter than an image, in every second layer."""
    from transformers import (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        Gemma3TextConfig,
        SiglipVisionConfig,
    )

    vision = SiglipVisionConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        image_size=16, patch_size=4,
    )  # fmt: skip
    text = Gemma3TextConfig(
        **common(
            num_key_value_heads=2,
            head_dim=16,
            sliding_window=3,
            layer_types=["sliding_attention", "full_attention"],
        )
    )
    model = Gemma3ForConditionalGeneration(
        Gemma3Config(
            vision_config=vision, text_config=text, image_token_id=TOKEN, mm_tokens_per_image=4
        )
    )
    nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    return model


def _text_of_qwen() -> dict[str, object]:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    return common(
        num_hidden_layers=1,
        num_key_value_heads=2,
        rope_scaling=rope,
        bos_token_id=1,
        eos_token_id=2,
    )


def _qwen2_vl() -> nn.Module:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = {"embed_dim": 16, "hidden_size": HIDDEN, "depth": 1, "num_heads": 2, "patch_size": 2}
    return Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(text_config=_text_of_qwen(), vision_config=vision, image_token_id=TOKEN)
    )


def _qwen2_5_vl() -> nn.Module:
    """Windows of two by two tokens in the first layer."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {
        "hidden_size": 16, "out_hidden_size": HIDDEN, "depth": 2, "num_heads": 2, "patch_size": 2,
        "intermediate_size": 24, "window_size": 8, "fullatt_block_indexes": [1],
    }  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=_text_of_qwen(), vision_config=vision, image_token_id=TOKEN)
    )


def _internvl() -> nn.Module:
    from transformers import (
        InternVLConfig,
        InternVLForConditionalGeneration,
        InternVLVisionConfig,
        Qwen2Config,
    )

    vision = InternVLVisionConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        image_size=[16, 16], patch_size=[4, 4],
    )  # fmt: skip
    text = Qwen2Config(**common(num_hidden_layers=1, num_key_value_heads=2))
    return InternVLForConditionalGeneration(
        InternVLConfig(vision_config=vision, text_config=text, image_token_id=TOKEN)
    )


def _in_rows(kind: str) -> nn.Module:
    """Rows of images, with a mask of where they have pixels."""
    import transformers

    vision = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 16, "image_size": 16, "patch_size": 4,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**common(num_hidden_layers=1)),
        image_token_id=TOKEN,
        scale_factor=2,
    )
    made: nn.Module = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    return made


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llava": _llava,
    "gemma3": _gemma3,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "internvl": _internvl,
    "smolvlm": lambda: _in_rows("SmolVLM"),
    "idefics3": lambda: _in_rows("Idefics3"),
}
_TAKES_MINUTES = {"gemma3", "qwen2_5_vl", "internvl", "smolvlm", "idefics3"}


@functools.cache
def eager(family: str) -> nn.Module:
    torch.manual_seed(0)
    return peaked(FAMILIES[family]().eval())


@functools.cache
def compiled(family: str) -> Multimodal:
    return attngraph.optimize_multimodal(eager(family))


@functools.cache
def parts(family: str) -> Parts:
    return of_images(eager(family), None, None, family)


def images(family: str, count: int) -> dict[str, Tensor]:
    return parts(family).drawn(count, torch.Generator().manual_seed(count))[0]


def prompt(family: str, *rows: int) -> tuple[Tensor, Tensor]:
    """Ids and mask of rows with so many images each, padded on the left."""
    seed = torch.Generator().manual_seed(len(rows))
    sizes = parts(family).drawn(sum(rows), torch.Generator())[1]
    length = 4 + max(rows) * (max(sizes, default=0) + 1)
    text = torch.randint(TOKEN + 1, VOCABULARY, (len(rows), length), generator=seed)
    mask = torch.ones_like(text)
    for row, count in enumerate(rows):
        mask[row, :row] = 0
        start = row + 1
        for _ in range(count):
            size = sizes.pop(0)
            text[row, start : start + size] = TOKEN
            start += size + 1
    return text, mask


def expected(family: str, ids: Tensor, mask: Tensor, given: dict[str, Tensor]) -> Tensor:
    model = eager(family)
    kinds = {"token_type_ids": (ids == TOKEN).long()} if family in _SEES else {}
    if "image_grid_thw" in given:
        kinds = {"mm_token_type_ids": (ids == TOKEN).int()}
    tokens: Tensor = model.generate(  # type: ignore[operator]
        input_ids=ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False,
        eos_token_id=None, **given, **kinds,
    )  # fmt: skip
    return tokens


_SEES = {"gemma3"}
families = pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=pytest.mark.slow if name in _TAKES_MINUTES else ())
        for name in FAMILIES
    ],
)


@pytest.mark.machine
@families
@pytest.mark.parametrize("rows", [(0,), (1,), (1, 1), (2, 0, 1)], ids=str)
def test_the_tokens_are_those_of_the_eager_model(family: str, rows: tuple[int, ...]) -> None:
    ids, mask = prompt(family, *rows)
    given = images(family, sum(rows)) if any(rows) else {}
    found = compiled(family).generate(ids, STEPS, mask, eos_token_id=[], **given)
    assert torch.equal(found, expected(family, ids, mask, given))


@pytest.mark.machine
@pytest.mark.slow
def test_rows_of_images_are_one_behind_the_other_without_what_pads_them() -> None:
    (ids, mask), given = prompt("smolvlm", 2, 1), images("smolvlm", 3)
    rows = {}
    for name, each in given.items():
        rows[name] = torch.stack([each[0, :2], torch.cat([each[0, 2:], each[0, :1] * 0])])
    assert rows["pixel_values"].shape[:2] == (2, 2)
    model = compiled("smolvlm")
    assert not [note for note in model.reports[VISION].notes if "stops with an error" in note]
    found = model.generate(ids, STEPS, mask, eos_token_id=[], **rows)
    assert torch.equal(found, expected("smolvlm", ids, mask, rows))
    assert torch.equal(found, model.generate(ids, STEPS, mask, eos_token_id=[], **given))
    given["pixel_attention_mask"] = ~given["pixel_attention_mask"].flip(-1)  # it is looked at
    other = model.generate(ids, STEPS, mask, eos_token_id=[], **given)
    assert torch.equal(other, expected("smolvlm", ids, mask, given))


@pytest.mark.machine
def test_positions_go_on_behind_an_image_in_another_call() -> None:
    (ids, _), model = prompt("qwen2_vl", 2), compiled("qwen2_vl")
    given, sizes = parts("qwen2_vl").drawn(2, torch.Generator().manual_seed(2))
    cut, grid, pixels = 2 + sizes[0], given["image_grid_thw"], given["pixel_values"]
    patches = int(grid[0].prod())
    logits, cache = model(
        ids[:, :cut], None, None, {"pixel_values": pixels[:patches], "image_grid_thw": grid[:1]}
    )
    logits, cache = model(
        ids[:, cut:], None, cache, {"pixel_values": pixels[patches:], "image_grid_thw": grid[1:]}
    )
    whole, other = model(ids, None, None, given)
    assert cache.seen.shift is not None
    assert other.seen.shift is not None
    assert torch.equal(cache.seen.shift, other.seen.shift)
    assert int(other.seen.shift) < 0
    torch.testing.assert_close(logits[:, -1], whole[:, -1], rtol=0, atol=2e-5)


def test_a_config_that_does_not_say_what_a_patch_is_is_told() -> None:
    vision = SimpleNamespace(spatial_merge_size=2, in_chans=3, patch_size=4)
    model = SimpleNamespace(
        config=SimpleNamespace(vision_config=vision),
        forward=eager("qwen2_vl").forward,
        dtype=torch.float32,
    )
    with pytest.raises(UsageError, match=r"no temporal_patch_size of its patches.*give"):
        sample_images(model, "it")


@pytest.mark.machine
def test_grids_that_are_not_those_of_the_patches_are_told() -> None:
    (ids, mask), given, model = prompt("qwen2_vl", 1), images("qwen2_vl", 1), compiled("qwen2_vl")
    grid, pixels = given["image_grid_thw"], given["pixel_values"]
    assert model.session(VISION).input_names == ("pixel_values", "grid_thw")  # as others call it
    for name, other, told in (
        ("image_grid_thw", None, "input image_grid_thw is missing"),
        ("image_grid_thw", grid + 1, "each a multiple of 2"),
        ("image_grid_thw", grid[0], "must be \\(images, 3\\)"),
        ("image_grid_thw", grid.float(), "image_grid_thw is float32; its numbers must be integers"),
        ("pixel_values", pixels[:-4], "has places for 24 patches, and pixel_values has 20"),
    ):
        with pytest.raises(UsageError, match=told):
            model.generate(ids, 2, mask, **{**given, name: other})


@pytest.mark.machine
def test_an_image_changes_the_tokens_and_its_place_counts() -> None:
    """The tests above would pass where no image is looked at."""
    ids, mask = prompt("llava", 1, 1)
    given = images("llava", 2)["pixel_values"]
    model = compiled("llava")
    logits = [model(ids, mask, None, {"pixel_values": each})[0] for each in (given, given.flip(0))]
    assert (logits[0] - logits[1]).abs().max() > 1e-3


@pytest.mark.machine
def test_a_conversation_goes_on_with_another_image() -> None:
    (ids, _), given, model = prompt("llava", 2), images("llava", 2), compiled("llava")
    cut = 2 + 4
    stream = model.stream(ids[:, :cut], 2, pixel_values=given["pixel_values"][:1])
    assert len(list(stream)) == 2
    rest = torch.cat([stream.ids, ids[:, cut:]], 1)
    found = model.generate(
        rest, STEPS, cache=stream.cache, pixel_values=given["pixel_values"][1:], temperature=0.0
    )
    assert torch.equal(found, expected("llava", rest, torch.ones_like(rest), given))


@pytest.mark.machine
def test_tokens_come_one_by_one_and_may_be_drawn() -> None:
    (ids, mask), given, model = prompt("llava", 1), images("llava", 1), compiled("llava")
    how = {"temperature": 1.0, "top_k": 5, "seed": 3}
    stream = model.stream(ids, 4, mask, **given, **how)
    tokens = torch.stack(list(stream), 1)
    assert tokens.shape == (1, 4)
    assert torch.equal(model.generate(ids, 4, mask, **given, **how)[:, -4:], tokens)


@pytest.mark.machine
def test_what_does_not_fit_is_one_sentence() -> None:
    (ids, mask), model = prompt("llava", 1, 1), compiled("llava")
    pixels = images("llava", 2)["pixel_values"]
    for given, told in (
        ({}, "The prompt has 8 tokens 7, .* give pixel_values"),
        ({"pixel_values": pixels[:1]}, "have 8 tokens 7, .* the images give 4 features"),
        ({"pixel_values": pixels.to(torch.uint8)}, "pixel_values is uint8; .* must be floating"),
        ({"pixel_values": pixels[:, :, :4]}, "pixel_values has shape .* must be \\(images, 3, 8"),
        ({"pixel_values": pixels, "image_sizes": pixels}, "has no input image_sizes"),
        ({"pixel_values": [1]}, "pixel_values must be a torch.Tensor, not list"),
    ):
        with pytest.raises(UsageError, match=told):
            model.generate(ids, 2, mask, **given)
    with pytest.raises(UsageError, match="takes embeddings"):
        model.decoder.generate(ids, 2, mask)


@pytest.mark.machine
def test_files_are_called_as_others_call_them_and_are_read_again(tmp_path: Path) -> None:
    compiled("llava").save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "vision_encoder.onnx", "embed_tokens.onnx", "join_images.onnx", "decoder_model_merged.onnx",
    }  # fmt: skip
    taken = {
        path.name: [value.name for value in onnx.load(path).graph.input][:2]
        for path in tmp_path.iterdir()
    }
    assert taken["vision_encoder.onnx"] == ["pixel_values"]
    assert taken["embed_tokens.onnx"] == ["input_ids"]
    assert taken["decoder_model_merged.onnx"] == ["inputs_embeds", "attention_mask"]
    (ids, mask), given = prompt("llava", 1, 1), images("llava", 2)
    found = Multimodal.load(tmp_path).generate(ids, STEPS, mask, **given)
    assert torch.equal(found, expected("llava", ids, mask, given))


@pytest.mark.slow
@families
def test_a_folder_is_verified_and_another_is_not(tmp_path: Path, family: str) -> None:
    compiled(family).save(tmp_path)
    assert all(each.passed for each in verify_multimodal(eager(family), family, tmp_path))
    vision = onnx.load(tmp_path / VISION)
    said = {each.key: each for each in vision.metadata_props}["attngraph.images"]
    told = json.loads(said.value)
    said.value = json.dumps({**told, "token": TOKEN + 1})
    onnx.save(vision, tmp_path / VISION)
    with pytest.raises(ParityError, match="puts images where ids are 8"):
        verify_multimodal(eager(family), family, tmp_path)


@pytest.mark.slow
def test_a_checkpoint_becomes_a_folder_with_all_parts(tmp_path: Path) -> None:
    eager("llava").save_pretrained(tmp_path / "in")  # type: ignore[operator]
    attngraph.optimize_checkpoint(tmp_path / "in").save(tmp_path / "out")
    (ids, mask), given = prompt("llava", 1, 1), images("llava", 2)
    found = Multimodal.load(tmp_path / "out").generate(ids, STEPS, mask, **given)
    assert torch.equal(found, expected("llava", ids, mask, given))
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.slow
def test_a_wrong_decoder_is_told_from_the_steps(tmp_path: Path) -> None:
    compiled("llava").save(tmp_path)
    other = copy.deepcopy(eager("llava"))
    for weight in other.model.language_model.parameters():
        weight.data = weight * 1.5
    found = verify_multimodal(other, "other", tmp_path)
    assert [each.passed for each in found] == [True, False, True, False]


@pytest.mark.slow
def test_a_static_cache_has_room_for_images() -> None:
    model = attngraph.optimize_multimodal(eager("llava"), cache="static", max_length=24)
    (ids, mask), given = prompt("llava", 1, 1), images("llava", 2)
    found = model.generate(ids, STEPS, mask, **given)
    assert torch.equal(found, expected("llava", ids, mask, given))


def test_features_take_the_places_of_their_tokens_in_their_order() -> None:
    ids = torch.tensor([[1, TOKEN, 2, TOKEN], [TOKEN, 3, 4, 5]])
    embeds, features = torch.zeros(2, 4, 1), torch.tensor([[1.0], [2.0], [3.0]])
    joined = Join(TOKEN)(ids, embeds, features)["inputs_embeds"]
    assert joined[..., 0].tolist() == [[0, 1, 0, 2], [3, 0, 0, 0]]


def test_places_on_grids_are_those_of_transformers() -> None:
    from transformers.vision_utils import (
        get_vision_cu_seqlens,
        get_vision_position_ids,
        get_vision_window_index,
    )

    grid = torch.tensor([[1, 4, 6], [1, 2, 2], [2, 8, 4], [1, 10, 14]])
    count = int(grid.prod(-1).sum())
    found = patches_placed(grid, count, 2, 2)
    assert torch.equal(found["image_position_ids"], get_vision_position_ids(grid, 2))
    assert torch.equal(found["image_cu_seqlens"], _numbered(get_vision_cu_seqlens(grid)))
    order, ends = get_vision_window_index(grid, 2, 8, 2)
    windows = _numbered(ends).reshape(-1, 4)
    in_place = torch.empty_like(windows).index_copy(0, order, windows).flatten()
    own = found["image_cu_window_seqlens"]
    assert torch.equal(own[:, None] == own, in_place[:, None] == in_place)


def _numbered(ends: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(ends) - 1), ends.diff().long())


def test_positions_on_grids_are_those_of_transformers() -> None:
    grid = torch.tensor([[1, 4, 6], [1, 2, 2], [1, 8, 4]])
    ids = torch.full((2, 24), TOKEN + 1)
    mask = torch.ones_like(ids)
    ids[0, 2:8], ids[0, 10], ids[1, 5:13], mask[1, :3] = TOKEN, TOKEN, TOKEN, 0
    model = eager("qwen2_vl").model
    kinds = (ids == TOKEN).int()
    expected = model.get_rope_index(ids, kinds, image_grid_thw=grid, attention_mask=mask)
    found = Places(TOKEN, 2)(ids, mask, grid)
    assert torch.equal(found["position_ids"], expected[0])
    assert torch.equal(found["rope_deltas"], expected[1])


def test_what_transformers_hooks_into_a_model_is_taken_out_again() -> None:
    """Else the hidden states that it collects come twice, and LLaVA's images are None."""
    model, given = eager("llava"), images("llava", 1)
    for _ in range(2):
        with inference(model):
            features = Vision(model)(given)["image_features"]
    assert features.shape == (4, HIDDEN)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("LlavaForConditionalGeneration", True),
        ("Mistral3ForConditionalGeneration", False),  # takes sizes of images
        ("Qwen2AudioForConditionalGeneration", False),
        ("Florence2ForConditionalGeneration", False),
        ("Qwen3VLForConditionalGeneration", False),  # images go into later layers too
        ("LlamaForCausalLM", False),
    ],
)
def test_a_class_says_whether_its_rule_is_known(name: str, known: bool) -> None:
    import transformers

    assert is_joined(getattr(transformers, name)) is known


def test_what_stands_in_for_attention_is_taken_out_again() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = dict(ALL_ATTENTION_FUNCTIONS)
    with within_segments(nn.Linear(1, 1)):
        assert len(ALL_ATTENTION_FUNCTIONS) == len(before) + 1
    assert dict(ALL_ATTENTION_FUNCTIONS) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_model_with_another_rule_is_refused(dtype: torch.dtype) -> None:
    model = eager("llava")
    scaled = type(model)(model.config).eval().to(dtype)  # type: ignore[arg-type, call-arg]
    own = scaled.model.get_placeholder_mask
    scaled.model.get_placeholder_mask = lambda ids, **given: own(ids.flip(1), **given)
    with pytest.raises(UsageError, match="no compiler joins these to the tokens"):
        attngraph.optimize_multimodal(scaled)
