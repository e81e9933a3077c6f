"""Low-rank adapters (LoRA, Hu et al. 2021) of peft, merged into the weights that they adapt.

A weight W of a linear becomes W + s·BA, or of DoRA (Liu et al. 2024) that with rows of the lengths
that were trained. An adapter's folder names its base, whose class and weights are read as any
checkpoint's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from attngraph.checkpoints.adapter_settings import require_target, scale_of
from attngraph.checkpoints.folder import Adapter
from attngraph.errors import LoadError

_PREFIX = "base_model.model."
_LENGTHS, _SHIFT = "magnitude_vector", "B.bias"
_FACTORS = re.compile(rf"(.+)\.lora_(?:embedding_)?(A|B|B\.bias|{_LENGTHS})(?:\.weight)?")
_ROWS = re.compile(r"(.+)\.token_adapter\.trainable_tokens_delta")


@dataclass
class Adapted:
    """What an adapter with these settings has: the `factors` of each module that it adapts, by A
    and B, the `rows` of tables that were trained one by one, and `whole` weights, heads and biases,
    that take others' places. Those of `copies` are of modules that were copied to be trained.
    Settings name modules as they were `trained_as`, where these names are others.
    """

    settings: Mapping[str, Any]
    path: Path
    factors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    whole: dict[str, torch.Tensor] = field(default_factory=dict)
    copies: set[str] = field(default_factory=set)
    trained_as: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """The modules that are adapted."""
        return {*self.factors, *self.rows}


def split(adapter: Adapter, weights: Mapping[str, torch.Tensor]) -> Adapted:
    """The weights of an adapter's file by what is done with them.

    Raises LoadError where the file has one of them twice.
    """
    adapted = Adapted(adapter.settings, adapter.path)
    saved = adapter.settings.get("modules_to_save") or ()
    for name, tensor in weights.items():
        inside = name.removeprefix(_PREFIX)
        if found := _FACTORS.fullmatch(inside):
            factors = adapted.factors.setdefault(found[1], {})
            if found[2] in factors:
                raise LoadError(
                    f"{adapter.path} holds {found[2]} of {found[1]} under two names (one is "
                    f"{name}): save the adapter again."
                )
            factors[found[2]] = tensor
        elif found := _ROWS.fullmatch(inside):
            adapted.rows[found[1]] = tensor
        elif ".original_module." not in inside:
            plain = inside.replace(".base_layer.", ".")
            if (trained := plain.replace(".modules_to_save.", ".")) != plain:
                adapted.whole.setdefault(trained, tensor)
            else:
                adapted.whole[plain] = tensor
            if trained != plain or any(_is_part_of(trained, module) for module in saved):
                adapted.copies.add(trained)
    return adapted


def _is_part_of(name: str, module: object) -> bool:
    """Whether a weight is of a module whose name ends so; peft asks for no dot before it."""
    parts = name.split(".")
    owners = (".".join(parts[:count]) for count in range(1, len(parts)))
    return any(owner.endswith(str(module)) for owner in owners)


def covered(module: torch.nn.Module, adapted: Adapted) -> set[str]:
    """The names of weights of which `merge` leaves nothing: the base needn't have them."""
    places = _places(module, adapted)
    found = {name for names in places.values() for name in names}
    return {name for name in found if {name, *_tied_to(module, name)} <= found}


def _places(module: torch.nn.Module, adapted: Adapted) -> dict[str, list[str]]:
    """The names of the weights that each of the `whole` ones takes the place of.

    peft reads a weight into its place, which is that of all that are tied to it; but a module that
    it copied to train it has no ties, unless it is told to keep them.
    """
    own = module.state_dict()
    found: dict[str, list[str]] = {}
    for name in adapted.whole:
        keeps_ties = name not in adapted.copies or adapted.settings.get("ensure_weight_tying")
        tied = _tied_to(module, name) if name in own and keeps_ties else []
        found[name] = [name, *(other for other in tied if other not in adapted.copies)]
    return found


def merge(module: torch.nn.Module, adapted: Adapted) -> None:
    """Merges an adapter into the module, which has the weights of its base.

    A weight is changed in its own module; what was tied to it keeps the base's, but for rows of
    tables and where `_places` says otherwise. A mapped file isn't written to. Raises LoadError that
    names a weight of the adapter without a place in the module.
    """
    path = adapted.path
    if not adapted.names and not adapted.whole:
        raise LoadError(f"{path} holds an adapter without weights: save it again.")
    own = module.state_dict()
    if lost := next((name for name in adapted.whole if name not in own), None):
        raise LoadError(
            f"{path} holds {lost}, which {type(module).__name__} doesn't have: merge it with peft "
            "(merge_and_unload(), then save_pretrained) and give the folder of the result."
        )
    taken: dict[str, str] = {}
    for name, places in _places(module, adapted).items():
        tensor = adapted.whole[name]
        if tensor.shape != own[name].shape:
            raise _misfit(path, name, tensor.shape, own[name].shape)
        other = next((taken[place] for place in places if place in taken), name)
        if not torch.equal(adapted.whole[other], tensor):
            raise LoadError(
                f"{path} holds other numbers for {name} than for {other}, and both are one weight: "
                "save the adapter again."
            )
        taken.update(dict.fromkeys(places, name))
        _replace(module, places, tensor.to(own[name].dtype))
    for name in adapted.factors:
        require_target(adapted.trained_as.get(name, name), adapted.settings, path)
        _replace(module, [f"{name}.weight"], _merged(module, name, adapted))
    adapted_too = {f"{name}.weight" for name in adapted.names}
    for name in adapted.rows:
        weight = f"{name}.weight"
        merged = _with_rows(module, name, adapted)
        tied = [other for other in _tied_to(module, weight) if other not in adapted_too]
        _replace(module, [weight, *tied], merged)


def _merged(module: torch.nn.Module, name: str, adapted: Adapted) -> torch.Tensor:
    """A weight with its factors; of a linear's bias, the adapter's is added to it in its place."""
    parts, path, settings = adapted.factors[name], adapted.path, adapted.settings
    wanted = {"A", "B"} | ({_LENGTHS} if settings.get("use_dora") else set())
    if parts.keys() - {_SHIFT} != wanted:
        raise LoadError(
            f"{path} has {', '.join(sorted(parts))} of {name}, and its settings are for "
            f"{', '.join(sorted(wanted))}: save the adapter again."
        )
    down, up = parts["A"].float(), parts["B"].float()
    parameter = _parameter(module, f"{name}.weight", path)
    if down.dim() != 2 or up.dim() != 2 or up.shape[1] != down.shape[0]:
        raise LoadError(
            f"{path} adapts {name} by factors of shapes {tuple(down.shape)} and "
            f"{tuple(up.shape)}, which aren't those of a linear: merge it with peft."
        )
    scale = scale_of(adapted.trained_as.get(name, name), down.shape[0], settings, path)
    delta = up @ down * scale
    # an embedding and GPT-2's Conv1D keep (in, out)
    owner: Any = module.get_submodule(name)
    turned = isinstance(owner, torch.nn.Embedding) or type(owner).__name__ == "Conv1D"
    before = parameter.detach().float()
    before = before.T if turned else before
    if before.shape != delta.shape:
        raise _misfit(path, name, delta.shape, before.shape)
    merged = before + delta
    if (lengths := parts.get(_LENGTHS)) is not None:
        if lengths.numel() != len(merged):
            raise _misfit(path, name, lengths.shape, before.shape)
        merged = merged * (lengths.float().flatten() / merged.norm(dim=1))[:, None]
    if (shift := parts.get(_SHIFT)) is not None:
        if not hasattr(owner, "bias") or len(shift) != len(merged):
            raise _misfit(path, name, shift.shape, before.shape)
        had = 0.0 if owner.bias is None else owner.bias.detach().float()
        moved = (had + shift.float() * scale).to(parameter.dtype)
        owner.bias = torch.nn.Parameter(moved, parameter.requires_grad)
    return (merged.T if turned else merged).to(parameter.dtype).contiguous()


def _with_rows(module: torch.nn.Module, name: str, adapted: Adapted) -> torch.Tensor:
    """A table (V, H) with rows (N, H) in the places of those that the settings name."""
    rows, trained = adapted.rows[name], adapted.trained_as.get(name, name)
    parameter = _parameter(module, f"{name}.weight", adapted.path)
    said = adapted.settings.get("trainable_token_indices")
    if isinstance(said, Mapping):
        ends = (key for key in said if trained == key or trained.endswith(f".{key}"))
        said = said.get(next(ends, None))
    places = said if isinstance(said, list) else []
    if rows.shape != (len(places), parameter.shape[1]) or not all(
        type(each) is int and 0 <= each < len(parameter) for each in places
    ):
        raise _misfit(adapted.path, name, rows.shape, parameter.shape)
    return parameter.detach().index_copy(0, torch.tensor(places), rows.to(parameter.dtype))


def _parameter(module: torch.nn.Module, name: str, path: Path) -> torch.nn.Parameter:
    try:
        return module.get_parameter(name)
    except AttributeError as error:
        raise LoadError(
            f"{path} adapts {name}, which {type(module).__name__} doesn't have: the adapter was "
            "trained on another base."
        ) from error


def _tied_to(module: torch.nn.Module, name: str) -> list[str]:
    """The other names of a parameter; a buffer has none."""
    every = dict(module.named_parameters(remove_duplicate=False))
    own = every.get(name)
    return [other for other, each in every.items() if each is own and other != name]


def _replace(module: torch.nn.Module, names: Sequence[str], new: torch.Tensor) -> None:
    """Puts a weight into the modules that have it by these names; others tied to it keep theirs."""
    before = dict(module.named_parameters(remove_duplicate=False)).get(names[0])
    made = new if before is None else torch.nn.Parameter(new, before.requires_grad)
    for name in names:
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, made)


def _misfit(path: Path, name: str, found: Any, wanted: Any) -> LoadError:
    return LoadError(
        f"{path} adapts {name} by {tuple(found)}, and the base has {tuple(wanted)}: the adapter "
        "was trained on another base."
    )
