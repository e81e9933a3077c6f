"""A causal LM of `transformers` that keeps states beside keys and values, or nothing but states.

Linear attention, state spaces and short convolutions keep tensors of one size. Most such models
compute a prompt by chunks, one token by its recurrence, and choose by the number of tokens. Whether
the chunked form goes on from a state, as it must for a prompt in pieces, differs from family to
family and isn't documented, so both forms are run from a cache and compared with the model without.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils._python_dispatch import TorchDispatchMode

from attngraph.errors import UsageError, reason_of
from attngraph.frontend.families.cache import Layout, rows_looked_up
from attngraph.frontend.families.causal_lm import OfModel, places
from attngraph.frontend.families.kept import Kept
from attngraph.frontend.families.looped import Forward, Mixer, find_mixers, replaced
from attngraph.inference import inference
from attngraph.ir import Graph

Tensors = dict[str, Tensor]

_TOKENS, _FIRST, _PADDED = 7, 3, 3  # of the trials: all, in the first piece, hidden on the left
_LEAST = 1e-4
"""Relative to the largest logit: two forms of a recurrence differ by less, other formulas by more.
It only chooses a form, whose errors parity then measures."""


@dataclass(frozen=True)
class Error:
    """Of logits from a cache, relative to the largest: of rows alone, and of rows whose first
    tokens are hidden, both compared with the rows alone and without a cache. `failure` says what
    rows alone got in place of such logits."""

    alone: float
    padded: float
    failure: str = ""


@dataclass(frozen=True)
class Forms:
    """How far the forms of a model are from its logits without a cache.

    `pieces` is that of several tokens behind others, `steps` that of one at a time. `is_chunked`: a
    prompt is computed in a loop over its tokens, or over chunks that it is padded to, of `chunk`
    tokens where these are found. Where that or `pieces` leaves no graph of several tokens, `loops`
    is the error with `mixers` run token by token, None where these aren't found.
    """

    pieces: Error
    steps: Error
    tolerance: float
    is_chunked: bool
    loops: Error | None = None
    mixers: tuple[Mixer, ...] = ()
    chunk: int | None = None

    @classmethod
    def of(cls, model: nn.Module, kept: Kept) -> Forms:
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
            forms = cls(pieces, steps, tolerance, few != more, chunk=_chunk(few[1], more[1]))
            if max(pieces.alone, forms.is_chunked) <= tolerance or steps.alone > tolerance:
                return forms
            try:
                found = find_mixers(run.called, model, kept)
            except Exception:  # the model's own code is not made for it
                return forms
            loop = StatefulLM(model, kept, replace(forms, mixers=found), all_logits=True)
            return replace(loop.forms, loops=error(loop, _FIRST, _TOKENS))

    @property
    def takes_several(self) -> bool:
        """Whether any form computes several tokens behind others as the model without a cache."""
        if self.loops is not None:
            return self.loops.alone <= self.tolerance
        return self.pieces.alone <= self.tolerance and not (self.is_chunked and self.goes_on)

    @property
    def goes_on(self) -> bool:
        """Whether one token a call gives what the model computes without a cache."""
        return self.steps.alone <= self.tolerance

    @property
    def sampled(self) -> int:
        """How many tokens a trace takes at least: two chunks and a part, where it has chunks."""
        in_chunks = self.loops is None and self.is_chunked and self.takes_several
        return 5 * (self.chunk or 0) // 2 if in_chunks else 0


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


NOT_TRIED = Forms(Error(0.0, 0.0), Error(0.0, 0.0), 0.0, False)


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


class WithoutCache(OfModel):
    """What a decoder is compared with: the model on all tokens, without a cache."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, past: Tensors) -> dict[str, Any]:
        positions, given = places(attention_mask), {"input_ids": input_ids, "use_cache": False}
        return {"logits": self._logits(attention_mask, positions, **given)}


class UnpaddedWithoutCache(OfModel):
    """The same without a mask."""

    def forward(self, input_ids: Tensor, past: Tensors) -> dict[str, Any]:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        return {"logits": self._logits(None, positions, input_ids=input_ids, use_cache=False)}


class Stateful(OfModel):
    """What both have: a run of the model with all that it keeps as tensors.

    With `by_token` it takes one token a call.
    """

    def __init__(
        self,
        model: nn.Module,
        kept: Kept,
        forms: Forms,
        *,
        all_logits: bool = False,
        by_token: bool = False,
    ) -> None:
        super().__init__(model, all_logits=all_logits)
        self.kept, self.forms = kept, forms
        self.by_token = by_token
        if self.takes_positions and not kept.grows:
            raise UsageError(
                f"{type(model).__name__} takes positions and keeps nothing that tells how many "
                "tokens there were: give sample inputs, positions among them."
            )

    def one_token_a_call(self) -> Stateful:
        """The same for one token a call. Raises UsageError where that is no form of the model."""
        if not self.forms.goes_on:
            lost = self.forms.steps.alone
            how = f"logits that are {lost:.1g} of the largest off those it computes without one"
            how = self.forms.steps.failure or how
            raise UsageError(
                f"{type(self.model).__name__} can't be decoded with its cache: two rows fed one "
                f"token at a time get {how}, and several at a time can't be traced for every "
                "length."
            )
        own = type(self)
        return own(self.model, self.kept, self.forms, all_logits=self.all_logits, by_token=True)

    @property
    def without_cache(self) -> nn.Module:
        """What it is compared with; it takes the same inputs."""
        raise NotImplementedError

    @property
    def names(self) -> dict[str, str]:
        """What files call the cache, by what the trace calls it: its layer, then its part."""
        return {
            f"{own}_{part.name}": f"{called}.{part.name.replace('_', '.', 1)}"
            for own, called in (("past", "past_key_values"), ("present", "present"))
            for part in self.kept.parts
        }

    def layout(self, graph: Graph) -> Layout:
        """The parts of the decoder that the graph of this module is."""
        (ids,) = (value for value in graph.inputs if value.name == "input_ids")
        return replace(self._layout(graph, "input_ids"), vocabulary=rows_looked_up(ids))

    def _layout(self, graph: Graph, called: str) -> Layout:
        values = {value.name: value for value in graph.inputs}
        pasts = [self.names[f"past_{part.name}"] for part in self.kept.parts]
        ids = values[called]
        seq = ids.shape[1]
        growing = (part for part in self.kept.parts if part.tokens is not None)
        past = next((self._dim(values, part.name, part.tokens) for part in growing), "")
        return Layout(
            called,
            "logits",
            tuple(pasts),
            tuple(self.names[f"present_{part.name}"] for part in self.kept.parts),
            str(ids.shape[0]),
            past,
            "attention_mask" if "attention_mask" in values else None,
            states=tuple(
                name
                for name, part in zip(pasts, self.kept.parts, strict=True)
                if part.tokens is None
            ),
            piece=seq if isinstance(seq, int) else graph.dims[str(seq)].high,
            compared=1 if self.by_token or self.forms.goes_on else 2,
        )

    def _dim(self, values: Mapping[str, Any], name: str, axis: int | None) -> str:
        return str(values[self.names[f"past_{name}"]].shape[axis])

    def _run(
        self,
        tokens: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
        past: Tensors,
        seen: Callable[[Any], None] | None = None,
        *,
        called: str = "input_ids",
    ) -> Any:
        """`tokens` are ids, or embeddings, and `called` is the model's name for them."""
        mixers = () if self.by_token else self.forms.mixers
        shown = None if mask is None else mask[:, -tokens.shape[1] :] != 0
        with self.kept.filled(past) as holder:
            if seen is not None:
                seen(holder)
            given = {self.kept.argument: self.kept.given(holder), called: tokens, "use_cache": True}

            def looped(at: int, own: Forward) -> Forward:
                return functools.partial(mixers[at].looped, own, self.kept, holder, shown)

            with replaced([mixer.module for mixer in mixers], looped):
                logits = self._logits(mask, positions, **given)
            return {"logits": logits, "present": self.kept.taken(holder)}

    def called(self, tokens: int, seen: Callable[[Any], None]) -> None:
        """Runs the model on so many tokens behind some others; what it keeps is shown first."""
        inputs, _ = self._sample(2, tokens, 4)
        device = next(self.model.parameters()).device
        past = {name: tensor.to(device) for name, tensor in inputs["past"].items()}
        ids, mask = inputs["input_ids"].to(device), inputs["attention_mask"].to(device)
        positions = places(mask)[:, -tokens:] if self.takes_positions else None
        self._run(ids, mask, positions, past, seen)

    def _sample(self, batch: int, seq: int, past: int) -> tuple[dict[str, Any], dict[str, Any]]:
        random = torch.Generator().manual_seed(0)
        model: Any = self.model
        seq = 1 if self.by_token else max(seq, self.forms.sampled)
        known = int(model.get_input_embeddings().weight.shape[0])
        ids = torch.randint(known, (batch, seq), generator=random)
        held = past if self.kept.grows else 0
        tensors = {
            part.name: torch.randn(part.sized(batch, past), generator=random).to(part.dtype)
            for part in self.kept.parts
        }
        rows, before = Dim("batch"), Dim("past")
        new: dict[int, Any] = {} if self.by_token else {1: Dim("seq")}
        seen = {1: before + 1 if self.by_token else Dim.AUTO} if held else new
        shapes: dict[str, Any] = {
            "input_ids": {0: rows, **new},
            "attention_mask": {0: rows, **seen},
            "past": {
                part.name: {
                    part.rows: rows,
                    **({} if part.tokens is None else {part.tokens: before}),
                }
                for part in self.kept.parts
            },
        }
        mask = torch.ones(batch, held + seq, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": mask, "past": tensors}, shapes

    def _held(self, past: Tensors) -> Any:
        """How many tokens the keys hold; 0 where there are none."""
        growing = (part for part in self.kept.parts if part.tokens is not None)
        return next((past[part.name].shape[part.tokens or 0] for part in growing), 0)


class StatefulLM(Stateful):
    """Token ids and what was kept to logits and what is kept then, as `CausalLM` for such models.

    input_ids (B, S), attention_mask (B, P + S) with zeros on the left alone, where keys of P tokens
    are kept; (B, S), of the new tokens, where states are all there is. `past` has the tensors by
    the names of `kept`. By token, S is 1, and a hidden token leaves the states of its row alone.
    """

    def forward(self, input_ids: Tensor, attention_mask: Tensor, past: Tensors) -> dict[str, Any]:
        length, held = input_ids.shape[1], self._held(past)
        if self.kept.grows:
            fits: Any = torch._check
            fits(attention_mask.shape[1] == held + length)
        positions = places(attention_mask)[:, -length:] if self.takes_positions else None
        result: dict[str, Any] = self._run(input_ids, attention_mask, positions, past)
        if self.by_token:
            shown, present = attention_mask[:, -1] != 0, result["present"]
            for part in self.kept.parts:
                if part.tokens is None:
                    shape = [1] * len(part.shape)
                    shape[part.rows] = -1
                    new, old = present[part.name], past[part.name]
                    present[part.name] = torch.where(shown.reshape(shape), new, old)
        return result

    def sample(
        self, batch: int = 2, seq: int = 3, past: int = 5
    ) -> tuple[tuple[Tensor, Tensor, Tensors], dict[str, Any]]:
        """Inputs to trace with, and the dynamic shapes for torch.export."""
        inputs, shapes = self._sample(batch, seq, past)
        return (inputs["input_ids"], inputs["attention_mask"], inputs["past"]), shapes

    @property
    def without_cache(self) -> nn.Module:
        return WithoutCache(self.model, all_logits=self.all_logits)


class UnpaddedStatefulLM(Stateful):
    """The same without a mask: all rows have the same positions."""

    def forward(self, input_ids: Tensor, past: Tensors) -> dict[str, Any]:
        held = self._held(past)
        positions = torch.arange(held, held + input_ids.shape[1])[None]
        return self._run(input_ids, None, positions, past)  # type: ignore[no-any-return]

    def sample(
        self, batch: int = 2, seq: int = 3, past: int = 5
    ) -> tuple[tuple[Tensor, Tensors], dict[str, Any]]:
        """Inputs to trace with, and the dynamic shapes for torch.export."""
        inputs, shapes = self._sample(batch, seq, past)
        del shapes["attention_mask"]
        return (inputs["input_ids"], inputs["past"]), shapes

    @property
    def without_cache(self) -> nn.Module:
        return UnpaddedWithoutCache(self.model, all_logits=self.all_logits)


def stateful(
    model: nn.Module, kept: Kept, *, all_logits: bool, padding: bool, by_token: bool = False
) -> tuple[Stateful, list[str]]:
    """(the wrapper of a model that keeps states, notes for the user).

    Several tokens a call unless the model doesn't go on from its states so, or `by_token` says so.
    Raises UsageError where no form gives what the model computes without a cache.
    """
    name, forms = type(model).__name__, Forms.of(model, kept)
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
