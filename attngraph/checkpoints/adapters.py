"""Low-rank adapters (LoRA, Hu et al. 2021) of peft, merged into the weights that they adapt.

A weight W of a linear becomes W + s·BA, or of DoRA (Liu et al. 2024) that with rows of the lengths
that were trained. An adapter's folder names its base, whose class and weights are read as any
checkpoint's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from attngraph.errors import LoadError

_PREFIX = "base_model.model."
_KNOWN = frozenset(
    (
        *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
        *("revision", "inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha"),
        *("lora_dropout", "fan_in_fan_out", "bias", "use_rslora", "modules_to_save"),
        *("layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern"),
        *("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("megatron_core", "qalora_group_size", "runtime_config", "ensure_weight_tying"),
        *("use_dora", "lora_bias", "trainable_token_indices"),
    )
)
"""Settings that leave the formula as it is, or that are read here."""
_OF_PROMPTS = frozenset(
    (
        *("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING"),
        *("ADAPTION_PROMPT", "CPT", "CARTRIDGE"),
    )
)
_KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""What A and B may begin as; any other way changes W too, which peft does again as it loads."""
_MOST_REPEATS = 3
_LENGTHS, _SHIFT = "magnitude_vector", "B.bias"
_FACTORS = re.compile(rf"(.+)\.lora_(?:embedding_)?(A|B|B\.bias|{_LENGTHS})(?:\.weight)?")
_ROWS = re.compile(r"(.+)\.token_adapter\.trainable_tokens_delta")


@dataclass
class Adapted:
    """What an adapter has: the `factors` of each module that it adapts, by A and B, the `rows` of
    tables that were trained one by one, and `whole` weights, heads and biases, that take others'
    places.
    """

    factors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    whole: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """The modules that are adapted."""
        return {*self.factors, *self.rows}


def split(weights: Mapping[str, torch.Tensor]) -> Adapted:
    """The weights of an adapter's file by what is done with them."""
    adapted = Adapted()
    for name, tensor in weights.items():
        inside = name.removeprefix(_PREFIX)
        if found := _FACTORS.fullmatch(inside):
            adapted.factors.setdefault(found[1], {})[found[2]] = tensor
        elif found := _ROWS.fullmatch(inside):
            adapted.rows[found[1]] = tensor
        elif ".original_module." not in inside:
            plain = inside.replace(".base_layer.", ".")
            if (trained := plain.replace(".modules_to_save.", ".")) != plain:
                adapted.whole.setdefault(trained, tensor)
            else:
                adapted.whole[plain] = tensor
    return adapted


def require_plain(path: Path, settings: Mapping[str, Any]) -> None:
    """Raises LoadError for an adapter of another kind than LoRA in its plain form."""
    kind, begins = settings.get("peft_type"), settings.get("init_lora_weights")
    if kind in _OF_PROMPTS:
        base = settings.get("base_model_name_or_path")
        raise LoadError(
            f"{path} is an adapter of the kind {kind}, which adds to prompts and can't be merged "
            f"into weights: give the folder of its base ({base}) to have that alone."
        )
    others = [f"with {name}" for name, value in settings.items() if value and name not in _KNOWN]
    if begins not in _KEEPS_BASE:
        others.append(f"that changes its base first (init_lora_weights {begins!r})")
    if kind != "LORA" or others:
        what = f"LoRA {others[0]}" if kind == "LORA" else f"of the kind {kind}"
        raise LoadError(
            f"{path} is an adapter {what}, which isn't merged here: merge it with peft "
            "(merge_and_unload(), then save_pretrained) and give the folder of the result."
        )


def of_ties(
    module: torch.nn.Module, whole: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Those of the `whole` weights that take the place of one name of a tied weight and not of all.

    peft replaces the one module and leaves what was tied to it as it was, unless it is told to
    keep ties.
    """
    names: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    if settings.get("ensure_weight_tying"):
        return {}
    parts = (tied for tied in names.values() if not tied <= whole.keys())
    return {name: whole[name] for tied in parts for name in tied & whole.keys()}


def merge(
    module: torch.nn.Module,
    adapted: Adapted,
    apart: Mapping[str, torch.Tensor],
    settings: Mapping[str, Any],
    path: Path,
) -> None:
    """Merges an adapter into the module, which has its `whole` weights already but for `apart`.

    A weight is changed in its own module; what was tied to it keeps the base's, but for rows of
    tables. A mapped file isn't written to. Raises LoadError that names a weight of the adapter
    without a place in the module.
    """
    if not adapted.names and not adapted.whole:
        raise LoadError(f"{path} holds an adapter without weights: save it again.")
    own = module.state_dict(keep_vars=True)
    if lost := next((name for name in adapted.whole if name not in own), None):
        raise LoadError(
            f"{path} holds {lost}, which {type(module).__name__} doesn't have: merge it with peft "
            "(merge_and_unload(), then save_pretrained) and give the folder of the result."
        )
    for name, tensor in apart.items():
        if tensor.shape != own[name].shape:
            raise _misfit(path, name, tensor.shape, own[name].shape)
        _replace(module, [name], tensor.to(own[name].dtype))
    for name, parts in adapted.factors.items():
        _replace(module, [f"{name}.weight"], _merged(module, name, parts, settings, path))
    adapted_too = {f"{name}.weight" for name in adapted.names}
    for name, rows in adapted.rows.items():
        weight = f"{name}.weight"
        merged = _with_rows(module, name, rows, settings, path)
        tied = [other for other in _tied_to(module, weight) if other not in adapted_too]
        _replace(module, [weight, *tied], merged)


def _merged(
    module: torch.nn.Module,
    name: str,
    parts: Mapping[str, torch.Tensor],
    settings: Mapping[str, Any],
    path: Path,
) -> torch.Tensor:
    """A weight with its factors; of a linear's bias, the adapter's is added to it in its place."""
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
    scale = _scale(name, down.shape[0], settings, path)
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


def _with_rows(
    module: torch.nn.Module,
    name: str,
    rows: torch.Tensor,
    settings: Mapping[str, Any],
    path: Path,
) -> torch.Tensor:
    """A table (V, H) with rows (N, H) in the places of those that the settings name."""
    parameter = _parameter(module, f"{name}.weight", path)
    said = settings.get("trainable_token_indices")
    if isinstance(said, Mapping):
        ends = (key for key in said if name == key or name.endswith(f".{key}"))
        said = said.get(next(ends, None))
    places = said if isinstance(said, list) else []
    if rows.shape != (len(places), parameter.shape[1]) or not all(
        type(each) is int and 0 <= each < len(parameter) for each in places
    ):
        raise _misfit(path, name, rows.shape, parameter.shape)
    return parameter.detach().index_copy(0, torch.tensor(places), rows.to(parameter.dtype))


def _scale(name: str, rank: int, settings: Mapping[str, Any], path: Path) -> float:
    """α / r, or α / √r of rank-stabilised LoRA (Kalajdzievski 2023); α may have its own pattern."""
    alpha = settings.get("lora_alpha", 8)
    patterns = settings.get("alpha_pattern") or {}
    for pattern in patterns if isinstance(patterns, dict) else ():
        if _fits(pattern, name, path):
            alpha = patterns[pattern]
            break
    if not isinstance(alpha, (int, float)) or not rank:
        raise LoadError(
            f"{path} scales {name} by {str(alpha)[:40]!r} / {rank}: save the adapter again."
        )
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _fits(pattern: str, name: str, path: Path) -> bool:
    """Whether a pattern of a stranger is of this name. Raises LoadError where to find out could
    take for ever: in the time that Python takes, repeats within repeats are exponents, and one
    after another they are factors.
    """
    plain = re.sub(r"\[[^\]]*\]|\\\D", "c", pattern).replace("(?:", "(")
    repeats = len(re.findall(r"[*+?{]", plain))
    if repeats > _MOST_REPEATS or re.search(r"\)[*+?{]|\(\?|\\", plain):
        raise LoadError(
            f"{path} has the pattern {pattern[:40]!r}, which repeats more than the name of a layer "
            "does: name the layers, or merge the adapter with peft."
        )
    try:
        return re.fullmatch(rf"(?:.*\.)?(?:{pattern})", name) is not None
    except re.error as error:
        raise LoadError(f"{path} has the pattern {pattern[:40]!r}: {error}.") from error


def _parameter(module: torch.nn.Module, name: str, path: Path) -> torch.nn.Parameter:
    try:
        return module.get_parameter(name)
    except AttributeError as error:
        raise LoadError(
            f"{path} adapts {name}, which {type(module).__name__} doesn't have: the adapter was "
            "trained on another base."
        ) from error


def _tied_to(module: torch.nn.Module, name: str) -> list[str]:
    """The other names of a parameter."""
    own = module.get_parameter(name)
    every = module.named_parameters(remove_duplicate=False)
    return [other for other, parameter in every if parameter is own and other != name]


def _replace(module: torch.nn.Module, names: Sequence[str], new: torch.Tensor) -> None:
    """In the modules that have it by these names: others, tied to it, keep what they have."""
    made = torch.nn.Parameter(new, module.get_parameter(names[0]).requires_grad)
    for name in names:
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, made)


def _misfit(path: Path, name: str, found: Any, wanted: Any) -> LoadError:
    return LoadError(
        f"{path} adapts {name} by {tuple(found)}, and the base has {tuple(wanted)}: the adapter "
        "was trained on another base."
    )
