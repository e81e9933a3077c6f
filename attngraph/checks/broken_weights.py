"""Weights that hold NaN or infinity: told by name, and refused where the model's outputs do too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from attngraph.checks.check import Check
from attngraph.errors import ParityError
from attngraph.ir import Graph
from attngraph.ir.storage import wraps
from attngraph.mapped import release_read

_SHOWN = 3


def unsound(module: torch.nn.Module, graph: Graph) -> list[str]:
    """What the weights that the graph reads hold beside numbers: how many elements of which.

    Infinity in a buffer may be that of a mask, and what is no weight of the module is its own code.
    """
    read = {value.data.data_ptr() for value in graph.constants.values() if value.data is not None}
    return [
        f"{found} of the weight {name}"
        for name, weight, is_parameter in _weights(module)
        if weight.data_ptr() in read and (found := _odd(weight, infinite=is_parameter))
    ]


def require_sound(check: Check, *, verifies: bool) -> list[str]:
    """A note on weights with NaN or infinity, if there are any.

    Raises ParityError where the model's own outputs aren't finite in a case that is checked.
    """
    names = unsound(check.module, check.captured.graph)
    if not names:
        return []
    more = [f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    told = f"There is {', '.join([*names[:_SHOWN], *more])}"
    if not verifies:
        return [f"{told}, and nothing was checked: outputs may be no numbers."]
    for label, reference in check.all_references().items():
        outputs = zip(reference.names, reference.eager, strict=True)
        bad = [name for name, output in outputs if not _is_finite(output)]
        if bad:
            raise ParityError(
                f"{told}, and {check.model.source} itself returns NaN or infinity in "
                f"{', '.join(bad[:_SHOWN])} at {label}: load sound weights. Nothing was written."
            )
    return [f"{told}; no output of what was checked has any."]


def _weights(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    both: tuple[Mapping[str, torch.Tensor], ...] = (
        dict(module.named_parameters()),
        dict(module.named_buffers()),
    )
    for tensors, is_parameter in zip(both, (True, False), strict=True):
        for name, weight in tensors.items():
            plain = weight.layout is torch.strided and not weight.is_meta and not wraps(weight)
            if plain and weight.is_floating_point() and weight.numel():
                yield name, weight.detach(), is_parameter


def _odd(weight: torch.Tensor, *, infinite: bool) -> str:
    """What a weight holds beside numbers, such as "NaN in 3 of 64 elements"; it is read once."""
    wide = weight if weight.itemsize > 1 else weight.float()
    ends = torch.stack(torch.aminmax(wide))  # NaN goes through both
    found = ends.isnan().any() or (infinite and not ends.isfinite().all())
    release_read(weight)
    if not found:
        return ""
    nan = int(wide.isnan().sum())
    count, kind = (nan, "NaN") if nan else (int(wide.isinf().sum()), "infinity")
    return f"{kind} in {count} of {weight.numel()} elements"


def _is_finite(output: torch.Tensor) -> bool:
    return not output.is_floating_point() or bool(output.isfinite().all())
