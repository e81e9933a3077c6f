"""Names that modules of transformers had in earlier versions, by which adapters were saved.

transformers renames the weights of a checkpoint as it reads them; peft, those of an adapter by the
same table.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from attngraph.checkpoints.adapters import Adapted
from attngraph.errors import LoadError


def rename(adapted: Adapted, model: Any) -> None:
    """Gives what an adapter has the names that the model has for it now.

    What is known by neither name stays as it is. Raises LoadError for factors of a weight that
    transformers makes one with others, and where two names of the file are one in the model.
    """
    own, path = model.state_dict().keys(), adapted.path
    table = _Table(model)

    def now(name: str) -> str:
        if name in own:
            return name
        found, is_merged = table.renamed(name)
        if is_merged and found in own:
            raise LoadError(
                f"{path} adapts {name}, which {type(model).__name__} holds in one weight with "
                f"others ({found}): merge it with peft (merge_and_unload(), then save_pretrained) "
                "and give the folder of the result."
            )
        return found if found in own else name

    for name in sorted(adapted.names):
        place = now(f"{name}.weight").removesuffix(".weight")
        if place == name:
            continue
        if place in adapted.names:
            raise LoadError(
                f"{path} adapts {place} under two names (one is {name}): save the adapter again."
            )
        adapted.trained_as[place] = name
        if name in adapted.factors:
            adapted.factors[place] = adapted.factors.pop(name)
        if name in adapted.rows:
            adapted.rows[place] = adapted.rows.pop(name)
    for name in sorted(adapted.whole):
        place = now(name)
        if place == name:
            continue
        if place in adapted.whole:
            raise LoadError(
                f"{path} holds {place} under two names (one is {name}): save the adapter again."
            )
        adapted.whole[place] = adapted.whole.pop(name)
        if name in adapted.copies:
            adapted.copies.add(place)


class _Table:
    """transformers' table for a model: transforms, or before version 5 patterns of its class."""

    def __init__(self, model: Any) -> None:
        self._transforms: list[Any] = []
        self._patterns = dict(getattr(model, "_checkpoint_conversion_mapping", None) or {})
        try:
            mapping: Any = import_module("transformers.conversion_mapping")
        except ImportError:
            return
        self._transforms = mapping.get_model_conversion_mapping(model)

    def renamed(self, name: str) -> tuple[str, bool]:
        """The name as the model has it, and whether that is of a weight made of several."""
        for pattern, replacement in self._patterns.items():
            name = re.sub(pattern, replacement, name)
        for transform in self._transforms:
            if not hasattr(transform, "operations"):
                name, _ = transform.rename_source_key(name)
        for transform in self._transforms:
            if hasattr(transform, "operations"):
                name, matched = transform.rename_source_key(name)
                if matched is not None:
                    return name, True
        return name, False
