"""States that a language model keeps in attributes of its own modules, beside what it is given.

No call hands them on: each overwrites what the one before left. For a trace they are put there and
taken from there, as those of the object that the model is given are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.errors import UsageError
from attngraph.frontend.families.tried import PROMPT, ROWS, called_on
from attngraph.inference import holders_of, inference

_NONE = torch.empty(0)

States = Mapping[str, tuple[str, ...]]
"""Names of attributes, by the name of their module."""


@dataclass(frozen=True)
class Beside:
    """What a model is given, and its modules that keep more, by name."""

    given: Any
    modules: Mapping[str, Any]

    def __deepcopy__(self, memo: dict[int, Any]) -> Beside:
        return Beside(copy.deepcopy(self.given, memo), self.modules)


def states_of_modules(model: nn.Module) -> list[str]:
    """The tensors that a prompt leaves in a model's own modules, where no call hands them on.

    What other tokens leave as it is, as a table of positions, is none.
    """

    def held(token: int) -> dict[str, Tensor]:
        called_on(model, ROWS, PROMPT, {}, token=token)
        items = ((each.path(key), x) for each in holders_of(model) for key, x in each.items())
        found = {name: x for name, x in items if isinstance(x, Tensor)}
        return {name: x.clone() for name, x in {**found, **dict(model.named_buffers())}.items()}

    with inference(model), suppress(UsageError):
        first, second = held(1), held(2)
        return [name for name in second if not torch.equal(first.get(name, _NONE), second[name])]
    return []


def own_states(model: nn.Module, argument: str, fresh: Any) -> States:
    """The attributes by which modules hand something of earlier tokens on to a later call.

    What a call leaves for nobody to read, such as the weights of its attention, is none. Tensors in
    lists and objects that a module has aren't looked at.
    """
    changed = states_of_modules(model)
    if not changed:
        return {}
    modules = dict(model.named_modules())
    attributes: dict[str, list[str]] = {}
    for name in changed:
        module, _, attribute = name.rpartition(".")
        if module in modules and hasattr(modules[module], attribute):
            attributes.setdefault(module, []).append(attribute)
    kinds: dict[tuple[type[Any], str], bool] = {}
    found: dict[str, tuple[str, ...]] = {}
    given = {} if fresh is None else {argument: fresh}
    with inference(model):
        result = called_on(model, ROWS, PROMPT, given)
        given = {argument: result.get(argument, fresh)}
        left = snapshot(model, {name: tuple(each) for name, each in attributes.items()})

        def step(apart: tuple[type[Any], str] | None) -> Tensor:
            for name, state in _tensors(left):
                module, _, attribute = name.rpartition(".")
                is_apart = (type(modules[module]), attribute) == apart
                tensor = torch.zeros_like(state) if is_apart else state.clone()
                setattr(modules[module], attribute, tensor)
            own = copy.deepcopy(given)
            logits: Tensor = called_on(model, ROWS, 1, own, behind=PROMPT)["logits"]
            return logits

        expected = step(None)
        for name, each in attributes.items():
            kind = type(modules[name])
            for attribute in each:
                if (kind, attribute) not in kinds:
                    kinds[kind, attribute] = not torch.equal(step((kind, attribute)), expected)
            found[name] = tuple(each for each in each if kinds[kind, each])
    return {name: each for name, each in found.items() if each}


def snapshot(model: nn.Module, states: States) -> dict[str, Any]:
    """The values of these attributes now, in namespaces that stand for the modules."""
    return {
        name: SimpleNamespace(
            **{each: getattr(model.get_submodule(name), each).clone() for each in attributes}
        )
        for name, attributes in states.items()
    }


def _tensors(left: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, namespace in left.items():
        for attribute, tensor in vars(namespace).items():
            yield f"{name}.{attribute}", tensor
