"""Low-rank adapters (LoRA, Hu et al. 2021) of peft, merged into the weights that they adapt.

A weight W of a linear becomes W + s·BA. An adapter's folder names its base, whose class and weights
are read as any checkpoint's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
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
    )
)
"""Settings that leave the formula as it is, or that are read here."""
_KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""What A and B may begin as; any other way changes W too, which peft does again as it loads."""
_MOST_REPEATS = 3
_FACTORS = re.compile(r"(.+)\.lora_(A|B|embedding_A|embedding_B)(?:\.weight)?")


def split(
    adapter: Mapping[str, torch.Tensor],
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """The factors A and B by the module that they adapt, and weights that take another's place.

    The latter are heads and biases that were trained as they are.
    """
    factors: dict[str, dict[str, torch.Tensor]] = {}
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in adapter.items():
        inside = name.removeprefix(_PREFIX)
        if found := _FACTORS.fullmatch(inside):
            factors.setdefault(found[1], {})[found[2][-1]] = tensor
        else:
            whole[inside.replace(".base_layer.", ".")] = tensor
    return factors, whole


def require_plain(path: Path, settings: Mapping[str, Any]) -> None:
    """Raises LoadError for an adapter of another kind than LoRA in its plain form."""
    kind, begins = settings.get("peft_type"), settings.get("init_lora_weights")
    others = [name for name, value in settings.items() if value and name not in _KNOWN]
    if begins not in _KEEPS_BASE:
        others.append(f"init_lora_weights {begins!r}, which changes the base")
    if kind != "LORA" or others:
        what = f"LoRA with {others[0]}" if kind == "LORA" else f"of the kind {kind}"
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
    factors: Mapping[str, Mapping[str, torch.Tensor]],
    whole: Mapping[str, torch.Tensor],
    apart: Mapping[str, torch.Tensor],
    settings: Mapping[str, Any],
    path: Path,
) -> None:
    """Adds s·BA to the weights of the module, which has the `whole` ones already but for `apart`.

    A weight is changed in its own module; what was tied to it keeps the base's. A mapped file isn't
    written to. Raises LoadError that names a weight of the adapter without a place in the module.
    """
    if not factors and not whole:
        raise LoadError(f"{path} holds an adapter without weights: save it again.")
    own = module.state_dict(keep_vars=True)
    if lost := next((name for name in whole if name not in own), None):
        raise LoadError(
            f"{path} holds {lost}, which {type(module).__name__} doesn't have: merge it with peft "
            "(merge_and_unload(), then save_pretrained) and give the folder of the result."
        )
    for name, tensor in apart.items():
        if tensor.shape != own[name].shape:
            raise _misfit(path, name, tensor.shape, own[name].shape)
        _replace(module, name, tensor.to(own[name].dtype))
    for name, parts in factors.items():
        _add(module, name, parts, settings, path)


def _add(
    module: torch.nn.Module,
    name: str,
    parts: Mapping[str, torch.Tensor],
    settings: Mapping[str, Any],
    path: Path,
) -> None:
    if parts.keys() != {"A", "B"}:
        raise LoadError(f"{path} has one factor of two for {name}: save the adapter again.")
    down, up = parts["A"].float(), parts["B"].float()
    parameter = _parameter(module, f"{name}.weight", path)
    if down.dim() != 2 or up.dim() != 2 or up.shape[1] != down.shape[0]:
        raise LoadError(
            f"{path} adapts {name} by factors of shapes {tuple(down.shape)} and "
            f"{tuple(up.shape)}, which aren't those of a linear: merge it with peft."
        )
    delta = up @ down * _scale(name, down.shape[0], settings, path)
    # an embedding and GPT-2's Conv1D keep (in, out)
    owner = module.get_submodule(name)
    if isinstance(owner, torch.nn.Embedding) or type(owner).__name__ == "Conv1D":
        delta = delta.T
    if parameter.shape != delta.shape:
        raise _misfit(path, name, delta.shape, parameter.shape)
    with torch.no_grad():
        merged = (parameter.float() + delta).to(parameter.dtype)
    _replace(module, f"{name}.weight", merged)


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


def _replace(module: torch.nn.Module, name: str, new: torch.Tensor) -> None:
    """In the module that has it alone: others that are tied to it keep what they have."""
    owner, _, leaf = name.rpartition(".")
    part = module.get_submodule(owner)
    setattr(part, leaf, torch.nn.Parameter(new, module.get_parameter(name).requires_grad))


def _misfit(path: Path, name: str, found: Any, wanted: Any) -> LoadError:
    return LoadError(
        f"{path} adapts {name} by {tuple(found)}, and the base has {tuple(wanted)}: the adapter "
        "was trained on another base."
    )
