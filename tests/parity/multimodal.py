"""Small models that read images or listen, compiled once each, and what eager generates."""

from __future__ import annotations

import functools
from collections.abc import Callable
from inspect import signature

import torch
from torch import Tensor, nn

import attngraph
from attngraph import Multimodal
from attngraph.frontend.families.image_parts import Seen, kinds_of, kinds_parameter
from attngraph.frontend.families.multimodal import Parts, of_images
from tests.models.kit import VOCABULARY, peaked
from tests.parity.listening import LISTENING, TOKEN, granite_speech
from tests.parity.seeing import SEEING

STEPS = 10
FAMILIES: dict[str, Callable[[], nn.Module]] = {**SEEING, **LISTENING}
OF_SAMPLES: dict[str, Callable[[], nn.Module]] = {"granite_speech": granite_speech}
"""Those whose sounds have no length of their own, and can't be traced for any."""
TAKES_MINUTES = {
    *("gemma3", "qwen2_5_vl", "internvl", "smolvlm", "idefics3", "paligemma"),
    *("qwen3_vl", "pixtral", "mistral3", "llava_next"),
    *("llava_onevision", "qwen2_audio", "voxtral", "glmasr", "audioflamingo3"),
    *("glm4v", "exaone4_5", "qwen3_5", "llama4", "qwen3_asr", "fun_asr_nano", "deepseek_vl"),
    *("gemma4", "gemma4_large"),
}


@functools.cache
def eager(family: str) -> nn.Module:
    torch.manual_seed(0)
    return peaked({**FAMILIES, **OF_SAMPLES}[family]().eval())


@functools.cache
def compiled(family: str) -> Multimodal:
    return attngraph.optimize_multimodal(eager(family))


@functools.cache
def parts(family: str) -> Parts:
    return of_images(eager(family), None, None, family)


def images(family: str, *rows: int) -> dict[str, Tensor]:
    """Images of a prompt whose rows have so many each."""
    count = sum(rows)
    return parts(family).first.drawn(count, torch.Generator().manual_seed(count), rows)[0]


def prompt(family: str, *rows: int) -> tuple[Tensor, Tensor]:
    """Ids and mask of rows with so many images each, padded on the left."""
    seed = torch.Generator().manual_seed(len(rows))
    sizes = parts(family).first.drawn(sum(rows), torch.Generator(), rows)[1]
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
    kinds: dict[str, Tensor] = {}
    if family in _SEES:
        kinds = {str(kinds_parameter(model)): kinds_of(_SEES[family], ids == TOKEN)}
    if "image_grid_thw" in given and "mm_token_type_ids" in signature(model.forward).parameters:
        kinds = {"mm_token_type_ids": (ids == TOKEN).int()}
    tokens: Tensor = model.generate(  # type: ignore[operator]
        input_ids=ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False,
        eos_token_id=None, **given, **kinds,
    )  # fmt: skip
    return tokens


_SEES: dict[str, Seen] = {"gemma3": "images", "gemma4_large": "images", "paligemma": "prompt"}
