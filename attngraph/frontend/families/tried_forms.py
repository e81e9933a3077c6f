"""Which forms of a model that keeps states compute what it does: found by running them.

Most such models compute a prompt by chunks, one token by its recurrence, and choose by the number
of tokens. Whether the chunked form goes on from a state, as it must for a prompt in pieces, differs
from family to family and isn't documented, so all forms are run from a cache and compared with the
model without one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from attngraph.errors import reason_of
from attngraph.frontend.families.kept import Kept
from attngraph.frontend.families.looped import find_mixers
from attngraph.frontend.families.stateful_lm import (
    NOT_TRIED,
    Error,
    Forms,
    Stateful,
    StatefulLM,
    Tensors,
    UnpaddedStatefulLM,
    WithoutCache,
)
from attngraph.inference import inference

_TOKENS, _FIRST, _PADDED = 7, 3, 3  # of the trials: all, in the first piece, hidden on the left
_LEAST = 1e-4
"""Relative to the largest logit: two forms of a recurrence differ by less, other formulas by more.
It only chooses a form, whose errors parity then measures."""


def stateful(
    model: nn.Module, kept: Kept, *, all_logits: bool, padding: bool, by_token: bool = False
) -> tuple[Stateful, list[str]]:
    """(the wrapper of a model that keeps states, notes for the user).

    Several tokens a call unless the model doesn't go on from its states so, or `by_token` says so.
    Raises UsageError where no form gives what the model computes without a cache.
    """
    name, forms = type(model).__name__, forms_of(model, kept)
    reason = ""
    if forms.takes_several:
        pass
    elif forms.pieces.alone > forms.tolerance:
        reason = "computes several tokens behind others without what it keeps of those"
    else:
        reason = "computes several tokens by chunks, whose number would be fixed in a graph"
    by_token = by_token or bool(reason)
    notes = [f"A prompt is fed token by token: {name} {reason}."] if reason else []
    several = forms.pieces if forms.loops is None else forms.loops
    if not by_token and not forms.goes_on:
        notes.append(
            f"A step is computed as several tokens are: {name} computes one token at a time by "
            f"another formula, whose logits are {forms.steps.alone:.1g} of the largest off those "
            "without a cache."
        )
    if padding and (forms.steps if by_token else several).padded > forms.tolerance:
        padding = False
        notes.append(
            f"No row can be padded: {name} computes other logits for a row with hidden tokens on "
            "its left than for that row alone."
        )
    wrap = StatefulLM if padding else UnpaddedStatefulLM
    wrapper = wrap(model, kept, forms, all_logits=all_logits)
    return wrapper.one_token_a_call() if by_token else wrapper, notes


def forms_of(model: nn.Module, kept: Kept) -> Forms:
    """Runs each form of a model in eager, from what it keeps, padded and not."""
    embedded: Any = model.get_input_embeddings()  # type: ignore[operator]
    random = torch.Generator().manual_seed(0)
    device, dtype = embedded.weight.device, next(model.parameters()).dtype
    ids = torch.randint(len(embedded.weight), (2, _TOKENS), generator=random).to(device)
    shown = torch.ones_like(ids)
    none = torch.zeros(2, _PADDED, dtype=ids.dtype, device=device)
    padded, hidden = torch.cat([none, ids], 1), torch.cat([none, shown], 1)
    whole = WithoutCache(model, all_logits=True)
    run = StatefulLM(model, kept, NOT_TRIED, all_logits=True)
    one = StatefulLM(model, kept, NOT_TRIED, all_logits=True, by_token=True)
    with inference(model):
        expected = whole(ids, shown, {})["logits"]
        without = _distance(whole(padded, hidden, {})["logits"], expected)

        def error(form: Stateful, first: int, rest: int) -> Error:
            alone, failure = _error(form, ids, shown, first, rest, expected)
            beside, _ = _error(form, padded, hidden, first + 1, rest, expected)
            return Error(alone, max(without, beside), failure)

        pieces, steps = error(run, _FIRST, _TOKENS), error(one, 1, 1)
        past = kept.empty(2, device)
        few, more = _pads(run, ids[:, :_FIRST], past), _pads(run, ids, past)
        tolerance = max(_LEAST, 8 * torch.finfo(dtype).eps)
        forms = Forms(pieces, steps, tolerance, few != more, chunk=_chunk(few[1], more[1]))
        if max(pieces.alone, forms.is_chunked) <= tolerance or steps.alone > tolerance:
            return forms
        try:
            found = find_mixers(run.called, model, kept)
        except Exception:  # the model's own code is not made for it
            return forms
        loop = StatefulLM(model, kept, replace(forms, mixers=found), all_logits=True)
        return replace(loop.forms, loops=error(loop, _FIRST, _TOKENS))


def _error(
    form: Stateful, ids: Tensor, mask: Tensor, first: int, rest: int, expected: Tensor
) -> tuple[float, str]:
    """How far the logits are off, or infinity and what came in their place."""
    try:
        lost = _distance(_fed(form, ids, mask, first, rest), expected)
    except _OtherLogits as error:
        return math.inf, str(error)
    except Exception as error:  # the model's own code is not made for it
        return math.inf, f"an error ({reason_of(error)})"
    return lost, "" if math.isfinite(lost) else "logits that are no numbers"


class _OtherLogits(Exception):
    """Logits of another shape than the tokens have."""


def _fed(form: Stateful, ids: Tensor, mask: Tensor, first: int, rest: int) -> Tensor:
    """The logits of ids fed in pieces, of `first` tokens and then of `rest` each."""
    kept, total = form.kept, ids.shape[1]
    past, found, start = kept.empty(len(ids), ids.device), [], 0
    while start < total:
        stop = min(start + (rest if start else min(first, rest)), total)
        shown = mask[:, 0 if kept.grows else start : stop]
        result = form(ids[:, start:stop], shown, past)
        if result["logits"].shape[:2] != (len(ids), stop - start):
            shapes = tuple(result["logits"].shape), (len(ids), stop - start)
            raise _OtherLogits("logits {} of tokens {}".format(*shapes))
        past, start = result["present"], stop
        found.append(result["logits"])
    return torch.cat(found, 1)


_Mode: Any = TorchDispatchMode  # torch's has no types


class _Operators(_Mode):  # type: ignore[misc]
    """How many operators run, and how much each padding adds."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.pads: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if func is torch.ops.aten.constant_pad_nd.default:
            self.pads.append(tuple(args[1]))
        return func(*args, **(kwargs or {}))


def _pads(run: nn.Module, ids: Tensor, past: Tensors) -> tuple[int, list[Any]]:
    with _Operators() as seen:
        run(ids, torch.ones_like(ids), past)
    return seen.count, seen.pads


def _chunk(few: list[Any], more: list[Any]) -> int | None:
    """The length that tokens are padded to, where padding makes both numbers of them the same."""
    added = zip(few, more, strict=False)
    pairs = [pair for first, second in added for pair in zip(first, second, strict=False)]
    lengths = {_FIRST + a for a, b in pairs if a - b == _TOKENS - _FIRST and b >= 0}
    return max(lengths, default=None)


def _distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference in the last places, relative to the largest number expected."""
    found = found[:, -expected.shape[1] :]
    if found.shape != expected.shape:
        return float("inf")
    lost = float((found - expected).abs().max() / expected.abs().max())
    return lost if lost == lost else float("inf")
