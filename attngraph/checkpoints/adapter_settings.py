"""What the settings of an adapter say: of which kind it is, what it adapts and by which factor.

Of the regular expressions of a stranger those are read that are sure to end soon.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from attngraph.errors import LoadError

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
_DEFAULT = 8
"""peft's rank and α."""
_LAYER = re.compile(r".*?\.([^.]*)\.(\d+)\.")
"""The first numbered part of a name, and what holds it."""


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


def require_target(name: str, settings: Mapping[str, Any], path: Path) -> None:
    """Raises LoadError for factors of a module that the settings don't name: peft leaves them out.

    Settings that are regular expressions are taken at their word.
    """
    targets, barred = settings.get("target_modules"), settings.get("exclude_modules")
    if settings.get("ensure_weight_tying"):
        return  # what is tied to a target is one too
    is_target = not isinstance(targets, list) or _ends(name, targets)
    is_barred = isinstance(barred, list) and _ends(name, barred)
    if is_target and not is_barred and (name in (targets or ()) or _in_layers(name, settings)):
        return
    raise LoadError(
        f"{path} holds factors of {name}, which its settings leave out (target_modules, "
        "exclude_modules, layers_to_transform): name it there, or take the factors out."
    )


def _ends(name: str, others: Collection[object]) -> bool:
    return any(name == other or name.endswith(f".{other}") for other in others)


def _in_layers(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether a module is in one of the layers that are adapted, if not all are."""
    wanted, holders = settings.get("layers_to_transform"), settings.get("layers_pattern")
    if wanted is None or wanted == [] or isinstance(settings.get("target_modules"), str):
        return True
    numbers = wanted if isinstance(wanted, list) else [wanted]
    holders = [holders] if isinstance(holders, str) and holders else holders
    if not holders:
        found = _LAYER.match(name)
        return found is not None and int(found[2]) in numbers
    parts = name.split(".")
    numbered = (n for holder, n in pairwise(parts[:-1]) if holder in holders and n.isdecimal())
    return int(next(numbered, -1)) in numbers


def scale_of(name: str, rank: int, settings: Mapping[str, Any], path: Path) -> float:
    """α / r, or α / √r of rank-stabilised LoRA (Kalajdzievski 2023); α may have its own pattern."""
    said = _of_pattern("rank_pattern", name, settings, settings.get("r", _DEFAULT), path)
    if said != rank:
        raise LoadError(
            f"{path} says the rank {str(said)[:40]} for {name}, and its factors have {rank}: save "
            "the adapter again."
        )
    alpha = settings.get("lora_alpha", _DEFAULT)
    alpha = _of_pattern("alpha_pattern", name, settings, alpha, path)
    if not isinstance(alpha, (int, float)) or not rank:
        raise LoadError(
            f"{path} scales {name} by {str(alpha)[:40]!r} / {rank}: save the adapter again."
        )
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _of_pattern(key: str, name: str, settings: Mapping[str, Any], rest: Any, path: Path) -> Any:
    """What a setting says by patterns of names, the first that fits, or the `rest`."""
    patterns = settings.get(key)
    for pattern, value in patterns.items() if isinstance(patterns, dict) else ():
        if _fits(pattern, name, path):
            return value
    return rest


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
