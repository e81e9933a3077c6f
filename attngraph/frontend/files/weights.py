"""Put a state dict into a module: mapped tensors are taken over, not copied, and ties are kept."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from attngraph.checkpoints.prefixes import shared_prefixes, taken_off
from attngraph.errors import LoadError

_SHOWN = 3


def fit_weights(
    module: torch.nn.Module, weights: dict[str, torch.Tensor], *, file: str, factory: str
) -> list[str]:
    """Load `weights` into `module` in place, cast to its dtypes; returns what is to be told of it.

    Tied parameters may be stored once (safetensors drops duplicates), and all names may begin with
    what a wrapper put there. Raises LoadError with the first few keys that are missing, unexpected
    or of another shape.
    """
    ties = _ties(module)
    own = module.state_dict(keep_vars=True)
    prefix = _prefix(weights, own)
    weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    weights = _spread(weights, ties, file)
    shapes = [
        f"{name} is {tuple(value.shape)} in the file and {tuple(own[name].shape)} in the module"
        for name, value in weights.items()
        if _both_tensors(own.get(name), value) and own[name].shape != value.shape
    ]
    if shapes:
        raise _mismatch(file, factory, [f"{len(shapes)} of another shape ({_first(shapes)})"])
    cast = {
        name: value.to(own[name].dtype) if _both_tensors(own.get(name), value) else value
        for name, value in weights.items()
    }
    try:
        result = module.load_state_dict(cast, strict=False, assign=True)
    except RuntimeError as error:
        raise LoadError(f"{file} can't be loaded into the module of {factory}: {error}.") from error
    faults = [
        f"{len(keys)} {what} ({_first(keys)})"
        for what, keys in (("missing", result.missing_keys), ("unexpected", result.unexpected_keys))
        if keys
    ]
    if faults:
        raise _mismatch(file, factory, faults)
    _retie(module, ties)
    return [taken_off(prefix)] if prefix else []


def _prefix(weights: Collection[str], own: Collection[str]) -> str:
    """The prefix of every name in the file that no name in the module has."""
    for prefix in ("", *shared_prefixes(weights)):
        if all(name.removeprefix(prefix) in own for name in weights):
            return prefix
    return ""


def _ties(module: torch.nn.Module) -> list[list[str]]:
    """Groups of names that are one tensor."""
    groups: dict[int, list[str]] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            groups.setdefault(id(value), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _spread(
    weights: dict[str, torch.Tensor], ties: list[list[str]], file: str
) -> dict[str, torch.Tensor]:
    """Give every name of a tie the tensor that the file has for one of them."""
    result = dict(weights)
    for names in ties:
        stored = [name for name in names if name in weights]
        for name in stored[1:]:
            if not torch.equal(weights[name], weights[stored[0]]):
                raise LoadError(
                    f"{stored[0]} and {name} are one tied parameter in the factory's module but "
                    f"differ in {file}; untie them in the factory."
                )
        if stored:
            result.update(dict.fromkeys(names, weights[stored[0]]))
    return result


def _retie(module: torch.nn.Module, ties: list[list[str]]) -> None:
    """Assigning gave each name a parameter of its own: make a tie one parameter again."""
    for names in ties:
        owner, _, leaf = names[0].rpartition(".")
        shared = getattr(module.get_submodule(owner), leaf)
        for name in names[1:]:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, shared)


def check_materialised(module: torch.nn.Module, factory: str) -> None:
    """Raise LoadError if a module built on the meta device didn't get all of its tensors."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    empty = [name for name, tensor in tensors if tensor.is_meta]
    if empty:
        raise LoadError(
            f"The module of {factory} has no values for {_first(empty)}, which no checkpoint "
            "stores; build buffers on the CPU and only parameters on the meta device."
        )


def _both_tensors(left: object, right: object) -> bool:
    return isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)


def _mismatch(file: str, factory: str, faults: list[str]) -> LoadError:
    return LoadError(
        f"{file} doesn't fit the module of {factory}: {' and '.join(faults)}; check that the "
        "factory builds the configuration the weights were saved from."
    )


def _first(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
