"""A causal LM of `transformers` as a module whose cache is explicit: tensors in, tensors out."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.func import functional_call

from attngraph.errors import UsageError, reason_of
from attngraph.frontend.interface.modalities import TEXT_ALONE, cache_parameter, other_tensors
from attngraph.frontend.interface.stand_ins import stand_ins

_PROBED = 3  # tokens; no model has as many key heads and features in every layer
Layers = list[dict[str, Tensor]]


def is_causal_lm(module: Any) -> bool:
    """Whether the module is a model of transformers that can generate, and has no encoder."""
    return can_generate(module) and not module.config.is_encoder_decoder


def can_generate(module: Any) -> bool:
    """Whether the module is a model of transformers that can generate."""
    transformers = sys.modules.get("transformers")
    is_of_it = transformers is not None and isinstance(module, transformers.PreTrainedModel)
    return is_of_it and bool(module.can_generate())


class OfModel(nn.Module):
    """A module that calls a model of transformers for logits."""

    def __init__(self, model: nn.Module, *, all_logits: bool = False) -> None:
        super().__init__()
        self.model = model
        self.all_logits = all_logits
        taken = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in taken
        self.cuts_early = "logits_to_keep" in taken and not all_logits

    def _logits(self, mask: Tensor | None, positions: Tensor | None, **given: Any) -> Tensor:
        """Logits of all tokens or the last; `given` are tokens and cache by the model's names."""
        kwargs: dict[str, Any] = {"position_ids": positions} if self.takes_positions else {}
        if self.cuts_early:
            kwargs["logits_to_keep"] = 1
        logits: Tensor = self.model(attention_mask=mask, **given, **kwargs).logits
        return logits if self.all_logits else logits[:, -1:]


class WithCache(OfModel):
    """One whose cache is among what it takes and gives."""

    def sample(
        self, batch: int = 2, seq: int = 3, past: int = 5
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inputs to trace with, and the dynamic shapes for torch.export, as `forward` has them."""
        inputs, shapes = self._drawn(batch, seq, past)
        names = inspect.signature(self.forward).parameters
        return tuple(inputs[name] for name in names), {name: shapes[name] for name in names}

    def _drawn(self, batch: int, seq: int, past: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """All inputs that `forward` may have, and their dynamic shapes, by its names."""
        raise NotImplementedError


class Cached(WithCache):
    """The base of these: runs the model with a cache that is tensors.

    With `always_first` the model takes each call for the first one, as one does that reads only
    there what is said of its tokens.
    """

    always_first = False

    def __init__(self, model: nn.Module, *, all_logits: bool = False) -> None:
        super().__init__(model, all_logits=all_logits)
        self.takes_cache = cache_parameter(model.forward)
        self.shapes = _probe(model)

    @property
    def names(self) -> dict[str, str]:
        """The names of the cache in other runtimes, by its names in the trace."""
        return {
            f"{own}_{layer}_{part}": f"{called}.{layer}.{part}"
            for own, called in (("past", "past_key_values"), ("present", "present"))
            for layer, parts in enumerate(self.shapes)
            for part in parts
        }

    def _run(
        self, tokens: dict[str, Tensor], mask: Tensor | None, positions: Tensor, past: Layers
    ) -> dict[str, Any]:
        """`tokens` are ids, or embeddings, and what else is said of each, by the model's names."""
        cache = _filled(past, is_known=not self.always_first)
        given = {self.takes_cache: cache, **tokens}
        logits = self._logits(mask, positions, use_cache=True, **given)
        present = [{"key": layer.keys, "value": layer.values} for layer in cache.layers]
        return {"logits": logits, "present": present}

    def _drawn(self, batch: int, seq: int, past: int) -> tuple[dict[str, Any], dict[str, Any]]:
        seed = torch.Generator().manual_seed(0)
        model: Any = self.model
        vocabulary = int(model.get_input_embeddings().weight.shape[0])
        ids = torch.randint(vocabulary, (batch, seq), generator=seed)
        mask = torch.ones(batch, past + seq, dtype=torch.long)
        layers = [
            {
                name: torch.randn(batch, heads, past, width, generator=seed).to(dtype)
                for name, (heads, width, dtype) in layer.items()
            }
            for layer in self.shapes
        ]
        # by the first name, transformers.js knows how many rows an empty cache has
        rows, length, before = Dim("batch_size"), Dim("seq"), Dim("past")
        shapes = {
            "input_ids": {0: rows, 1: length},
            "attention_mask": {0: rows, 1: Dim.AUTO},
            "position_ids": {0: rows, 1: length},
            "past": [{part: {0: rows, 2: before} for part in layer} for layer in layers],
        }
        positions = torch.arange(past, past + seq).expand(batch, seq)
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        return {**inputs, "past": layers}, shapes


class _OfText(Cached):
    """One whose prompts are text alone. Raises UsageError for a model that takes more."""

    def __init__(self, model: nn.Module, *, all_logits: bool = False) -> None:
        crosses = bool(getattr(model.config, "add_cross_attention", False))
        if others := other_tensors(type(model), crosses=crosses):
            raise UsageError(
                f"{type(model).__name__} also takes {', '.join(others)}, and a decoder is compiled "
                f"without them: its file would answer as if there were none. {TEXT_ALONE}"
            )
        super().__init__(model, all_logits=all_logits)


class CausalLM(_OfText):
    """Token ids and a cache to logits and the longer cache, as `model.generate` calls the model.

    input_ids (B, S), attention_mask (B, P + S) with 1 where there is a token, and for each layer a
    key and a value (B, G, P, D). Positions count the tokens that the mask shows, so that rows may
    be padded on the left. Gives the logits (B, S, V), of the last position alone (B, 1, V) unless
    `all_logits`, and for each layer a key and a value (B, G, P + S, D).

    Raises UsageError where the model has no cache of that kind.
    """

    def forward(self, input_ids: Tensor, attention_mask: Tensor, past: Layers) -> dict[str, Any]:
        length = input_ids.shape[1]
        check_length(attention_mask, past[0]["key"].shape[2] + length)
        positions = places(attention_mask)[:, -length:]
        return self._run({"input_ids": input_ids}, attention_mask, positions, past)


class PlacedCausalLM(CausalLM):
    """A causal LM with the tokens' positions (B, S) as an input, whatever the mask shows."""

    def __init__(self, model: nn.Module, *, all_logits: bool = False) -> None:
        super().__init__(model, all_logits=all_logits)
        if not self.takes_positions:
            raise UsageError(
                f"{type(model).__name__} takes no position_ids: it tells from the mask where a "
                "token stands, so leave out --position-ids (position_ids=True)."
            )

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: Layers
    ) -> dict[str, Any]:
        check_length(attention_mask, past[0]["key"].shape[2] + input_ids.shape[1])
        return self._run({"input_ids": input_ids}, attention_mask, position_ids, past)


class UnpaddedCausalLM(_OfText):
    """A causal LM without padded rows: it takes no mask, and all rows have the same positions."""

    def forward(self, input_ids: Tensor, past: Layers) -> dict[str, Any]:
        before = past[0]["key"].shape[2]
        positions = torch.arange(before, before + input_ids.shape[1])[None]
        return self._run({"input_ids": input_ids}, None, positions, past)


def places(mask: Tensor) -> Tensor:
    """How many tokens a mask (B, T) shows before each; 0 where it hides one."""
    return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)


def check_length(mask: Tensor, tokens: Any) -> None:
    """Says of a mask (B, T), in a trace too, that it has so many tokens."""
    check: Any = torch._check
    check(mask.shape[1] == tokens)


def _filled(past: Layers, *, is_known: bool = True) -> Any:
    """transformers' growing cache with these tensors in it: every layer kept at full length.

    Where that isn't known, the cache says that nothing was put into it.
    """
    from transformers import DynamicCache

    class Filled(DynamicCache):
        is_initialized = is_known

    cache = Filled()
    for index, layer in enumerate(past):
        cache.update(layer["key"], layer["value"], index)
    return cache


def _probe(model: nn.Module) -> list[dict[str, tuple[int, int, torch.dtype]]]:
    """(heads, width, dtype) of each layer's key and value, from a run on a few tokens."""
    from transformers import DynamicCache

    name = type(model).__name__
    cache = DynamicCache()
    training = model.training
    device = next(model.parameters()).device
    ids = torch.ones(1, _PROBED, dtype=torch.long, device=device)
    try:
        with torch.no_grad(), stand_ins(model.eval()) as weights:
            given = {"input_ids": ids, cache_parameter(model.forward): cache, "use_cache": True}
            functional_call(model, dict(weights), (), given)
    except Exception as error:
        raise UsageError(
            f"The cache of {name} can't be found: it doesn't run with a DynamicCache of "
            f"transformers ({reason_of(error)})."
        ) from error
    finally:
        model.train(training)
    layers = []
    for index, layer in enumerate(cache.layers):
        found: dict[str, tuple[int, int, torch.dtype]] = {}
        for part, attribute in (("key", "keys"), ("value", "values")):
            tensor = getattr(layer, attribute, None)
            if not isinstance(tensor, Tensor) or tensor.ndim != 4 or tensor.shape[2] != _PROBED:
                raise UsageError(
                    f"The cache of {name} can't be found: layer {index} keeps a "
                    f"{type(layer).__name__} without {attribute} (batch, heads, length, width)."
                )
            found[part] = tensor.shape[1], tensor.shape[3], tensor.dtype
        layers.append(found)
    if not layers:
        raise UsageError(
            f"{name} keeps no cache: it put nothing into a DynamicCache of transformers. Without "
            "one, it compiles as any module does, from all tokens of a text to their logits: "
            "attngraph.optimize(model, (input_ids,), dynamic_shapes=({0: Dim('batch'), "
            "1: Dim('seq')},)). Task feature-extraction gives its hidden states."
        )
    return layers
