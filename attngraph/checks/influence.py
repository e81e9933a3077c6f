"""Which parameters of a module change its outputs: one backward pass, and trials of the rest.

A gradient of exactly zero may hide an influence, as where the outputs are integers or a path goes
through a comparison. So a parameter without one is replaced by noise: if no bit of any output
changes, it has none on these inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.func import functional_call
from torch.utils import _pytree as pytree

from attngraph.export.parity.eager_loops import plain_loops
from attngraph.inference import each_leaf, inference
from attngraph.ir.storage import place_of

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
_MOST_TRIALS = 24


@dataclass
class Influence:
    """The parameters by name: those that change an output, those that don't, and those for which
    this is unknown; `reason` says why not.
    """

    present: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    reason: str = ""


def influence(module: torch.nn.Module, names: Sequence[str], calls: Sequence[Call]) -> Influence:
    """The influence of the parameters with these names, on any of these inputs."""
    parameters = dict(module.named_parameters())
    left = [name for name in names if _is_number(parameters[name])]
    found = Influence(unknown=[name for name in names if name not in set(left)])
    if isinstance(module, torch.jit.ScriptModule):
        return Influence(
            unknown=list(names), reason="a scripted module's weights can't be replaced"
        )
    for call in calls:
        if not left:
            break
        try:
            moved = _with_gradient(module, parameters, left, call)
        except Exception:  # what has no gradient, or looks at a weight's flags; trials do without
            continue
        found.present += [name for name in left if name in moved]
        left = [name for name in left if name not in moved]
    for call in calls:
        if not left:
            break
        try:
            left = _tried(module, parameters, left, call, found)
        except Exception as error:
            found.unknown += left
            found.reason = found.reason or f"{type(error).__name__} as they were replaced"
            return found
    found.absent = left
    return found


def _is_number(parameter: torch.Tensor) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


def _with_gradient(
    module: torch.nn.Module,
    parameters: Mapping[str, torch.nn.Parameter],
    names: Sequence[str],
    call: Call,
) -> set[str]:
    """The parameters with a gradient that is a number other than zero, for random cotangents."""
    random = torch.Generator().manual_seed(0)
    leaves = {name: parameters[name].detach().requires_grad_() for name in names}
    with inference(module), plain_loops(), torch.enable_grad():
        outputs = _tensors(_run(module, leaves, call))
        terms = [
            (each * torch.randn(each.shape, generator=random).to(each)).sum()
            for output in outputs
            for each in [torch.view_as_real(output) if output.is_complex() else output]
            if each.requires_grad and each.is_floating_point()
        ]
        if not terms:
            return set()
        total = torch.stack([term.double() for term in terms]).sum()
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {
        name
        for name, gradient in zip(leaves, gradients, strict=True)
        if gradient is not None and bool((gradient.isfinite() & (gradient != 0)).any())
    }


def _tried(
    module: torch.nn.Module,
    parameters: Mapping[str, torch.nn.Parameter],
    names: Sequence[str],
    call: Call,
    found: Influence,
) -> list[str]:
    """The parameters whose replacement changes nothing; adds the others to what was found."""
    random = torch.Generator().manual_seed(1)
    noise = {
        name: torch.randn(parameters[name].shape, generator=random).to(parameters[name])
        for name in names
    }
    with inference(module), plain_loops():
        usual = _tensors(_run(module, {}, call))

        def changes(chosen: Sequence[str]) -> bool:
            others = _tensors(_run(module, {name: noise[name] for name in chosen}, call))
            return len(others) != len(usual) or not all(map(_same, usual, others))

        if not changes(names):
            return list(names)
        left = []
        for name in names[:_MOST_TRIALS]:
            if changes([name]):
                found.present.append(name)
            else:
                left.append(name)
    if beyond := names[_MOST_TRIALS:]:
        found.unknown += beyond
        found.reason = f"{len(names)} have no gradient, and {_MOST_TRIALS} of them were tried"
    return left


def _run(module: torch.nn.Module, replaced: Mapping[str, torch.Tensor], call: Call) -> Any:
    state: dict[str, torch.Tensor] = {
        name: buffer.detach().clone()
        for name, buffer in module.named_buffers()
        if buffer.layout is torch.strided
    }
    state |= {
        name: replaced[of] for name, of in _same_storage(module, replaced).items() if of in replaced
    }
    args, kwargs = each_leaf(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, call
    )
    return functional_call(module, state, args, kwargs)


def _same_storage(module: torch.nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Every name of a parameter, tied ones too, to that among `names` which has its numbers.

    An exported program keeps a name for each, and reads one of them.
    """
    every = dict(module.named_parameters(remove_duplicate=False))
    first = {place_of(every[name]): name for name in names}
    return {name: first[at] for name, each in every.items() if (at := place_of(each)) in first}


def _tensors(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left.nan_to_num(), right.nan_to_num())
