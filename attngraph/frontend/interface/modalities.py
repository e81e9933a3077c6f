"""What models of transformers take beside text, such as images, sound and boxes on a page."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from attngraph.errors import UsageError

# What a text model's forward takes beside its tokens and cache: it computes without them what it
# does in generate, or they only choose what is returned.
_OF_TEXT = {
    *("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "labels"),
    *("token_type_ids", "cache_position", "logits_to_keep", "num_logits_to_keep", "head_mask"),
    *("cross_attn_head_mask", "per_layer_inputs", "layer_past", "router_labels", "cu_seq_lens"),
    *("task_type_ids", "input_shape_ids", "input_pronunciation_ids", "lang_ids", "langs"),
    *("lengths", "cache", "mems", "perm_mask", "target_mapping", "input_mask", "state"),
    *("past_buckets_states", "attention_probs_mask", "next_sentence_label"),
    *("use_cache", "output_attentions", "output_hidden_states", "output_router_logits"),
    *("return_dict", "self", "shared_kv_states", "start_positions", "end_positions"),
}
_OF_ENCODER = {"encoder_hidden_states", "encoder_attention_mask", "encoder_outputs"}
_FILLS = ("decoder_", ("_mask", "_labels"))
"""Begins the names of what goes on from text; ends those of masks, which all have a default, and of
what a model is trained with.
"""

PIXELS = "pixel_values"
GRID = "image_grid_thw"
"""(N, 3): frames, rows and columns of patches of each image."""
OF_QWEN2_VL = "grid_thw"
FILE_NAMES = {OF_QWEN2_VL: GRID}
"""Inputs of vision encoders whose name in a file, which transformers.js looks for, is another."""
SHOWN = "pixel_attention_mask"
"""(rows, N, height, width): where rows of images have pixels, and so are five axes of `PIXELS`."""
SIZES = "image_sizes"
"""(N, 2): rows and columns of pixels of each image, which `PIXELS` pads or holds tiles of."""
_IMAGES = {PIXELS, GRID, SHOWN, SIZES}
_LEFT_OUT = {
    *("pixel_values_videos", "video_grid_thw", "second_per_grid_ts"),
    *("mm_encoder_outputs", "mm_token_type_ids", "rope_deltas"),
}
"""What such a model takes as well, and computes without by default."""
_GIVES = ("BaseModelOutputWithPooling", "BaseModelOutputWithDeepstackFeatures")

TEXT_ALONE = (
    "To have its text alone, compile a subclass whose forward takes no more than text and hands "
    "that to super().forward: README.md shows one."
)


def cache_parameter(forward: Any) -> str:
    """What a forward calls a cache of transformers: `cache` from 5.24 on, else `past_key_values`.

    XLM's `cache`, a dict, is none.
    """
    taken = inspect.signature(forward).parameters
    renamed = taken.get("cache")
    if "past_key_values" in taken or renamed is None or "Cache" not in str(renamed.annotation):
        return "past_key_values"
    return renamed.name


def other_tensors(kind: type[Any], *, crosses: bool = False) -> list[str]:
    """What a class's forward takes beside text, as images are, and a decoder is compiled without.

    A parameter that isn't annotated counts if its name isn't known. What an encoder gives counts
    where there are cross-attentions to read it.
    """
    known = _OF_TEXT if crosses else _OF_TEXT | _OF_ENCODER
    return [
        parameter.name
        for parameter in inspect.signature(kind.forward).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and parameter.name not in known
        and (parameter.annotation is parameter.empty or "Tensor" in str(parameter.annotation))
    ]


def beside_text(kind: type[Any], given: Collection[str] = ()) -> list[str]:
    """What a class that reads text encodes as well, beside what is `given`; masks are left out."""
    if "input_ids" not in (getattr(kind, "main_input_name", None) or ()):
        return []
    begins, ends = _FILLS
    return [
        name
        for name in other_tensors(kind)
        if name not in given and not name.startswith(begins) and not name.endswith(ends)
    ]


def is_multimodal(module: nn.Module | None) -> bool:
    """Whether the module is a model of transformers whose images join its tokens by that rule."""
    return module is not None and is_joined(type(module))


def is_joined(kind: type[Any]) -> bool:
    """Whether a class says where its images join the text, and takes nothing else beside it."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not issubclass(kind, transformers.PreTrainedModel):
        return False
    encode: Any = getattr(kind, "get_image_features", None)
    if encode is None or not kind.can_generate():
        return False
    said = inspect.signature(encode)
    given = said.return_annotation
    tensors = [each for each in said.parameters.values() if "Tensor" in str(each.annotation)]
    left = {each.name for each in tensors if each.default is not each.empty} & _LEFT_OUT
    taken = inspect.signature(kind.forward).parameters
    beside = set(other_tensors(kind)) - _LEFT_OUT
    return (
        (given is said.empty or str(given).endswith(_GIVES))
        and {each.name for each in tensors} - left <= _IMAGES
        and beside <= _IMAGES
        and {PIXELS, "input_ids", "inputs_embeds", cache_parameter(kind.forward)} <= set(taken)
    )


def first_place(model: Any, ids: Tensor) -> int | None:
    """The position that a model's generate gives the first token of rows (B, S) without padding, if
    it counts on from there: 0, and 1 of PaliGemma. It reads no weights."""
    own = torch.arange(ids.shape[1]).expand(ids.shape)
    given = model.prepare_inputs_for_generation(
        ids, attention_mask=torch.ones_like(ids), position_ids=own.clone(), use_cache=True
    )
    found = given.get("position_ids")
    if found is None:
        return 0
    begin = int(found.flatten()[0])
    return begin if torch.equal(found, own + begin) else None


def refuse_mixed(kind: type[Any], source: str) -> NoReturn:
    """Raises UsageError for a class whose prompts hold more than text, with what can be done."""
    others, name = beside_text(kind) or other_tensors(kind), kind.__name__
    subject = f"{name} takes" if source == name else f"{source} is a {name}, which takes"
    raise UsageError(
        f"{subject} {', '.join(others)} beside text, and no compiler joins these to the tokens "
        f"yet. {TEXT_ALONE} Its tower of images or sound compiles from a --factory that returns it."
    )
