"""Tiny encoders that other runtimes are asked for, with inputs and dynamic dims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from tests.models.kit import FEED_FORWARD, HEADS, HIDDEN, LAYERS, VOCABULARY
from tests.parity.test_decode import prompts

Built = tuple[nn.Module, tuple[Tensor, ...], Any]
BATCH, SEQ = Dim("batch", max=16), Dim("seq", max=64)
_SIZES = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "intermediate_size": FEED_FORWARD,
}


def _bert() -> Built:
    from transformers import BertConfig, BertForSequenceClassification

    module = BertForSequenceClassification(BertConfig(**_SIZES, vocab_size=VOCABULARY))
    ids, mask = prompts(3)
    return module, (ids, mask.flip(1)), ({0: BATCH, 1: SEQ},) * 2


def _vit() -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    module = ViTForImageClassification(ViTConfig(**_SIZES, image_size=32, patch_size=8))
    return module, (torch.randn(3, 3, 32, 32),), ({0: BATCH},)


def _t5() -> Built:
    from transformers import T5Config, T5EncoderModel

    sizes = {"d_model": HIDDEN, "d_kv": HIDDEN // HEADS, "d_ff": FEED_FORWARD}
    module = T5EncoderModel(
        T5Config(**sizes, num_layers=LAYERS, num_heads=HEADS, vocab_size=VOCABULARY)
    )
    ids, mask = prompts(3)
    return module, (ids, mask.flip(1)), ({0: BATCH, 1: SEQ},) * 2


MODELS: dict[str, Callable[[], Built]] = {"BERT": _bert, "ViT": _vit, "T5 encoder": _t5}
