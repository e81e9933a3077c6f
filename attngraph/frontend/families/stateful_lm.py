"""A causal LM of `transformers` that keeps states beside keys and values, or nothing but states.

Linear attention, state spaces and short convolutions keep tensors of one size. Such a model has
several forms to compute tokens in; which one it is traced in is found in tried_forms.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from attngraph.errors import UsageError
from attngraph.frontend.families.cache import Layout, rows_looked_up
from attngraph.frontend.families.causal_lm import OfModel, WithCache, check_length, places
from attngraph.frontend.families.kept import Kept
from attngraph.frontend.families.looped import Forward, Mixer, replaced
from attngraph.ir import Graph


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


NOT_TRIED = Forms(Error(0.0, 0.0), Error(0.0, 0.0), 0.0, False)


Tensors = dict[str, Tensor]


class WithoutCache(OfModel):
    """What a decoder is compared with: the model on all tokens, without a cache."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, past: Tensors) -> dict[str, Any]:
        positions, given = places(attention_mask), {"input_ids": input_ids, "use_cache": False}
        return {"logits": self._logits(attention_mask, positions, **given)}


class UnpaddedWithoutCache(OfModel):
    """A whole model without a mask."""

    def forward(self, input_ids: Tensor, past: Tensors) -> dict[str, Any]:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        return {"logits": self._logits(None, positions, input_ids=input_ids, use_cache=False)}


class Stateful(WithCache):
    """The base of both: runs the model with all that it keeps as tensors.

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
        """The model for one token a call. Raises UsageError where that is no form of the model."""
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
        """The names of the cache in files, layer and part, by its names in the trace."""
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
        inputs, _ = self._drawn(2, tokens, 4)
        device = next(self.model.parameters()).device
        past = {name: tensor.to(device) for name, tensor in inputs["past"].items()}
        ids, mask = inputs["input_ids"].to(device), inputs["attention_mask"].to(device)
        positions = places(mask)[:, -tokens:] if self.takes_positions else None
        self._run(ids, mask, positions, past, seen)

    def _drawn(self, batch: int, seq: int, past: int) -> tuple[dict[str, Any], dict[str, Any]]:
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
            check_length(attention_mask, held + length)
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

    @property
    def without_cache(self) -> nn.Module:
        return WithoutCache(self.model, all_logits=self.all_logits)


class UnpaddedStatefulLM(Stateful):
    """A model with states and no mask: all rows have the same positions."""

    def forward(self, input_ids: Tensor, past: Tensors) -> dict[str, Any]:
        held = self._held(past)
        positions = torch.arange(held, held + input_ids.shape[1])[None]
        return self._run(input_ids, None, positions, past)  # type: ignore[no-any-return]

    @property
    def without_cache(self) -> nn.Module:
        return UnpaddedWithoutCache(self.model, all_logits=self.all_logits)
