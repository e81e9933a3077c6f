"""How a checkpoint's weights are quantized, by its settings; checked without torch.

A scheme is read if all of what its settings say is understood. Whatever is not, or would change
what the model computes beside its weights, is a LoadError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attngraph.errors import LoadError

KEYS = ("quantization_config", "compression_config", "quantization")
"""What a config, or a part of one, calls the settings."""
BESIDE = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files that tools put beside config.json instead of a key in it."""
_SCALES = ("weight_scale", "weight_scale_inv", "qweight", "weight_packed", "SCB", "absmax")
"""How names end that belong to a quantized weight."""


@dataclass(frozen=True)
class Scheme:
    """The method that quantized the weights of a checkpoint, and its settings."""

    method: str
    settings: Mapping[str, Any]


def scheme_of(
    path: Path, config: Mapping[str, Any], beside: Callable[[str], Mapping[str, Any] | None]
) -> Scheme | None:
    """The scheme that config.json or a file beside it tells; None where weights are plain.

    `beside` reads a JSON file of the folder, and gives None where there is none. Raises
    LoadError for a scheme that isn't understood.
    """
    files = ((name, method, beside(name)) for name, method in BESIDE.items())
    others = ((method, held, f" ({name})") for name, method, held in files if held is not None)
    found = _told(config) or next(others, None)
    if found is None:
        return None
    method, settings, where = found
    check = _CHECKS.get(method)
    if check is None:
        raise quantised(path, f"quantized by {method}{where}")
    if why := check(settings):
        raise quantised(path, f"quantized by {method}{where}", f", as {why}")
    return Scheme(method, settings)


def _told(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], str] | None:
    for part in [config, *(part for part in config.values() if isinstance(part, dict))]:
        for key in KEYS:
            if not part.get(key):
                continue
            settings = part[key] if isinstance(part[key], dict) else {}
            method = settings.get("quant_method") or (
                "bitsandbytes"
                if "load_in_4bit" in settings or "load_in_8bit" in settings
                else "mlx"
                if key == "quantization"
                else key
            )
            return str(method), settings, ""
    return None


def _gptq(settings: Mapping[str, Any]) -> str:
    bits = settings.get("bits")
    if bits not in (4, 8):
        return f"its bits are {bits} and not 4 or 8"
    for key in ("checkpoint_format", "format"):
        kind = settings.get(key) or "gptq"
        if kind not in ("gptq", "gptq_v2"):
            return f"its {key} is {kind}"
    if settings.get("pack_dtype", "int32") != "int32":
        return f"its codes are packed in {settings['pack_dtype']}"
    return _first(settings, "is_marlin_format", "adapter", "rotation")


def _awq(settings: Mapping[str, Any]) -> str:
    bits = settings.get("bits", settings.get("w_bit"))
    if bits != 4:
        return f"its bits are {bits} and not 4"
    kind = settings.get("version") or settings.get("format") or "gemm"
    if str(kind).lower() != "gemm":
        return f"its version is {kind} and not gemm"
    return "" if settings.get("zero_point", True) else "it has no zero points"


def _compressed(settings: Mapping[str, Any]) -> str:
    if settings.get("format") != "pack-quantized":
        return f"its format is {settings.get('format')} and not pack-quantized"
    sparsity = settings.get("sparsity_config") or {"format": "dense"}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        return f"its weights are sparse ({sparsity})"
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        return "it tells no config_groups"
    for group in groups.values():
        weights = group.get("weights")
        if not isinstance(weights, dict):
            return "a group has no weights"
        bits, kind = weights.get("num_bits"), weights.get("type", "int")
        if bits not in (4, 8) or kind != "int":
            return f"its weights are {bits} bits of {kind}"
        if weights.get("strategy") not in ("group", "channel", "tensor"):
            return f"its strategy is {weights.get('strategy')}"
        if group.get("format") not in (None, "pack-quantized"):
            return f"its format is {group['format']}"
        if found := _first(group, "input_activations", "output_activations"):
            return found
    return _first(settings, "kv_cache_scheme", "transform_config")


def _bitsandbytes(settings: Mapping[str, Any]) -> str:
    return ""  # what matters of it is beside each weight


_CHECKS = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "bitsandbytes": _bitsandbytes,
}


def _first(settings: Mapping[str, Any], *names: str) -> str:
    return next((f"it has {name}" for name in names if settings.get(name)), "")


def quantised(path: Path, how: str, why: str = "") -> LoadError:
    """The error for weights that aren't numbers as the model's class has them."""
    return LoadError(
        f"{path} holds weights {how}, which attngraph doesn't read{why}: give the checkpoint that "
        "they were made from and quantize with --weights int8 or int4, or save a copy with plain "
        "weights (model.dequantize(), then save_pretrained)."
    )


def require_plain_weights(path: Path, names: Iterable[str]) -> None:
    """Raises LoadError for weights with scales of their own, of which the config says nothing."""
    found = [name for name in names if name.rpartition(".")[2] in _SCALES]
    if found:
        raise quantised(path, f"quantized with scales beside them ({found[0]})")
