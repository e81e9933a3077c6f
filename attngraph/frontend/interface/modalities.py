"""What models of transformers take beside text, such as images, sound and boxes on a page."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, get_args

import torch
from torch import Tensor, nn

from attngraph.errors import UsageError
from attngraph.frontend.interface.encoders import WITHOUT_METHOD

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
IN_ROWS = "batch_num_images"
"""(rows,): how many images each row of text has; one that is alone there is cut into tiles."""
PATCH_PLACES = "image_position_ids"
"""(N, P, 2): column and row of each patch of images that are P patches each; −1 where one pads."""
SOUNDS = "input_features"
"""(N, bins, frames): mel spectrograms, padded to the length that the encoder takes."""
FRAMES_SHOWN = ("input_features_mask", "feature_attention_mask")
"""(N, frames): how a class calls what says where sounds aren't padded."""


@dataclass(frozen=True)
class Modality:
    """What is encoded beside text: one of `what` by the method `encode`, from the inputs `taken`,
    of which `main` are its numbers. Its token's id is one of `tokens` in a config; `rows` is what
    files call its features, of which `encoder` gives them and `join` puts them among the text's.
    `task` is its (attngraph/checkpoints/tasks.py). Of a model whose config has one of `towers`, and
    all that it has are null, there is none.
    """

    one: str
    what: str
    encode: str
    main: str
    taken: frozenset[str]
    tokens: tuple[str, ...]
    rows: str
    encoder: str
    join: str
    task: str
    towers: tuple[str, ...]

    def is_left_out(self, config: Any) -> bool:
        """Whether a config, or what config.json says, names its tower and leaves it out."""
        known = config if isinstance(config, Mapping) else vars(config)
        given = [known[name] for name in self.towers if name in known]
        return bool(given) and all(each is None for each in given)


IMAGES = Modality(
    "an image",
    "images",
    "get_image_features",
    PIXELS,
    frozenset({PIXELS, GRID, SHOWN, SIZES, IN_ROWS, PATCH_PLACES}),
    ("image_token_id", "image_token_index"),
    "image_features",
    "vision_encoder.onnx",
    "join_images.onnx",
    "image-text-to-text",
    ("vision_config",),
)
SOUND = Modality(
    "a sound",
    "sounds",
    "get_audio_features",
    SOUNDS,
    frozenset({SOUNDS, *FRAMES_SHOWN}),
    ("audio_token_id", "audio_token_index"),
    "audio_features",
    "audio_encoder.onnx",
    "join_sounds.onnx",
    "audio-text-to-text",
    ("audio_config", "encoder_config"),
)
MODALITIES = (IMAGES, SOUND)
_LEFT_OUT = {
    *("pixel_values_videos", "video_grid_thw", "second_per_grid_ts"),
    *("image_sizes_videos", "video_position_ids", "num_frames_per_video"),
    *("mm_encoder_outputs", "mm_token_type_ids", "rope_deltas"),
}
"""What such a model takes as well, and computes without by default."""
_GIVES = "BaseModelOutputWithPooling"
"""A method that encodes says that it returns one, or says nothing."""

PLACED_OTHERWISE = "its generate doesn't place the tokens one behind the other"
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


def reads_text_alone(kind: type[Any]) -> bool:
    """Whether a class encodes text and nothing else."""
    return _reads_text(kind) and not beside_text(kind)


def _reads_text(kind: type[Any]) -> bool:
    return "input_ids" in (getattr(kind, "main_input_name", None) or ())


def beside_text(kind: type[Any], given: Collection[str] = ()) -> list[str]:
    """What a class that reads text encodes as well, beside what is `given`; masks are left out."""
    if not _reads_text(kind):
        return []
    begins, ends = _FILLS
    return [
        name
        for name in other_tensors(kind)
        if name not in given and not name.startswith(begins) and not name.endswith(ends)
    ]


def is_multimodal(module: nn.Module | None) -> bool:
    """Whether the module is a model of transformers whose images or sounds join its tokens by that
    rule."""
    return module is not None and bool(joined_by(type(module)))


def joined_by(kind: type[Any]) -> tuple[Modality, ...]:
    """What joins a class's text, where it says how and takes nothing else beside it."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not issubclass(kind, transformers.PreTrainedModel):
        return ()
    if not kind.can_generate():
        return ()
    found = tuple(each for each in MODALITIES if _is_joined(kind, each))
    taken = _LEFT_OUT.union(*(each.taken for each in found))
    return found if taken.issuperset(other_tensors(kind)) else ()


def _is_joined(kind: type[Any], modality: Modality) -> bool:
    encode = _encoding(kind, modality)
    needed = {modality.main, "input_ids", "inputs_embeds", cache_parameter(kind.forward)}
    if not needed <= set(inspect.signature(kind.forward).parameters):
        return False
    if encode is None:
        return kind.__name__ in WITHOUT_METHOD
    given = inspect.signature(encode).return_annotation
    is_known = given is inspect.Signature.empty or _gives_rows(given)
    return is_known and _taken(encode) <= modality.taken


def _taken(encode: Any) -> set[str]:
    """What a method that encodes needs, and what tensors it takes."""
    said = inspect.signature(encode)
    tensors = [each for each in said.parameters.values() if "Tensor" in str(each.annotation)]
    left = {each.name for each in tensors if each.default is not each.empty} & _LEFT_OUT
    wanted = {
        each.name
        for each in said.parameters.values()
        if each.kind is each.POSITIONAL_OR_KEYWORD and each.default is each.empty
    }
    return wanted - {"self"} | {each.name for each in tensors} - left


def _gives_rows(annotation: Any) -> bool:
    """Whether a method says that it returns an output with a pooler's, whatever else it may."""
    kinds = get_args(annotation) or (annotation,)
    names = (each.__name__ for kind in kinds for each in getattr(kind, "__mro__", ()))
    return _GIVES in names or str(annotation).endswith(_GIVES)


def _encoding(kind: type[Any], modality: Modality) -> Any | None:
    """The method of a class that encodes, or of the class that it puts a head on."""
    if (own := getattr(kind, modality.encode, None)) is not None:
        return own
    mapping: Any = sys.modules["transformers"].MODEL_MAPPING
    return getattr(mapping.get(kind.config_class, None), modality.encode, None)


def encoding(model: Any, modality: Modality) -> Any | None:
    """The method of a model that encodes, its own or that of the model it puts a head on."""
    parts = (model, getattr(model, "base_model", None))
    return next((each for p in parts if (each := getattr(p, modality.encode, None))), None)


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


def refuse_mixed(kind: type[Any], source: str, because: str | None = None) -> NoReturn:
    """Raises UsageError for a class whose prompts hold more than text, with what can be done.

    What is missing is read off the class, unless it is known from what its model computes.
    """
    others, name = beside_text(kind) or other_tensors(kind), kind.__name__
    subject = f"{name} takes" if source == name else f"{source} is a {name}, which takes"
    raise UsageError(
        f"{subject} {', '.join(others)} beside text, and no compiler joins these to the tokens "
        f"yet: {because or _missing(kind)}. {TEXT_ALONE} Its tower of images or sound compiles "
        "from a --factory that returns it."
    )


def _missing(kind: type[Any]) -> str:
    """Why what a class takes beside text isn't joined to it."""
    others = [name for name in other_tensors(kind) if name not in _LEFT_OUT]
    if any(name.startswith(_FILLS[0]) for name in others):
        return "it is an encoder-decoder, and they are joined to the prompts of decoders alone"
    known = [each for each in MODALITIES if each.main in others]
    if not known:
        return f"how its class encodes {', '.join(others)} isn't known"
    if more := [n for n in others if not any(n in modality.taken for modality in known)]:
        return f"the use of {', '.join(more)} isn't known"
    reasons = {each: _unlike(kind, each) for each in known}
    return next(reason for reason in reasons.values() if reason)


def _unlike(kind: type[Any], modality: Modality) -> str:
    """How a class's method that encodes differs from those of others; "" if it doesn't."""
    if _is_joined(kind, modality):
        return ""
    encode = _encoding(kind, modality)
    if encode is None:
        return f"its class has no {modality.encode} that gives what takes the tokens' places"
    if more := sorted(_taken(encode) - modality.taken):
        return f"its {modality.encode} takes {', '.join(more)} too"
    return f"what its {modality.encode} returns isn't known"
