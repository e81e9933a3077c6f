"""The rules by which images join the text are those of transformers, and others are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attngraph
from attngraph.decoding.compile_multimodal import _prompt, _shown
from attngraph.decoding.lengths import lengths_of
from attngraph.errors import UsageError
from attngraph.frontend.families.image_grids import (
    ENDS,
    SEGMENTS,
    Places,
    patches_placed,
    within_segments,
)
from attngraph.frontend.families.image_parts import FEATURES, Embed, Join, Vision
from attngraph.frontend.families.image_samples import sample_images
from attngraph.frontend.families.image_sizes import Tiles, images_apart
from attngraph.frontend.families.multimodal import of_images
from attngraph.frontend.families.stateful_lm import Forms
from attngraph.frontend.interface.modalities import joined_by
from attngraph.frontend.model import trace
from attngraph.inference import inference
from tests.models.kit import HIDDEN
from tests.parity.multimodal import FAMILIES, TOKEN, eager, images, parts
from tests.parity.test_decode import common


def test_a_config_that_does_not_say_what_a_patch_is_is_told() -> None:
    vision = SimpleNamespace(spatial_merge_size=2, in_chans=3)
    model = SimpleNamespace(
        config=SimpleNamespace(vision_config=vision),
        forward=eager("qwen2_vl").forward,
        dtype=torch.float32,
    )
    with pytest.raises(UsageError, match=r"no patch_size of its patches.*give"):
        sample_images(model, "it")


@pytest.mark.parametrize(
    ("family", "sees", "begin"),
    [
        ("llava", None, 0),
        ("gemma3", "images", 0),
        ("gemma4", None, 0),
        ("gemma4_large", "images", 0),
        ("paligemma", "prompt", 1),
    ],
)
def test_what_sees_itself_and_where_positions_begin(
    family: str, sees: str | None, begin: int
) -> None:
    made = parts(family).first
    assert (made.joining.sees, parts(family).whole.begin) == (sees, begin)


def test_positions_that_do_not_count_on_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = eager("paligemma")
    monkeypatch.setattr(
        model,
        "prepare_inputs_for_generation",
        lambda ids, position_ids, **_: {"position_ids": position_ids * 2},
    )
    with pytest.raises(UsageError, match="yet: its generate doesn't place the tokens one behind"):
        of_images(model, None, None, "it")


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
    assert torch.equal(found[SEGMENTS], _numbered(get_vision_cu_seqlens(grid)))
    assert found[ENDS].tolist() == [0, 24, 28, 92, 232]
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
        ("Mistral3ForConditionalGeneration", True),
        ("LlavaNextForConditionalGeneration", True),
        ("Qwen3VLForConditionalGeneration", True),
        ("Qwen2AudioForConditionalGeneration", True),
        ("Gemma4ForConditionalGeneration", True),  # images and sounds
        ("JanusForConditionalGeneration", True),  # the model that it puts a head on encodes
        ("DeepseekVLHybridForConditionalGeneration", False),  # so does that, images of two sizes
        ("Qwen2_5OmniThinkerForConditionalGeneration", False),  # images and sounds
        ("MusicFlamingoForConditionalGeneration", False),  # encodes the ids too
        ("Florence2ForConditionalGeneration", False),
        ("LlavaOnevisionForConditionalGeneration", True),
        ("LlavaNextVideoForConditionalGeneration", True),
        ("LlamaForCausalLM", False),
    ],
)
def test_a_class_says_whether_its_rule_is_known(name: str, known: bool) -> None:
    import transformers

    assert bool(joined_by(getattr(transformers, name))) is known


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_are_the_whole_before_anything_is_compiled(family: str) -> None:
    """`of_images` raises where they aren't."""
    for made in parts(family).sides:
        given, counts = made.drawn(3, torch.Generator().manual_seed(5))
        vision: Any = made.vision.module
        with inference(eager(family)):
            rows = vision.encoded(given, made.joining.unit or 1)[FEATURES]
        assert len(rows) == sum(counts)
    assert not parts(family).notes


@pytest.mark.parametrize("grows", [False, pytest.param(True, marks=pytest.mark.wide)])
def test_lengths_at_which_a_decoder_of_embeddings_changes_are_found(grows: bool) -> None:
    """With LongRoPE behind 16 tokens; the same tokens have the same embeddings in longer rows."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        image_size=8, patch_size=4,
    )  # fmt: skip
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
    if grows:
        factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0}
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": 16, **factors}
    text = {"model_type": "llama", **common(num_hidden_layers=1, rope_parameters=rope)}
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=TOKEN)
    decoder = of_images(LlavaForConditionalGeneration(config).eval(), None, None, "it").decoder
    module: Any = decoder.module
    graph = trace(decoder).graph
    assert lengths_of(graph, module.layout(graph)).switches == ((16,) if grows else ())


def test_prompts_of_several_kinds_have_tokens_for_each() -> None:
    """As the check over steps draws them."""
    images, sounds = parts("gemma4").sides
    assert (images.joining.token, sounds.joining.token) == (TOKEN, TOKEN - 1)
    assert images.joining.modality.taken.isdisjoint(sounds.joining.modality.taken)
    model: Any = SimpleNamespace(decoder=SimpleNamespace(layout=SimpleNamespace(vocabulary=90)))
    shown = dict(_shown(parts("gemma4").sides))
    given, ids, mask, first = _prompt(parts("gemma4"), model, shown["each in one prompt"])
    assert given.keys() == {
        "pixel_values", "image_position_ids", "input_features", "input_features_mask",
    }  # fmt: skip
    counts = [int((ids == side.joining.token).sum()) for side in (images, sounds)]
    with inference(eager("gemma4")):
        rows = [
            side.vision.module({n: given[n] for n in side.joining.modality.taken & given.keys()})
            for side in (images, sounds)
        ]
        parts("gemma4").whole(given, ids[:, :first], mask[:, :first])
    assert counts == [len(each[FEATURES]) for each in rows]


def test_tiles_that_give_fewer_rows_than_they_have_patches_are_told() -> None:
    """Granite 4 Vision samples its features, and its decoder's layers add them."""
    import transformers

    vision = transformers.SiglipVisionConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=2, intermediate_size=16,
        image_size=16, patch_size=4,
    )  # fmt: skip
    former = transformers.Blip2QFormerConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        encoder_hidden_size=64, cross_attention_frequency=1, use_qformer_text_input=False,
    )  # fmt: skip
    config = transformers.Granite4VisionConfig(
        vision_config=vision,
        text_config=transformers.Granite4VisionTextConfig(**common(num_hidden_layers=4)),
        qformer_config=former,
        image_token_index=TOKEN,
        image_grid_pinpoints=[[16, 32], [32, 16]],
        deepstack_layer_map=[[-1, 0]],
        spatial_target_layers=[0, 1, 2, 3],
        vision_feature_select_strategy="full",
        downsample_rate="2/4",
    )
    model = transformers.Granite4VisionForConditionalGeneration(config).eval()
    with pytest.raises(UsageError, match="its tiles have 16 patches and 4 rows of features each"):
        of_images(model, None, None, "it")


def test_what_a_class_hands_its_decoder_for_ids_is_what_is_embedded() -> None:
    """A token that stands for a video is none of the table's there."""
    model, ids = eager("gemma4"), torch.tensor([[9, TOKEN - 2, 30, 0]])
    with inference(model):
        found = parts("gemma4").embed.module(ids)  # type: ignore[misc]
        logits = model(**found, use_cache=False).logits
        expected = model(input_ids=ids, use_cache=False).logits
        plain = Embed(model, TOKEN)(ids)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)
    assert not torch.equal(plain["inputs_embeds"], found["inputs_embeds"])


def test_a_kind_without_a_tower_is_left_out_and_one_that_fails_is_told() -> None:
    assert [side.joining.sound for side in parts("gemma4_large").sides] == [False]
    model: Any = eager("gemma4")
    pixels = dict(parts("gemma4").sides[0].vision.args[0])
    made = of_images(model, pixels, {name: {0: Dim("images")} for name in pixels}, "it")
    assert [side.joining.sound for side in made.sides] == [False]
    assert not made.notes  # the caller gave images alone
    own = model.model.audio_tower
    model.model.audio_tower = None
    try:
        made = of_images(model, None, None, "it")
    finally:
        model.model.audio_tower = own
    assert [side.joining.sound for side in made.sides] == [False]
    assert made.notes[0].startswith("it takes sounds as well, which the files don't: ")


@pytest.mark.parametrize("family", ["qwen3_vl", "mistral3", "llava_next"])
def test_rows_in_another_order_are_told(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Vision.forward

    def flipped(self: Vision, images: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: each.flip(-2) for name, each in own(self, images).items()}

    monkeypatch.setattr(Vision, "forward", flipped)
    with pytest.raises(UsageError, match="no compiler joins these to the tokens"):
        of_images(eager(family), None, None, family)


def test_parts_that_fail_are_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as if the model didn't take two images: Granite 4 Vision's does."""

    def fails(self: Vision, images: dict[str, Tensor]) -> dict[str, Tensor]:
        raise IndexError("index 4 is out of bounds")

    monkeypatch.setattr(Vision, "forward", fails)
    with pytest.raises(UsageError, match=r"names as its parts, .*index 4 is out.*its text alone"):
        of_images(eager("llava"), None, None, "it")


def test_states_that_several_tokens_do_not_go_on_from_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An image's tokens come in one call."""
    monkeypatch.setattr(Forms, "takes_several", property(lambda forms: False))
    with pytest.raises(UsageError, match="it takes one token a call"):
        of_images(eager("qwen3_5"), None, None, "it")


def test_features_for_layers_that_are_left_out_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Join.forward

    def without(self: Join, *args: Tensor, **given: Tensor) -> dict[str, Tensor]:
        joined = own(self, *args, **given)
        return {**joined, "deepstack_embeds": joined["deepstack_embeds"] * 0}

    monkeypatch.setattr(Join, "forward", without)
    with pytest.raises(UsageError, match="no compiler joins these to the tokens"):
        of_images(eager("qwen3_vl"), None, None, "it")


def test_tiles_are_those_of_transformers() -> None:
    """Of thousands of sizes, at the resolutions of LLaVA 1.6."""
    from transformers.image_processing_utils import select_best_resolution

    listed = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    tiles = Tiles(336, 24, tuple((height, width) for height, width in listed))
    random = torch.Generator().manual_seed(0)
    sizes = torch.cat(
        [
            torch.randint(1, 3000, (3000, 2), generator=random),
            torch.tensor([(1, 1), (1, 4000), (4000, 1), (336, 336), (672, 672), (49, 98), *listed]),
        ]
    )
    found = tiles.grids(sizes) * 336
    expected = [select_best_resolution(tuple(size), listed) for size in sizes.tolist()]
    assert found.tolist() == [list(each) for each in expected]


def test_rows_of_tiles_are_those_of_transformers() -> None:
    model = eager("llava_next").model
    tiles = Tiles.of(model)
    assert tiles is not None
    random = torch.Generator().manual_seed(0)
    sizes = torch.cat([torch.randint(1, 60, (200, 2), generator=random), tiles.drawn(8)])
    features = torch.randn(len(sizes), tiles.most, tiles.side**2, 3, generator=random)
    newline = torch.randn(3, generator=random)
    counts = (1 + tiles.grids(sizes).prod(-1)).tolist()
    expected, lengths = model.pack_image_features(
        [each[:count] for each, count in zip(features, counts, strict=True)],
        sizes,
        vision_feature_select_strategy="default",
        image_newline=newline,
    )
    assert torch.equal(tiles.packed(features, newline, sizes), torch.cat(expected))
    assert tiles.tokens(sizes) == lengths.tolist()


def test_rows_of_tiles_that_are_shrunk_are_those_of_transformers() -> None:
    """At the numbers of tiles of LLaVA-OneVision, where 135 // (5 / 3) is 80 and not 81."""
    from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel

    listed = [(a * 36, b * 36) for a in range(1, 7) for b in range(1, 7)]
    tiles = Tiles(36, 9, tuple(listed), shrunk=9)
    own = SimpleNamespace(
        config=SimpleNamespace(
            vision_config=SimpleNamespace(image_size=36, patch_size=4),
            image_grid_pinpoints=[list(each) for each in listed],
        )
    )
    random = torch.Generator().manual_seed(0)
    sizes = torch.cat([torch.randint(1, 300, (60, 2), generator=random), torch.tensor(listed)])
    features = torch.randn(len(sizes), tiles.most, tiles.side**2, 2, generator=random)
    newline = torch.randn(2, generator=random)
    counts = 1 + tiles.grids(sizes).prod(-1)
    images = {
        "pixel_values": features,
        "image_sizes": sizes,
        "batch_num_images": torch.tensor([1] * 40 + [5, 0] + [1] * (len(sizes) - 45)),
    }
    alone = tiles.alone(images)
    assert alone is not None
    assert alone.tolist() == [True] * 40 + [False] * 5 + [True] * (len(sizes) - 45)
    counts = torch.where(alone, counts, 1).tolist()
    expected, lengths = LlavaOnevisionModel.pack_image_features(
        own,
        [each[:count] for each, count in zip(features, counts, strict=True)],
        sizes,
        image_newline=newline,
    )
    assert tiles.tokens(sizes, alone) == lengths.tolist()
    packed = tiles.packed(features, newline, sizes, alone)
    torch.testing.assert_close(packed, torch.cat(expected), rtol=0, atol=2e-5)


def test_tables_of_positions_are_resampled_as_in_transformers() -> None:
    from transformers.vision_utils import get_vision_interpolation_indices_and_weights

    grid = torch.tensor([[1, 4, 6], [1, 2, 2], [2, 8, 4], [1, 10, 14]])
    count = int(grid.prod(-1).sum())
    indices, weights = get_vision_interpolation_indices_and_weights(
        grid, 4, align_corners=True, spatial_merge_size=2
    )
    found = patches_placed(grid, count, 2, None, side=4)
    table = torch.randn(16, generator=torch.Generator().manual_seed(0))
    own = (table[found["image_interp_indices"]] * found["image_interp_weights"]).sum(1)
    torch.testing.assert_close(own, (table[indices] * weights).sum(1), rtol=0, atol=1e-6)


def test_sizes_that_are_not_those_of_the_images_are_told() -> None:
    pixels = torch.zeros(2, 3, 16, 24)
    for sizes, told in (
        ([[16, 24]], "must be \\(2, 2\\)"),
        (
            [[16, 24], [16, 32]],
            "has 16 x 32 pixels, and pixel_values has room for 16 x 24",
        ),
        ([[16, 24], [0, 8]], "has 0 x 8 pixels"),
        ([[16, 24], [8, 12]], "both must be multiples of 8"),
    ):
        given = {"pixel_values": pixels, "image_sizes": torch.tensor(sizes)}
        with pytest.raises(UsageError, match=told):
            images_apart(given, 8)
    tiles = Tiles(8, 2, ((8, 16), (16, 16)))
    for sizes, told in (
        ([[16, 16], [8, 16]], "has 3 tiles for each image, and image_sizes asks for 5"),
        ([[8, 16], [0, 16]], "must be \\(2, 2\\)"),
    ):
        given = {"pixel_values": torch.zeros(2, 3, 3, 8, 8), "image_sizes": torch.tensor(sizes)}
        with pytest.raises(UsageError, match=told):
            tiles.require(given)


def test_features_are_added_to_the_tokens_they_are_of_in_each_layer() -> None:
    ids, embeds = torch.tensor([[TOKEN, 1], [2, TOKEN]]), torch.zeros(2, 2, 1)
    deep = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])
    joined = Join(TOKEN)(ids, embeds, deep[0], deep)["deepstack_embeds"]
    assert joined[..., 0].tolist() == [[[1, 0], [0, 2]], [[3, 0], [0, 4]]]


def test_what_stands_in_for_attention_is_taken_out_again() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = dict(ALL_ATTENTION_FUNCTIONS)
    ends, segments = torch.tensor([0, 2, 3]), torch.tensor([0, 0, 1])
    with within_segments(nn.Linear(1, 1), ends, segments):
        assert len(ALL_ATTENTION_FUNCTIONS) == len(before) + 1
    assert dict(ALL_ATTENTION_FUNCTIONS) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_model_with_another_rule_is_refused(dtype: torch.dtype) -> None:
    model = eager("llava")
    scaled = type(model)(model.config).eval().to(dtype)  # type: ignore[arg-type, call-arg]
    own = scaled.model.get_placeholder_mask
    scaled.model.get_placeholder_mask = lambda ids, **given: own(ids.flip(1), **given)
    with pytest.raises(UsageError, match="yet: its images don't just take the places of their"):
        attngraph.optimize_multimodal(scaled)
