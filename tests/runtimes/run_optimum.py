"""Runs a folder by optimum's class for its task, in the environment that has optimum."""

from __future__ import annotations

import sys

import numpy
import torch
from optimum import onnxruntime


def main(kind: str, folder: str, given: str, found: str) -> None:
    """Writes the tokens that a decoder generates (greedy), or an encoder's logits, as an .npz."""
    model = getattr(onnxruntime, kind).from_pretrained(folder)
    with numpy.load(given) as file:
        feeds = {name: torch.from_numpy(file[name]) for name in file.files}
    if kind == "ORTModelForCausalLM":
        new = int(feeds.pop("new"))
        result = model.generate(**feeds, max_new_tokens=new, do_sample=False)
    else:
        result = model(**feeds).logits
    numpy.savez(found, result=result.numpy())


if __name__ == "__main__":
    main(*sys.argv[1:])
