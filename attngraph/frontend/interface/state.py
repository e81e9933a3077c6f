"""What a module keeps from one call to the next, and what it does in train mode only.

A file is a function of its inputs. State in buffers shows in the trace; what is kept in Python
attributes (a counter, a list of keys so far) does not, so the module is called twice on the same
inputs: what has other values after the second call than after the first goes on changing. A table
that is built once has not.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.func import functional_call
from torch.utils import _pytree as pytree

from attngraph.errors import CaptureError, listed
from attngraph.frontend.interface.stand_ins import stand_ins
from attngraph.frontend.interface.strides import Asked, Lay, strides_note
from attngraph.inference import MOST_ELEMENTS, each_leaf, holders_of, inference, restored

_TRAINED = (
    torch.nn.modules.dropout._DropoutNd,
    torch.nn.modules.batchnorm._BatchNorm,
    torch.nn.RReLU,
)


def state_notes(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[str]:
    """A sentence on what the module keeps between calls, and one on what eval mode changes of it.

    Nothing where it doesn't run. The module is left as it was found.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return []
    trains = any(part.training for part in module.modules())
    asked = Asked()
    try:
        with inference(module), torch.random.fork_rng(devices=[]):
            with asked:
                first = _call(module, args, kwargs)
            after_first = dict(_values(module))
            second = _call(module, args, kwargs)
            after_second = dict(_values(module))
    except Exception:  # the trace, or the comparison with it, says what is wrong
        return []
    notes = []
    changed = [
        name
        for name in dict.fromkeys((*after_first, *after_second))
        if not _same(after_first.get(name), after_second.get(name))
    ]
    differs = not _same_tree(first, second)
    if changed or differs:
        told = f"changes {listed(changed)} as it runs" if changed else "keeps something of a call"
        effect = ", and a second call on the same inputs returns something else" if differs else ""
        notes.append(
            f"The model {told}{effect}: the graph computes what the first call does, and keeps "
            "nothing. Make it an input and an output."
        )
    if asked.place is not None and not differs:
        notes += _of_strides(asked.place, module, args, kwargs, first)
    if trains and not differs and (note := _training_note(module, args, kwargs, first)):
        notes.append(note)
    return notes


def _of_strides(
    place: tuple[str, int],
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    expected: Any,
) -> list[str]:
    def is_same(lay: Lay) -> bool:
        with inference(module), torch.random.fork_rng(devices=[]), restored(module):
            return _same_tree(_call(module, args, kwargs, lay), expected)

    note = strides_note(place, is_same)
    return [note] if note else []


def _training_note(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], expected: Any
) -> str:
    active = [
        (name or "the model itself", part)
        for name, part in module.named_modules()
        if part.training and isinstance(part, _TRAINED) and getattr(part, "p", 1) != 0
    ]
    if active:
        kinds = dict.fromkeys(type(part).__name__ for _, part in active)
        because = f"{' and '.join(kinds)} ({listed([name for name, _ in active])})"
    else:
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), restored(module):
                found = _call(module, args, kwargs)
        except Exception:
            return ""
        if _same_tree(found, expected):
            return ""
        because = "its own code"
    return (
        f"The model is in train mode, where {because} computes something else: it is compiled as "
        "in eval mode. Call .eval() on it to compare."
    )


def _call(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    lay: Lay = torch.Tensor.clone,
) -> Any:
    """The module's output on copies of its inputs and buffers, with the same random numbers.

    Large weights are not read: other numbers stand for them. Inputs are copied by `lay`.
    """

    def copied(value: Any) -> Any:
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    def laid(value: Any) -> Any:
        return lay(value.detach()) if isinstance(value, torch.Tensor) else value

    torch.manual_seed(0)
    inputs, named = each_leaf(laid, (tuple(args), dict(kwargs)))
    buffers = {name: copied(buffer) for name, buffer in module.named_buffers()}
    with stand_ins(module) as weights:
        return functional_call(module, {**buffers, **weights}, inputs, named)


def _values(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Each number, string and tensor that the module's attributes hold, by name."""
    for holder in holders_of(module):
        if isinstance(holder.held, (list, deque)):
            yield holder.name, len(holder.held)
        for key, value in holder.items():
            if isinstance(value, (bool, int, float, complex, str, torch.Tensor)):
                yield holder.path(key), _copy_of(value)


def named_state(
    module: torch.nn.Module, names: Sequence[str], constants: Mapping[str, Any]
) -> list[str]:
    """The names of what the module writes into, as its attributes have it.

    `constants` are the tensors that torch numbers, such as those in a list. Raises CaptureError for
    one that can't be put back after a run: it is no attribute, or too large to be copied.
    """
    attributes = {
        id(value): holder.path(key)
        for holder in holders_of(module)
        for key, value in holder.items()
        if isinstance(value, torch.Tensor)
    }
    buffers = dict(module.named_buffers(remove_duplicate=False))
    found = []
    for name in names:
        tensor = constants.get(name)
        if tensor is None or name in buffers:
            found.append(name)
            continue
        path = attributes.get(id(tensor))
        if path is None or tensor.numel() > MOST_ELEMENTS:
            written = path or f"a tensor of shape {tuple(tensor.shape)} that is no attribute of it"
            raise CaptureError(
                f"The model writes into {written} as it runs: register it as a buffer "
                '(self.register_buffer("name", tensor, persistent=False)), or give it as an input '
                "and return it."
            )
        found.append(path)
    return found


def _copy_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.numel() <= MOST_ELEMENTS else tuple(value.shape)
    return value


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        if before.shape != after.shape or before.dtype != after.dtype:
            return False
        if before.is_meta or before.layout is not torch.strided:
            return True
        loose = before.is_floating_point() or before.is_complex()
        return torch.allclose(before, after, 1e-4, 1e-6, True) if loose else before.equal(after)
    if isinstance(before, float) and isinstance(after, float) and math.isnan(before):
        return math.isnan(after)
    return type(before) is type(after) and bool(before == after)


def _same_tree(first: Any, second: Any) -> bool:
    leaves, others = pytree.tree_leaves(first), pytree.tree_leaves(second)
    pairs = zip(leaves, others, strict=False)
    return len(leaves) == len(others) and all(
        _same(a, b) for a, b in pairs if isinstance(a, (torch.Tensor, int, float, bool))
    )
