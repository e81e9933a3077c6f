"""Read what `torch.save` wrote: a state dict freely, a whole module only when trusted."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from attngraph.errors import LoadError, first_line, listed
from attngraph.frontend.files.factory import importable_cwd

_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_SHOWN = 6


def load_pickle(path: Path, *, legacy: bool, trust_pickle: bool) -> object:
    """The saved object. Tensors are mapped from the file, not copied, where its format allows.

    Tried with `weights_only=True` first; what that refuses is a LoadError that names the globals
    the file wants to import, unless `trust_pickle`.
    """
    try:
        if legacy or path.suffix == ".safetensors":  # a name torch.load goes by, before the content
            with path.open("rb") as file:
                return torch.load(file, map_location="cpu", weights_only=True)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        if not trust_pickle:
            names = list(dict.fromkeys(_wanted(path, legacy, error)))
            what = listed(names, _SHOWN) or "more than tensors"
            raise LoadError(
                f"{path} is a pickle that imports {what}, and loading it could run code; save a "
                "state dict and pass --factory pkg.mod:fn, or pass --trust-pickle if you trust its "
                "author."
            ) from error
    except Exception as error:
        raise _damaged(path, error) from error
    try:
        with importable_cwd(), path.open("rb") as file:
            return torch.load(file, map_location="cpu", weights_only=False)
    except (AttributeError, ImportError) as error:
        raise LoadError(
            f"{path} pickles a class that can't be imported here ({error}); run from the folder "
            "that defines it, or save a state dict and pass --factory pkg.mod:fn."
        ) from error
    except Exception as error:
        raise _damaged(path, error) from error


def unwrap_state_dict(value: object) -> dict[str, torch.Tensor] | None:
    """The state dict in a checkpoint, at the top or under `state_dict` or `model`; or None."""
    if not isinstance(value, Mapping):
        return None
    found: Mapping[object, object] = value
    for key in ("state_dict", "model_state_dict", "model"):
        nested = value.get(key)
        if isinstance(nested, Mapping):
            found = nested
            break
    weights: dict[str, torch.Tensor] = {}
    for name, item in found.items():
        if not isinstance(name, str) or not isinstance(item, torch.Tensor):
            return None
        weights[name] = item
    return weights or None


def unsupported_globals(data: bytes) -> list[str]:
    """What a torch.save archive in memory needs beyond tensors and containers; empty if nothing."""
    if not data:
        return []
    try:
        torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        return _GLOBAL.findall(str(error)) or ["something torch can't load as plain tensors"]
    return []


def _wanted(path: Path, legacy: bool, error: Exception) -> list[str]:
    named = _GLOBAL.findall(str(error))
    if legacy:
        return named
    try:
        return list(torch.serialization.get_unsafe_globals_in_checkpoint(path)) or named
    except Exception:
        return named


def _damaged(path: Path, error: Exception) -> LoadError:
    reason = first_line(error)
    return LoadError(
        f"{path} is damaged: torch.load can't read it ({reason}); save or fetch it again."
    )
