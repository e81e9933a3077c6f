"""The zoo: every example with what the compiler is expected to make of it.

python -m examples.zoo          lists them
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from examples.ladder import RUNGS, build_rung
from examples.positions import WAYS, build_way


@dataclass(frozen=True)
class Entry:
    """An example. `sites` is what each of its attentions becomes, in order.

    A fused attention is told by what its mask became, any other site by its code. `operators` are
    ONNX operators that the result must have, with their number.
    """

    name: str
    what: str
    sites: tuple[str, ...] = ()
    operators: tuple[tuple[str, int], ...] = ()
    make: Callable[[], tuple[Any, tuple[Any, ...], Any]] | None = None

    def build(self) -> tuple[Any, tuple[Any, ...], Any]:
        """The module, its sample inputs and its dynamic shapes."""
        if self.make is not None:
            return self.make()
        module, _, function = self.name.partition(":")
        make: Callable[[], tuple[Any, tuple[Any, ...], Any]]
        make = getattr(importlib.import_module(f"examples.{module}"), function or "build")
        return make()


_RUNGS = {
    "any-similarity": ("any similarity", "logits-not-a-product"),
    "dot": ("dot product", "no mask"),
    "scaled-dot": ("scaled dot product", "no mask"),
    "many-queries": ("many queries", "no mask"),
    "keys-and-values": ("separate keys and values", "no mask"),
    "self": ("self-attention", "no mask"),
    "masked-self": ("masked self-attention", "causal"),
    "cross": ("cross-attention", "no mask"),
    "packed": ("multi-head, packed", "no mask"),
}
_WAYS = {
    "linear": "no mask",
    "sinusoidal": "no mask",
    "learned": "no mask",
    "rotary": "no mask",
    "alibi": "dense float bias",
    "t5": "dense float bias",
    "relative": "dense float bias",
}
_PADDED, _CAUSAL = "padding (bool)", "causal"

ENTRIES = (
    Entry("recurrent:build_rnn", "RNN tagger, packed", operators=(("RNN", 2),)),
    Entry("recurrent", "LSTM tagger, packed", operators=(("LSTM", 2),)),
    Entry("recurrent:build_gru", "GRU tagger, packed", operators=(("GRU", 2),)),
    Entry("mutated_cells", "MUT1 in a loop", operators=(("Scan", 1),)),
    Entry("mutated_cells:build_mut2", "MUT2 in a loop", operators=(("Scan", 1),)),
    Entry("mutated_cells:build_mut3", "MUT3 in a loop", operators=(("Scan", 1),)),
    Entry("seq2seq", "encoder-decoder without attention", operators=(("GRU", 2),)),
    Entry("bahdanau", "additive alignment of whole sequences", ("additive",)),
    Entry("alignment", "additive alignment, trained", ("additive",), (("GRU", 2),)),
    Entry("attentive_decoder", "Bahdanau's decoder", ("additive",), (("GRU", 1), ("Scan", 1))),
    Entry(
        "attentive_decoder:build_dot", "Luong's decoder, dot", (_PADDED,), (("GRU", 1), ("Scan", 1))
    ),
    Entry(
        "attentive_decoder:build_general",
        "Luong's decoder, general",
        (_PADDED,),
        (("GRU", 1), ("Scan", 1)),
    ),
    Entry("additive_pooling", "additive pooling", ("additive",)),
    *(
        Entry(f"ladder: {rung}", what, (site,), make=partial(build_rung, rung))
        for rung, (what, site) in _RUNGS.items()
    ),
    Entry(
        "ladder: head-by-head",
        "multi-head, head by head",
        ("no mask",) * 4,
        (("Attention", 1),),
        partial(build_rung, "head-by-head"),
    ),
    *(
        Entry(f"positions: {way}", f"positions, {way}", (site,), make=partial(build_way, way))
        for way, site in _WAYS.items()
    ),
    Entry("eager_attention", "masked attention as usually written", ("causal ∧ padding (bool)",)),
    Entry("einsum_attention", "multi-head in einsums", (_PADDED,) * 2),
    Entry(
        "per_head",
        "twelve separate heads, concatenated",
        ("causal ∧ padding (bool)",) * 24,
        (("Attention", 2),),
    ),
    Entry(
        "per_head:build_summed",
        "twelve separate heads, summed",
        ("causal ∧ padding (bool)",) * 24,
        (("Attention", 2),),
    ),
    Entry("talking_heads", "talking heads", ("talking-heads", "no mask")),
    Entry(
        "transformer",
        "Transformer, post-norm",
        (_PADDED, _PADDED, _CAUSAL, _PADDED, _CAUSAL, _PADDED),
    ),
    Entry(
        "transformer:build_pre_norm",
        "Transformer, pre-norm",
        (_PADDED, _PADDED, _CAUSAL, _PADDED, _CAUSAL, _PADDED),
    ),
    Entry("bert", "encoder-only (BERT)", (_PADDED,) * 2),
    Entry("gpt", "decoder-only (GPT)", (_CAUSAL,) * 2),
    Entry("nanogpt", "decoder-only (nanoGPT)", (_CAUSAL,) * 2),
    Entry("gqa", "decoder-only (Llama)", (_CAUSAL,) * 2),
    Entry("gopher", "relative decoder (Gopher)", ("causal; dense float bias",) * 2),
    Entry("vit", "vision transformer", ("no mask",) * 2),
    Entry("three_ways", "convolution, recurrence, attention", (_PADDED,), (("GRU", 1),)),
    Entry("agentformer", "agent-aware attention", ("scores-times-tensor",)),
    Entry("alphafold", "pair bias and triangle attention", ("dense float bias",) * 2),
    Entry("rwkv", "RWKV's time mixing", operators=(("Scan", 1),)),
    Entry(
        "gated_delta_net",
        "gated delta net",
        ("recurrence",),
        # An If has two: from 17 tokens on, values are filled up to a width the kernel likes.
        (("LinearAttention", 2), ("If", 1), ("Conv", 1), ("Scan", 0)),
    ),
    Entry("mamba2", "Mamba-2, in chunks", ("recurrence",), (("LinearAttention", 1), ("Conv", 1))),
    Entry("mixture_of_experts", "mixture of experts (Mixtral)", ("experts",), (("MoE", 1),)),
    Entry(
        "mixture_of_experts:build_deepseek",
        "mixture of experts (DeepSeek-V3)",
        ("experts",),
        (("MoE", 1),),
    ),
    Entry("speech", "speech encoder (Whisper)", ("padding (bool)",) * 2),
    Entry("summariser", "summariser that copies", (_PADDED, _CAUSAL, _PADDED, "distribution")),
)
assert {*_RUNGS, "head-by-head"} == {*RUNGS}
assert {*_WAYS} == {*WAYS}


if __name__ == "__main__":
    for entry in ENTRIES:
        print(f"{entry.name:32} {entry.what}")
