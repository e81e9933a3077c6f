"""The decoder of a model that reads images, which takes embeddings in place of ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attngraph.frontend.families.cache import Layout
from attngraph.frontend.families.causal_lm import Cached, Layers, check_length, places
from attngraph.frontend.families.image_parts import (
    KINDS,
    POSITIONS,
    Seen,
    kinds_parameter,
    rows_of,
    table_of,
)
from attngraph.frontend.families.layer_inputs import LAYER_INPUTS, added_in_layers
from attngraph.ir import Graph

ADDED = "deepstack_embeds"


class CachedEmbeds(Cached):
    """As `CausalLM`, for embeddings (B, S, H) in place of ids.

    Where it `sees` images or its prompt as a whole, it takes `token_type_ids` (B, S) too, and all
    tokens of either come in one call. Where it is `placed` it takes the positions (3, B, S) that
    these have on grids, and with `added` features (L, B, S, H) of images for its first layers;
    else positions count from `begin`. With `layered` inputs (B, S, L, D) it takes such for each of
    its layers.
    """

    def __init__(
        self,
        model: nn.Module,
        embeds: Tensor,
        *,
        sees: Seen | None,
        placed: bool,
        added: Tensor | None = None,
        layered: Tensor | None = None,
        begin: int = 0,
        always_first: bool = False,
    ) -> None:
        super().__init__(model)
        self.embeds, self.sees, self.placed = embeds, sees, placed
        self.added, self.layered, self.begin = added, layered, begin
        self.always_first = always_first
        self.told = kinds_parameter(model)

    def forward(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor | None,
        token_type_ids: Tensor | None,
        deepstack_embeds: Tensor | None,
        per_layer_inputs: Tensor | None,
        past: Layers,
    ) -> dict[str, Any]:
        (batch, length), before = inputs_embeds.shape[:2], past[0]["key"].shape[2]
        check_length(attention_mask, before + length)
        tokens = {"inputs_embeds": inputs_embeds}
        if token_type_ids is not None and self.told is not None:
            held = token_type_ids.new_zeros(batch, before)
            tokens[self.told] = torch.cat([held, token_type_ids], 1)
        if per_layer_inputs is not None:
            tokens[LAYER_INPUTS] = per_layer_inputs
        if position_ids is None:
            position_ids = places(attention_mask)[:, -length:] + self.begin
        with added_in_layers(self.model, deepstack_embeds):
            return self._run(tokens, attention_mask, position_ids, past)

    def without_cache(self, batch: int) -> Layers:
        """A past of so many rows without a token."""
        return [
            {
                part: torch.zeros(batch, heads, 0, width, dtype=dtype)
                for part, own in layer.items()
                for heads, width, dtype in (own,)
            }
            for layer in self.shapes
        ]

    def _drawn(self, *_: int) -> tuple[dict[str, Any], dict[str, Any]]:
        batch, seq = self.embeds.shape[:2]
        inputs, shapes = super()._drawn(batch, seq, 5)
        axes = shapes["input_ids"]
        kinds = None if self.sees is None else torch.arange(seq).expand(batch, -1) % 2
        placed = torch.arange(5, 5 + seq).expand(3, batch, -1) if self.placed else None
        given = {
            "inputs_embeds": (self.embeds, axes),
            POSITIONS: (placed, {1: axes[0], 2: axes[1]}),
            KINDS: (kinds, axes),
            ADDED: (self.added, {1: axes[0], 2: axes[1]}),
            LAYER_INPUTS: (self.layered, axes),
        }
        inputs |= {name: value for name, (value, _) in given.items()}
        shapes |= {n: None if value is None else own for n, (value, own) in given.items()}
        return inputs, shapes

    def layout(self, graph: Graph) -> Layout:
        """The parts of the decoder that the graph of this module is."""
        values = {value.name: value for value in graph.inputs}
        pasts = [name for name in self.names.values() if name in values]
        embeds = values["inputs_embeds"]
        return Layout(
            "inputs_embeds",
            "logits",
            tuple(pasts),
            tuple(name.replace("past_key_values", "present") for name in pasts),
            str(embeds.shape[0]),
            str(values[pasts[0]].shape[2]),
            "attention_mask",
            vocabulary=rows_of(table_of(self.model)),
            embeds=True,
            positions=POSITIONS if self.placed else None,
            kinds=KINDS if KINDS in values else None,
            added=ADDED if ADDED in values else None,
            layered=LAYER_INPUTS if LAYER_INPUTS in values else None,
        )
