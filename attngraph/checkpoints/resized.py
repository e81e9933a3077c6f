"""Sizes of a model that its adapter changed: tokens were added, or a head has its own labels.

Whoever loads such an adapter with peft gives the base these sizes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from attngraph.checkpoints.classes import unfilled
from attngraph.checkpoints.folder import LABELS, VOCABULARY, Folder
from attngraph.errors import LoadError


def resized(
    folder: Folder, kind: Any, whole: Mapping[str, torch.Tensor], *, trust_code: bool
) -> Folder:
    """The folder with the sizes that weights of its adapter have which take others' places.

    Raises LoadError where no size explains their shapes.
    """
    assert folder.adapter is not None
    if not whole:
        return folder
    model = unfilled(folder, kind, trust_code=trust_code)
    if not (odd := _odd(model, whole)):
        return folder
    own, sizes = model.state_dict(), dict[str, int]()
    table, labels = model.get_input_embeddings(), getattr(model.config, LABELS, None)
    tables = {f"{name}.weight" for name, part in model.named_modules() if part is table}
    for name in odd:
        rows = len(whole[name]) if whole[name].dim() else 0
        if name in tables:
            sizes[VOCABULARY] = rows
        elif len(own[name]) == labels:
            sizes[LABELS] = rows
    changed = replace(folder, sizes=sizes)
    left = _odd(unfilled(changed, kind, trust_code=trust_code), whole)
    if left:
        name = left[0]
        raise LoadError(
            f"{folder.adapter.path} adapts {name} by {tuple(whole[name].shape)}, and the base has "
            f"{tuple(own[name].shape)}: the adapter was trained on another base."
        )
    return changed


def _odd(model: Any, whole: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of weights that have another shape than the model's."""
    own = model.state_dict()
    return [n for n, data in whole.items() if n in own and own[n].shape != data.shape]


def said_otherwise(folder: Folder, module: Any) -> dict[str, Any]:
    """What the config of an adapted module says otherwise than that of its base."""
    config = module.config
    found: dict[str, Any] = {"architectures": [type(module).__name__]}
    if LABELS in folder.sizes:
        found |= {"id2label": config.id2label, "label2id": config.label2id}
    if (size := folder.sizes.get(VOCABULARY)) is not None:
        nested = next((n for n, c in vars(config).items() if c is config.get_text_config()), None)
        own = {VOCABULARY: size}
        found |= own if nested is None else {nested: {**folder.config.get(nested, {}), **own}}
    return found
