"""Runs a folder by optimum's class for its task, in the environment that has optimum."""

from __future__ import annotations

import sys
from importlib import import_module

import numpy
import torch
from optimum import onnxruntime


def main(kind: str, folder: str, given: str, found: str) -> None:
    """Writes the tokens that a decoder generates (greedy), an encoder's logits or hidden states,
    what a pipeline makes of a text, or the embeddings of a SentenceTransformer, as an .npz. `kind`
    names the class, or the pipeline's task."""
    with numpy.load(given) as file:
        feeds = {name: torch.from_numpy(file[name]) for name in file.files}
    if kind == "SentenceTransformer":
        sentence_transformers = import_module("sentence_transformers")
        model = sentence_transformers.SentenceTransformer(folder, backend="onnx")
        result = model(feeds)["sentence_embedding"].detach()
    elif "text" in feeds:
        pipe = onnxruntime.pipeline(kind, model=folder, accelerator="ort")
        result = torch.tensor(pipe(bytes(feeds["text"].tolist()).decode()))
    else:
        model = getattr(onnxruntime, kind).from_pretrained(folder)
        if "sizes" in feeds:  # of the empty cache
            heads, width = feeds.pop("sizes").tolist()
            model.num_key_value_heads, model.embed_size_per_head = heads, width
        if "new" in feeds:
            new = int(feeds.pop("new"))
            result = model.generate(**feeds, max_new_tokens=new, do_sample=False, num_beams=1)
        else:
            outputs = model(**feeds)
            result = outputs.logits if "logits" in outputs else outputs.last_hidden_state
    numpy.savez(found, result=result.numpy())


if __name__ == "__main__":
    main(*sys.argv[1:])
