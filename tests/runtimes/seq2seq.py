"""Tiny encoder-decoders as folders, for the runtimes that open these."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import attngraph
from tests.models.kit import peaked
from tests.parity.test_seq2seq import MODELS, sources

FAMILIES = {
    "t5": ("T5", "Seq2SeqLM"),
    "bart": ("BART", "Seq2SeqLM"),
    "whisper": ("Whisper", "SpeechSeq2Seq"),
    "trocr": ("TrOCR", "Vision2Seq"),
}
"""What each is called, and the end of the classes that open it."""
NEW = 8


def written(family: str, folder: Path, rows: int = 2) -> tuple[Path, dict[str, Tensor], Tensor]:
    """A folder that was compiled, what is encoded, and the tokens of transformers."""
    torch.manual_seed(0)
    module = peaked(MODELS[family]())
    if family == "trocr":
        module.generation_config.pad_token_id = 0
        module.generation_config.eos_token_id = 1
    module.save_pretrained(folder / "in")
    attngraph.optimize_checkpoint(folder / "in", verify="off").save(folder / "out")
    source = sources(module, rows)
    tokens = module.generate(**source, max_new_tokens=NEW, do_sample=False, num_beams=1)
    return folder / "out", source, tokens
