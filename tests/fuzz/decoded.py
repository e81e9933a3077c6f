"""Compiled decoders, run as they are used: prompts at once and in pieces, and steps behind them.

The oracle is the model on all tokens without a past, in float64. That the model itself gives the
same in pieces is held against it first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attngraph import Decoder, optimize_decoder
from attngraph.errors import UsageError
from tests.fuzz.inputs import Args, make
from tests.fuzz.oracle import Forward, Oracle, flat
from tests.fuzz.relations import broken, unlike_at_once
from tests.fuzz.stored import differs, taken_apart

_RUNS = (
    ("a prompt", 3, "left", (9,)),
    ("a prompt and steps", 2, "all", (4, 5, 6, 7, 8)),
    ("by token", 1, "all", (1, 2, 3, 4, 5, 6, 7)),
    ("pieces", 5, "left", (3, 7, 8, 13)),
    ("pieces with holes", 4, "holes", (6, 10, 11)),
    ("pieces and padding between", 3, "right", (5, 9, 10)),
    ("a hidden row", 3, "hidden", (5, 6, 9)),
    ("one token", 1, "all", (1, 2)),
    ("a long prompt", 2, "left", (20,)),
    ("a long past", 2, "left", (12, 32)),
    ("many rows", 24, "left", (4, 5)),
)
"""By what they are: rows, the style of their mask, and where each piece ends."""
_FEWEST = 6  # a file that takes fewer of them is of no use
_CONSISTENT = 1e-9


def compiled(
    source: Any, module: nn.Module, sample: Args, dynamic_shapes: Any, **options: Any
) -> Decoder:
    """The decoder of a source's `Model`; the sample and the shapes are of `TAKEN`."""
    return optimize_decoder(
        module,
        source.ARGS(*sample),
        dynamic_shapes=source.ARGS(*dynamic_shapes),
        **{**source.CACHE, **options},
    )


def run_of(decoder: Decoder, is_last: bool, ends: Sequence[int] = ()) -> Forward:
    """Logits of ids, and of a mask where the model takes one, in pieces up to these ends."""

    def run(ids: Tensor, *masks: Tensor) -> list[Tensor]:
        found, cache = [], None
        for start, end in _pieces(ids, ends):
            shown = masks[0][:, :end] != 0 if masks else None
            logits, cache = decoder(ids[:, start:end], shown, cache)
            found.append(logits.clone())
        return [_joined(found, masks, is_last)]

    return run


def _pieces(ids: Tensor, ends: Sequence[int]) -> Iterator[tuple[int, int]]:
    stops = [*(end for end in ends if end < ids.shape[1]), ids.shape[1]]
    yield from zip([0, *stops], stops, strict=False)


def _joined(found: Sequence[Tensor], masks: Sequence[Tensor], is_last: bool) -> Tensor:
    """Those of all tokens, or of the last one; 0 where there is padding, as in `Whole`."""
    logits = found[-1] if is_last else torch.cat([*found], 1)
    for mask in masks:
        logits = logits.masked_fill(mask[:, -logits.shape[1] :, None] == 0, 0.0)
    return logits


class InPieces(nn.Module):
    """A source's `Whole`, which is given its tokens in pieces, and its own past with each."""

    def __init__(self, whole: nn.Module, source: Any, ends: Sequence[int]) -> None:
        super().__init__()
        self.whole, self.source, self.ends = whole, source, ends

    def forward(self, ids: Tensor, *masks: Tensor) -> Tensor:
        source, model = self.source, super(type(self.whole), self.whole)
        past = {
            name: torch.zeros(_shape(text, {**source.SIZES, "b": len(ids), "p": 0}))
            for name, text in source.TAKEN.items()
            if name.startswith("past")
        }
        found = []
        for start, end in _pieces(ids, self.ends):
            given = [ids[:, start:end], *(mask[:, :end] for mask in masks)]
            if "position_ids" in source.TAKEN:
                shown = masks[0] != 0 if masks else torch.ones_like(ids)
                given.append((shown.long().cumsum(1) - 1).clamp(min=0)[:, start:end])
            results = flat(model.forward(*source.ARGS(*given, *past.values())))
            named = dict(zip(source.RETURNED, results, strict=True))
            past = {name: named[name] for name in past}
            found.append(named["logits"])
        return _joined(found, masks, source.LAST)


def _shape(text: str, sizes: Mapping[str, int]) -> list[int]:
    return [sizes[dim] if dim in sizes else int(dim) for dim in text.split()]


def tried(file: Path, source: Any, oracle: Oracle, decoder: Decoder, floats: Any) -> dict[str, Any]:
    """What is wrong with a decoder's file at tokens that its compile never saw, if anything is.

    `floats()` compiles the source without weights in few bits.
    """
    loaded, coded, held = Decoder.load(file), None, []
    if "weights" in source.OPTIONS:
        path = file.with_name("floats.onnx")
        floats().save(path)
        parts, said = taken_apart(file, path, oracle.module)
        if said:
            return {"outcome": "wrong", "said": said}
        coded = loaded
        loaded, *held = (Decoder.load(part) for part in parts)
    wrong, unrelated, count = [], [], 0
    for seed, (label, rows, style, ends) in enumerate(_RUNS, 1):
        if not _takes(decoder, rows, ends):
            continue
        count += 1
        sizes = {**source.SIZES, "b": rows, "s": ends[-1]}
        tensors = make(source.INPUTS, sizes, style, seed)
        label = f"{label}, {style}, {ends}"
        run, eager = run_of(loaded, source.LAST, ends), InPieces(oracle.module, source, ends)
        wrong.append(oracle.differs(run, tensors, label))
        if held:
            runs = [run_of(each, source.LAST, ends) for each in held]
            wrong.append(differs(run_of(coded, source.LAST, ends), runs, tensors, label))
        if len(ends) > 1 and _takes(decoder, rows, ends[-1:]):
            said = unlike_at_once(run, run_of(loaded, source.LAST), oracle, eager, tensors)
            unrelated += [f"{label}: {each}" for each in said]
    if any(wrong):
        return {"outcome": "wrong", "said": "; ".join(filter(None, wrong))}
    if count < _FEWEST:
        return {"outcome": "refused", "said": f"it takes {count} of {len(_RUNS)} runs"}
    free = {"b": (1, 9), "s": (1, 9)} if _takes(decoder, 1, (1,)) else {}
    tensors = make(source.INPUTS, {**source.SIZES, "b": 3, "s": 6}, "left", 99)
    unrelated += broken(run_of(loaded, source.LAST), oracle, source.INPUTS, tensors, free)
    return {"outcome": "unrelated", "said": "; ".join(unrelated)} if unrelated else {}


def _takes(decoder: Decoder, rows: int, ends: Sequence[int]) -> bool:
    try:
        decoder.extent.require_room(ends[-1])
        for start, end in zip((0, *ends), ends, strict=False):
            decoder.extent.require_sizes(rows, end - start, start)
    except UsageError:
        return False
    return True


def is_consistent(doubled: nn.Module, source: Any) -> bool:
    """Whether a model gives the same in pieces, in float64, where tensors are made so."""
    for seed, (_, rows, style, ends) in enumerate(_RUNS, 1):
        tensors = make(source.INPUTS, {**source.SIZES, "b": rows, "s": ends[-1]}, style, seed)
        whole, pieces = doubled(*tensors), InPieces(doubled, source, ends)(*tensors)
        if not bool(((whole - pieces).abs() <= _CONSISTENT * whole.abs().max()).all()):
            return False
    return True
