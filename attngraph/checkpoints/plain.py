"""Whether the weights of a checkpoint are the numbers that its class computes with.

What is stored otherwise and can't be told to be a known scheme (attngraph/checkpoints/scheme.py)
would be read as if its codes were the numbers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch

from attngraph.checkpoints.scheme import quantised
from attngraph.errors import LoadError

_WHOLE_BYTES = 2  # of the smallest float that models are computed in


def require_dense(file: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Raises LoadError for a tensor of a pickle that isn't all its numbers, one after another."""
    for name, data in weights.items():
        if data.is_meta or data.is_quantized or data.layout is not torch.strided:
            layout = str(data.layout).removeprefix("torch.")
            what = "without its numbers" if data.is_meta else layout
            what = "quantized by torch" if data.is_quantized else what
            raise LoadError(
                f"{file} holds {name} as a tensor {what}: save the dense tensors of the model."
            )


def require_floats(
    path: Path,
    weights: Mapping[str, torch.Tensor],
    module: torch.nn.Module,
    unused: Collection[str],
) -> None:
    """Raises LoadError for codes, or complex numbers, in the place of a module's real ones.

    Its names may not be those of the file: what is whole numbers there may be so in a tensor of the
    module that has the same last name. What transformers passes over without a word, as the causal
    masks that earlier versions saved, is in no place.
    """
    own = dict([*module.named_parameters(), *module.named_buffers()])
    leaves = {name.rpartition(".")[2] for name, data in own.items() if not data.is_floating_point()}
    passed_over = list(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ())
    for name, data in weights.items():
        leaf = name.rpartition(".")[2]
        if data.is_floating_point() or name in unused or leaf in leaves:
            continue
        if name not in own and any(re.search(pattern, name) for pattern in passed_over):
            continue
        kind = str(data.dtype).removeprefix("torch.")
        if data.is_complex():
            raise LoadError(
                f"{path} holds {name} as {kind}, and the model's numbers are real: save its real "
                "part, if that is all it has."
            )
        raise quantised(path, f"stored as {kind} without a scale ({name})")


def require_scaled(path: Path, weights: Mapping[str, torch.Tensor], unused: Iterable[str]) -> None:
    """Raises LoadError for weights in floats of a byte where the class leaves something beside them
    unused: of the many names that a scale has, none needs to be known."""
    small = {
        name.rpartition(".")[0]
        for name, data in weights.items()
        if data.is_floating_point() and data.itemsize < _WHOLE_BYTES
    }
    for name in unused:
        owner, _, leaf = name.rpartition(".")
        beside = {owner, owner.rpartition(".")[0]}
        if small and (beside & small or "scale" in leaf):
            raise quantised(path, f"in floats of 8 bits with scales beside them ({name})")
