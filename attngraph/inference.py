"""A module as it is at inference, and afterwards as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def inference(module: torch.nn.Module) -> Iterator[None]:
    """Eval mode, no gradients, and torch.nn's fused fast path off: it hides attention.

    Afterwards every part has the attributes it had. What a model sets as it runs, such as a table
    that it keeps for the next call, would else be left in the form that a trace or a run in float64
    gave it.
    """
    # By attribute: a program's module has no eval().
    modes = [(part, part.training) for part in module.modules()]
    spaces = [(space, dict(space)) for part, _ in modes for space in _namespaces(part)]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        for part, _ in modes:
            part.training = False
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for part, mode in modes:
            part.training = mode
        for space, before in spaces:
            for name in space.keys() - before.keys():
                del space[name]
            space.update(before)


def _namespaces(part: torch.nn.Module) -> list[dict[str, Any]]:
    """What holds the attributes of one module, and what its dicts hold, such as tables by size.

    A scripted one holds them in C++.
    """
    if isinstance(part, torch.jit.ScriptModule):
        return []
    own = vars(part)
    return [own, *(value for value in own.values() if isinstance(value, dict))]
