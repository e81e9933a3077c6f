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
_PLAIN: Mapping[str, Any] = {
    "use_dora": False,
    "use_qalora": False,
    "lora_bias": False,
    "layer_replication": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "alora_invocation_tokens": None,
    "arrow_config": None,
}
"""Settings that would make another formula of it, and what they are where they don't."""
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
    kind = settings.get("peft_type")
    others = [name for name, plain in _PLAIN.items() if settings.get(name) not in (plain, None, [])]
    if kind != "LORA" or others:
        what = f"LoRA with {others[0]}" if kind == "LORA" else f"of the kind {kind}"
        raise LoadError(
            f"{path} is an adapter {what}, which isn't merged here: merge it with peft "
            "(merge_and_unload(), then save_pretrained) and give the folder of the result."
        )


def merge(
    module: torch.nn.Module,
    factors: Mapping[str, Mapping[str, torch.Tensor]],
    whole: Mapping[str, torch.Tensor],
    settings: Mapping[str, Any],
    path: Path,
) -> None:
    """Adds s·BA to the weights of the module, which has the `whole` ones already.

    A mapped file isn't written to. Raises LoadError that names a weight of the adapter which has no
    place in the module.
    """
    own = module.state_dict(keep_vars=True).keys()
    if lost := next((name for name in whole if name not in own), None):
        raise LoadError(
            f"{path} holds {lost}, which {type(module).__name__} doesn't have: merge it with peft "
            "(merge_and_unload(), then save_pretrained) and give the folder of the result."
        )
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
    delta = up @ down * _scale(name, down.shape[0], settings)
    # an embedding and GPT-2's Conv1D keep (in, out)
    owner = module.get_submodule(name)
    if isinstance(owner, torch.nn.Embedding) or type(owner).__name__ == "Conv1D":
        delta = delta.T
    if parameter.shape != delta.shape:
        raise _misfit(path, name, delta.shape, parameter.shape)
    with torch.no_grad():
        _replace(module, parameter, (parameter.float() + delta).to(parameter.dtype))


def _scale(name: str, rank: int, settings: Mapping[str, Any]) -> float:
    """α / r, or α / √r of rank-stabilised LoRA (Kalajdzievski 2023); α may have its own pattern."""
    alpha = settings.get("lora_alpha", 8)
    for pattern, value in (settings.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", name):
            alpha = value
            break
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _parameter(module: torch.nn.Module, name: str, path: Path) -> torch.nn.Parameter:
    try:
        return module.get_parameter(name)
    except AttributeError as error:
        raise LoadError(
            f"{path} adapts {name}, which {type(module).__name__} doesn't have: the adapter was "
            "trained on another base."
        ) from error


def _replace(module: torch.nn.Module, old: torch.nn.Parameter, new: torch.Tensor) -> None:
    """Wherever the parameter stands: tied ones stay tied. A mapped file isn't written to."""
    made = torch.nn.Parameter(new, old.requires_grad)
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if parameter is old:
                setattr(part, name, made)


def _misfit(path: Path, name: str, found: Any, wanted: Any) -> LoadError:
    return LoadError(
        f"{path} adapts {name} by {tuple(found)}, and the base has {tuple(wanted)}: the adapter "
        "was trained on another base."
    )
