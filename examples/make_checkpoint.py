"""Write a folder as training leaves it: `python -m examples.make_checkpoint out/bert`.

It is a BERT of four layers that classifies texts, saved by transformers. Its weights are random,
and drawn wide enough for attention to be sharp. Nothing is fetched.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

_CONFIG: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": 512,
    "num_labels": 3,
}


def write(path: Path) -> None:
    """Saves the model into the folder `path`, which is made where there is none."""
    from transformers import BertConfig, BertForSequenceClassification
    from transformers.utils import logging as told

    logging: Any = told
    logging.disable_progress_bar()
    torch.manual_seed(0)
    model: Any = BertForSequenceClassification(BertConfig(**_CONFIG))
    for layer in model.bert.encoder.layer:
        for part in (layer.attention.self.query, layer.attention.self.key):
            torch.nn.init.normal_(part.weight, std=1.5 / part.in_features**0.5)
    model.save_pretrained(path)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m examples.make_checkpoint FOLDER", file=sys.stderr)
        return 2
    path = Path(arguments[0])
    write(path)
    print(f"{path}: {', '.join(sorted(item.name for item in path.iterdir()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
