"""What sentence-transformers makes of a model's tokens (B, S, H): one embedding of each text.

The stages of a folder (stages.py) are put behind the model as a forward hook, and so they are
compiled with it. Each takes the features by name, and returns them with its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from attngraph.checkpoints.folder import MODULES
from attngraph.checkpoints.stages import EMBEDDING, RETURNED, TOKENS, Stage, Stages
from attngraph.errors import LoadError

_MASK = "attention_mask"
_SMALLEST = 1e-9  # of what a mean divides by, which is 0 where a row has no token

Features = dict[str, Tensor]


def module_of(stage: Stage) -> nn.Module:
    """What computes a stage, with weights that are not filled yet."""
    settings = stage.settings
    match stage.kind:
        case "Pooling":
            return Pooling(settings["pooling_mode"])
        case "SpladePooling":
            sums = settings.get("pooling_strategy") == "sum"
            return SpladePooling(
                sums=sums, twice=settings.get("activation_function") == "log1p_relu"
            )
        case "Normalize":
            return Normalize(stage.read, stage.written)
        case "LayerNorm":
            return LayerNorm(settings["dimension"])
        case "Dense":
            name = settings["activation_function"]
            kind: Any = getattr(nn, name.rpartition(".")[2], None)
            try:
                activation: nn.Module = kind()
            except TypeError as error:  # there is no such class, or it wants settings
                raise LoadError(
                    f"A Dense of {MODULES} has the activation {name}, which torch.nn lacks, "
                    "or has with settings only."
                ) from error
            linear = nn.Linear(
                settings["in_features"], settings["out_features"], settings.get("bias", True)
            )
            dense = Dense(linear, activation, stage.read, stage.written)
            if settings.get("use_residual"):
                dense.add_residual()
            return dense
    return nn.Identity()  # Dropout


def put_behind(model: nn.Module, stages: Stages, modules: Sequence[nn.Module]) -> None:
    """The model then returns its own outputs, and what the modules of its stages make of them."""
    model.add_module(EMBEDDING, _Stages(RETURNED[stages.task], modules))
    model.register_forward_hook(_embed, with_kwargs=True)


class _Stages(nn.Module):
    def __init__(self, tokens: str, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self.tokens = tokens
        self.stages = nn.ModuleList(stages)

    def forward(self, outputs: Mapping[str, Tensor], mask: Tensor | None) -> Features:
        tokens = outputs[self.tokens]
        if mask is None:
            mask = torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
        features = {TOKENS: tokens, _MASK: mask}
        for stage in self.stages:
            features = stage(features)
        made = {n: each for n, each in features.items() if n != _MASK and each is not tokens}
        return {**outputs, **made}


def _embed(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Features:
    """The outputs of a call with what the stages make of them; caches are left out."""
    given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    own = {name: each for name, each in output.items() if isinstance(each, Tensor)}
    stages: Features = model.get_submodule(EMBEDDING)(own, given.get(_MASK))
    return stages


class Pooling(nn.Module):
    """One row (B, n·H) of the tokens (B, S, H) that a mask (B, S) shows, for n `modes`."""

    def __init__(self, modes: Sequence[str]) -> None:
        super().__init__()
        self.modes = tuple(modes)

    def forward(self, features: Features) -> Features:
        tokens, mask = features[TOKENS], features[_MASK]
        rows = [self._pooled(mode, tokens, mask) for mode in self.modes]
        return {**features, EMBEDDING: torch.cat(rows, -1)}

    def _pooled(self, mode: str, tokens: Tensor, mask: Tensor) -> Tensor:
        shown = mask.unsqueeze(-1)
        if mode == "max":
            return tokens.masked_fill(shown == 0, -torch.inf).amax(1)
        first = mask.int().argmax(1, keepdim=True)  # (B, 1); 0 where a row shows none
        places = torch.arange(mask.shape[1], device=mask.device)
        if mode == "cls":
            return _taken(tokens, first)
        if mode == "lasttoken":
            last = (mask * places).argmax(1, keepdim=True)
            return _taken(tokens * shown.to(tokens.dtype), last)
        # Half precision has too few digits for a sum of many tokens.
        wide = tokens if tokens.dtype == torch.float64 else tokens.float()
        parts = shown.to(wide.dtype)
        if mode == "weightedmean":
            parts = parts * (places + 1 - first).unsqueeze(-1)
        size = parts.sum(1).clamp(min=_SMALLEST)
        size = size.sqrt() if mode == "mean_sqrt_len_tokens" else size
        return ((wide * parts).sum(1) / size).to(tokens.dtype)


def _taken(tokens: Tensor, places: Tensor) -> Tensor:
    """The token of each row (S, H) at its place (B, 1): (B, H)."""
    return tokens.gather(1, places.unsqueeze(-1).expand(-1, -1, tokens.shape[-1])).squeeze(1)


class SpladePooling(nn.Module):
    """How much each word of the vocabulary (B, V) is meant by the tokens' logits (B, S, V)."""

    def __init__(self, *, sums: bool, twice: bool) -> None:
        super().__init__()
        self.sums, self.twice = sums, twice

    def forward(self, features: Features) -> Features:
        logits, shown = features[TOKENS], features[_MASK].unsqueeze(-1)
        found = (logits * shown.to(logits.dtype)).relu().log1p()
        found = found.log1p() if self.twice else found
        return {**features, EMBEDDING: found.sum(1) if self.sums else found.amax(1)}


class Normalize(nn.Module):
    """A feature at length 1."""

    def __init__(self, read: str, written: str) -> None:
        super().__init__()
        self.read, self.written = read, written

    def forward(self, features: Features) -> Features:
        return {**features, self.written: functional.normalize(features[self.read], dim=-1)}


def _of_width(width: int, features: Features, name: str, kind: str) -> Tensor:
    """A feature that a stage takes. Raises LoadError where it has another width."""
    found = features[name]
    if found.shape[-1] != width:
        raise LoadError(
            f"A {kind} of {MODULES} takes {name} of {width} numbers, and what stands before it "
            f"makes {found.shape[-1]}: fetch the folder again, from one revision."
        )
    return found


class Dense(nn.Module):
    """A linear and an activation."""

    def __init__(self, linear: nn.Linear, activation: nn.Module, read: str, written: str) -> None:
        super().__init__()
        self.linear, self.activation = linear, activation
        self.read, self.written = read, written
        self.residual: nn.Module | None = None

    def add_residual(self) -> None:
        """What is read is added to what is made, through a linear where the sizes differ."""
        width, made = self.linear.in_features, self.linear.out_features
        self.residual = nn.Identity() if width == made else nn.Linear(width, made, bias=False)

    def forward(self, features: Features) -> Features:
        x = _of_width(self.linear.in_features, features, self.read, "Dense")
        y = self.activation(self.linear(x))
        return {**features, self.written: y if self.residual is None else y + self.residual(x)}


class LayerNorm(nn.Module):
    """A norm of the embedding (B, H)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, features: Features) -> Features:
        (width,) = self.norm.normalized_shape
        x = _of_width(width, features, EMBEDDING, "LayerNorm")
        return {**features, EMBEDDING: self.norm(x)}
