"""Compiled models that read images give the tokens of eager models, wherever the images stand."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch

import attngraph
from attngraph import Multimodal
from attngraph.decoding.multimodal import VISION
from attngraph.errors import ParityError, UsageError
from attngraph.verification.verify_parts import verify_multimodal
from tests.parity.multimodal import (
    FAMILIES,
    STEPS,
    TAKES_MINUTES,
    TOKEN,
    compiled,
    eager,
    expected,
    images,
    parts,
    prompt,
)

families = pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=pytest.mark.slow if name in TAKES_MINUTES else ())
        for name in FAMILIES
    ],
)


@pytest.mark.machine
@families
@pytest.mark.parametrize("rows", [(0,), (1,), (1, 1), (2, 0, 1)], ids=str)
def test_the_tokens_are_those_of_the_eager_model(family: str, rows: tuple[int, ...]) -> None:
    ids, mask = prompt(family, *rows)
    given = images(family, *rows) if any(rows) else {}
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
    given, sizes = parts("qwen2_vl").first.drawn(2, torch.Generator().manual_seed(2))
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
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "qwen3_5"])
def test_rows_of_a_static_cache_have_their_own_places_and_features(family: str) -> None:
    """Positions (3, B, S), and features (L, B, S, H) for layers, don't have the rows first."""
    model = attngraph.optimize_multimodal(eager(family), cache="static", max_length=64)
    for rows in ((0,), (1, 1), (2, 0, 1)):
        ids, mask = prompt(family, *rows)
        given = images(family, *rows) if any(rows) else {}
        found = model.generate(ids, STEPS, mask, eos_token_id=[], **given)
        assert torch.equal(found, expected(family, ids, mask, given)), rows


@pytest.mark.machine
@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1, 5])
def test_sounds_have_any_number_of_chunks(chunks: int) -> None:
    """Of which the sample has three; the last one's frames are a part of one."""
    mask = torch.zeros(2, 100 * chunks, dtype=torch.int64)
    lengths, sizes = (100 * chunks - 37, 8), []
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
        rest = -(-(length % 100) // 8)  # convolutions of stride 2 leave an eighth of what isn't 100
        sizes.append(13 * (length // 100) + rest)
    sounds = torch.randn(2, 8, 100 * chunks, generator=torch.Generator().manual_seed(3))
    given = {"input_features": sounds * mask[:, None], "input_features_mask": mask}
    ids = torch.full((1, sum(sizes) + 3), TOKEN)
    ids[0, [0, sizes[0] + 1, -1]] = TOKEN + 3
    found = compiled("qwen3_asr").generate(ids, STEPS, None, eos_token_id=[], **given)
    assert torch.equal(found, expected("qwen3_asr", ids, torch.ones_like(ids), given))


@pytest.mark.machine
@pytest.mark.slow
@pytest.mark.parametrize("frames", [1, 17])
def test_sounds_have_any_number_of_frames(frames: int) -> None:
    """Up to the places that the encoder has for them, which the sample fills."""
    lengths = (frames, (frames + 2) // 3)
    shown = torch.arange(frames)[None] < torch.tensor(lengths)[:, None]
    sounds = torch.randn(2, frames, 12, generator=torch.Generator().manual_seed(3))
    given = {"input_features": sounds, "input_features_mask": shown.long()}
    ids = torch.full((1, sum(lengths) + 3), TOKEN)
    ids[0, [0, lengths[0] + 1, -1]] = TOKEN + 3
    model = compiled("fun_asr_nano")
    found = model.generate(ids, STEPS, None, eos_token_id=[], **given)
    assert torch.equal(found, expected("fun_asr_nano", ids, torch.ones_like(ids), given))
    with pytest.raises(UsageError, match="'frames' was compiled for at most 40"):
        model.generate(
            ids, 2, None, **{n: t[:, :1].repeat_interleave(41, 1) for n, t in given.items()}
        )


@pytest.mark.machine
@pytest.mark.slow
def test_a_mask_of_rows_that_forward_applies_is_read() -> None:
    sounds = torch.randn(2, 24, 8, generator=torch.Generator().manual_seed(3))
    given = {
        "input_features": sounds,
        "input_features_mask": torch.arange(8)[None] < torch.tensor([[8], [3]]),
    }
    rows = torch.export.Dim("sounds")
    shapes = {name: {0: rows} for name in given}
    model = attngraph.optimize_multimodal(eager("granite_speech"), given, image_shapes=shapes)
    ids = torch.full((1, 13), TOKEN)
    ids[0, [0, 9]] = TOKEN + 3
    found = model.generate(ids, STEPS, None, eos_token_id=[], **given)
    assert torch.equal(found, expected("granite_speech", ids, torch.ones_like(ids), given))


@pytest.mark.machine
@pytest.mark.slow
@pytest.mark.parametrize("order", [((0, 1), (1, 0)), ((1,), (0,)), ((), (1, 1, 0))], ids=str)
def test_images_and_sounds_stand_in_one_prompt(order: tuple[tuple[int, ...], ...]) -> None:
    """0 is an image and 1 a sound; prompts of either alone are those of other tests."""
    sides, model = parts("gemma4").sides, compiled("gemma4")
    ids = torch.randint(TOKEN + 1, 100, (2, 50), generator=torch.Generator().manual_seed(3))
    mask, given, sizes = torch.ones_like(ids), {}, {}
    for place, side in enumerate(sides):
        rows = [row.count(place) for row in order]
        if any(rows):
            drawn, sizes[place] = side.drawn(sum(rows), torch.Generator().manual_seed(5), rows)
            given |= drawn
    for row, places in enumerate(order):
        mask[row, :row], start = 0, 2 + row
        for place in places:
            size = sizes[place].pop(0)
            ids[row, start : start + size] = sides[place].joining.token
            start += size + 1
    found = model.generate(ids, STEPS, mask, eos_token_id=[], **given)
    assert torch.equal(found, expected("gemma4", ids, mask, given))
    with pytest.raises(UsageError, match="tokens 6, which stand for sounds: give input_features"):
        model.generate(ids, 2, mask, **{n: e for n, e in given.items() if "input" not in n})
    with pytest.raises(UsageError, match="There is no input videos; there are pixel_values"):
        model.generate(ids, 2, mask, **given, videos=ids)


@pytest.mark.machine
def test_a_padding_token_that_the_model_does_not_know_is_none() -> None:
    """Tokenizers add one, and old configs write -1; a caller's own is told."""
    (ids, mask), given, made = prompt("llava", 1), images("llava", 1), compiled("llava")
    rules = replace(made.rules, pad_token_id=-1, eos_token_id=(90_000,))
    model = Multimodal(made.parts, made.decoder, made.joinings, rules)
    found = model.generate(ids, STEPS, mask, **given)
    assert torch.equal(found, expected("llava", ids, mask, given))
    with pytest.raises(UsageError, match="pad_token_id is -1"):
        model.generate(ids, STEPS, mask, pad_token_id=-1, **given)


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
    kind = compiled(family).joining.modality
    vision = onnx.load(tmp_path / kind.encoder)
    said = {each.key: each for each in vision.metadata_props}["attngraph.images"]
    told = json.loads(said.value)
    said.value = json.dumps({**told, "token": TOKEN + 1})
    onnx.save(vision, tmp_path / kind.encoder)
    with pytest.raises(ParityError, match=f"puts {kind.what} where ids are 8"):
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
