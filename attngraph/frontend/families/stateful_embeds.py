"""The decoder of a model that reads images and keeps states, as one with linear attention does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.errors import UsageError
from attngraph.frontend.families.cache import Layout
from attngraph.frontend.families.causal_lm import check_length, places
from attngraph.frontend.families.image_parts import POSITIONS, rows_of, table_of
from attngraph.frontend.families.kept import Kept
from attngraph.frontend.families.stateful_lm import Stateful, Tensors
from attngraph.frontend.families.tried_forms import forms_of
from attngraph.ir import Graph


class StatefulEmbeds(Stateful):
    """As `StatefulLM`, for embeddings (B, S, H) in place of ids, several in a call.

    Where it is `placed` it takes the positions (3, B, S) that these have on grids, else they count
    from `begin`. Raises UsageError where the model takes one token a call, or no padded row.
    """

    def __init__(
        self, model: nn.Module, kept: Kept, embeds: Tensor, *, placed: bool, begin: int = 0
    ) -> None:
        forms = forms_of(model, kept)
        super().__init__(model, kept, forms)
        self.embeds, self.placed, self.begin = embeds, placed, begin
        several = forms.pieces if forms.loops is None else forms.loops
        if not forms.takes_several or several.padded > forms.tolerance:
            self.one_token_a_call()

    def one_token_a_call(self) -> Stateful:
        """Raises UsageError: all tokens of an image come in one call, in rows that are padded."""
        raise UsageError(
            f"{type(self.model).__name__} can't be decoded with its images: behind what its cache "
            "holds it takes one token a call, or no row that is padded, and an image's tokens come "
            "in one call. Its text alone compiles from a subclass whose forward takes no images."
        )

    def forward(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor | None,
        past: Tensors,
    ) -> dict[str, Any]:
        length = inputs_embeds.shape[1]
        if self.kept.grows:
            check_length(attention_mask, self._held(past) + length)
        if position_ids is None:
            position_ids = places(attention_mask)[:, -length:] + self.begin
        result: dict[str, Any] = self._run(
            inputs_embeds, attention_mask, position_ids, past, called="inputs_embeds"
        )
        return result

    def _drawn(self, *_: int) -> tuple[dict[str, Any], dict[str, Any]]:
        batch, seq = self.embeds.shape[:2]
        inputs, shapes = super()._drawn(batch, seq, 5)
        axes = shapes["inputs_embeds"] = shapes["input_ids"]
        inputs["inputs_embeds"] = self.embeds
        inputs[POSITIONS] = shapes[POSITIONS] = None
        if self.placed:
            inputs[POSITIONS] = torch.arange(5, 5 + seq).expand(3, batch, -1)
            shapes[POSITIONS] = {1: axes[0], 2: axes[1]}
        return inputs, shapes

    def layout(self, graph: Graph) -> Layout:
        """The parts of the decoder that the graph of this module is."""
        return replace(
            self._layout(graph, "inputs_embeds"),
            vocabulary=rows_of(table_of(self.model)),
            embeds=True,
            positions=POSITIONS if self.placed else None,
        )
