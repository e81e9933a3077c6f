"""The rules by which images join the text are those of transformers, and others are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.errors import UsageError
from attngraph.frontend.image_grids import Places, patches_placed, within_segments
from attngraph.frontend.image_parts import Join, Vision
from attngraph.frontend.image_samples import sample_images
from attngraph.frontend.modalities import is_joined
from attngraph.inference import inference
from tests.models.kit import HIDDEN
from tests.parity.multimodal import TOKEN, eager, images


def test_a_config_that_does_not_say_what_a_patch_is_is_told() -> None:
    vision = SimpleNamespace(spatial_merge_size=2, in_chans=3, patch_size=4)
    model = SimpleNamespace(
        config=SimpleNamespace(vision_config=vision),
        forward=eager("qwen2_vl").forward,
        dtype=torch.float32,
    )
    with pytest.raises(UsageError, match=r"no temporal_patch_size of its patches.*give"):
        sample_images(model, "it")


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
