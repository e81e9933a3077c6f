"""What a language model keeps between calls, as tensors: found by running it, whatever holds them.

Keys and values, states of recurrences and of convolutions lie in an object of the model's own class
(a cache of transformers, a list of tensors), or in attributes of its modules (own_states.py). None
of these classes is known here. The model is run on prompts of other lengths and with more rows, and
each tensor that it kept tells what it is by its sizes: an axis that is longer with more rows counts
them, one that is longer with more tokens counts those, and the others are fixed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.errors import UsageError
from attngraph.frontend.families.own_states import Beside, own_states, snapshot
from attngraph.frontend.families.tried import PROMPT, ROWS, DoesNotRun, called_on, taken_again
from attngraph.inference import inference

Key = tuple[str, Any]  # ("attribute", name) or ("item", index)
Path = tuple[Key, ...]

_TRIED = ((ROWS, PROMPT), (ROWS + 1, PROMPT), (ROWS, PROMPT + 2))
_CALLED = {"keys": "key", "values": "value"}
_NO_HOLDERS = ("torch.", "builtins", "transformers.configuration_utils")


@dataclass(frozen=True)
class Part:
    """One tensor: where it lies, its name in files, and `shape` with None at its two axes.

    `rows` is the axis of the batch, and `tokens` that of the tokens, None for a state.
    """

    path: Path
    name: str
    shape: tuple[int | None, ...]
    rows: int
    tokens: int | None
    dtype: torch.dtype

    def sized(self, batch: int, past: int) -> tuple[int, ...]:
        sizes = {self.rows: batch, self.tokens: past}
        return tuple(sizes[at] if n is None else n for at, n in enumerate(self.shape))


@dataclass(frozen=True)
class Kept:
    """All that one model keeps, and how it is handed back.

    `argument` is what its forward calls it, with `holder` the object as the model leaves it behind
    a prompt, but without these tensors; a `Beside` where its modules keep some too. The flags in it
    say that there is a past; so a past without a token is states of zeros and keys of length 0.
    """

    argument: str
    holder: Any
    parts: tuple[Part, ...]

    @property
    def grows(self) -> bool:
        """Whether any part holds each token by itself, as keys and values do."""
        return any(part.tokens is not None for part in self.parts)

    @contextmanager
    def filled(self, tensors: Mapping[str, Tensor]) -> Iterator[Any]:
        """A holder with these tensors in it, by name, into which a call may write.

        Afterwards the model's modules have what they had.
        """
        holder = copy.deepcopy(self.holder)
        before = [part for part in self.parts if isinstance(holder, Beside)]
        own = [(part.path, _at(holder, part.path)) for part in before]
        try:
            for part in self.parts:
                _put(holder, part.path, tensors[part.name].clone())
            yield holder
        finally:
            for path, value in own:
                _put(holder, path, value)

    @staticmethod
    def given(holder: Any) -> Any:
        """The argument of a call that is given a holder."""
        return holder.given if isinstance(holder, Beside) else holder

    def taken(self, holder: Any) -> dict[str, Tensor]:
        """The tensors in such an object, by name."""
        return {part.name: self.at(holder, part) for part in self.parts}

    def at(self, holder: Any, part: Part) -> Any:
        """The tensor of one part in such an object."""
        return _at(holder, part.path)

    def put(self, holder: Any, part: Part, tensor: Tensor) -> None:
        """Puts another tensor there."""
        _put(holder, part.path, tensor)

    def empty(self, batch: int, device: torch.device) -> dict[str, Tensor]:
        """The states of rows without a token."""
        return {
            part.name: torch.zeros(part.sized(batch, 0), dtype=part.dtype, device=device)
            for part in self.parts
        }


def kept_states(model: nn.Module) -> Kept | None:
    """What a model keeps, if a state of one size is among it; None where it can't be found.

    Raises DoesNotRun.
    """
    try:
        kept = find_kept(model)
    except DoesNotRun:
        raise
    except UsageError:
        return None
    return None if all(part.tokens is not None for part in kept.parts) else kept


def find_kept(model: nn.Module) -> Kept:
    """What a language model of transformers keeps. Raises UsageError where it can't be handed on.

    Such is what is no tensor and yet differs from call to call, and a tensor without a batch.
    """
    name = type(model).__name__
    argument, runs = _runs(model)
    first, *others = (dict(_leaves(run)) for run in runs)
    if any(first.keys() != other.keys() for other in others):
        raise UsageError(
            f"The cache of {name} can't be handed on: what is in it differs with the prompt."
        )
    parts: list[Part] = []
    for path, leaf in first.items():
        more_rows, more_tokens = (other[path] for other in others)
        if isinstance(leaf, Tensor):
            part = _part(name, path, leaf, more_rows, more_tokens)
            parts += [] if part is None else [part]
        elif not leaf == more_rows == more_tokens:
            raise UsageError(
                f"The cache of {name} can't be handed on: {_shown(path)} is a number that differs "
                f"with the prompt ({leaf} and {more_tokens}), which a graph has as it was traced."
            )
    holder = runs[0]
    for part in parts:
        _put(holder, part.path, None)
    if isinstance(holder, Beside):
        modules = {name: model.get_submodule(name) for name in holder.modules}
        holder = Beside(holder.given, modules)
    return Kept(argument, holder, tuple(_renamed(parts)))


def _runs(model: nn.Module) -> tuple[str, list[Any]]:
    """The name of the argument, and what was kept of each prompt that is tried."""
    argument, own = taken_again(model)
    made = [_fresh(model, own) for _ in _TRIED]
    states = own_states(model, argument, _fresh(model, own))
    kept = []
    for (rows, length), fresh in zip(_TRIED, made, strict=True):
        with inference(model):
            given = {} if fresh is None else {argument: fresh}
            result = called_on(model, rows, length, given)
            left = result.get(argument, fresh)
            kept.append(Beside(left, snapshot(model, states)) if states else left)
    return argument, kept


def _fresh(model: Any, own: Any) -> Any:
    """A cache of transformers without a token, with every layer of keys kept at full length.

    What a window hides, the mask hides; a layer cut to it would count its tokens in a number. None
    where the model's object is none of these.
    """
    from transformers import Cache, cache_utils

    classes: Any = cache_utils
    if not isinstance(own, Cache):
        return None
    kind: Any = type(own)
    try:
        cache = kind(config=model.config.get_text_config(decoder=True))
    except TypeError:
        cache = kind()
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, classes.LinearAttentionAndSlidingWindowAttentionLayer):
            states = layer.number_of_states
            cache.layers[index] = classes.LinearAttentionAndFullAttentionLayer(states)
        elif isinstance(layer, classes.DynamicSlidingWindowLayer):
            cache.layers[index] = classes.DynamicLayer()
    return cache


def _part(name: str, path: Path, first: Tensor, rows: Any, tokens: Any) -> Part | None:
    """What a tensor is, by those of more rows and of more tokens; None where it stays the same."""
    where = f"The cache of {name} can't be handed on: {_shown(path)}"
    others = (rows, tokens)
    if not all(isinstance(each, Tensor) and each.ndim == first.ndim for each in others):
        raise UsageError(f"{where} is not always a tensor of {first.ndim} axes.")
    by_rows, by_tokens = (
        [at for at in range(first.ndim) if first.shape[at] != each.shape[at]] for each in others
    )
    if not by_rows and not by_tokens and all(torch.equal(first, each) for each in others):
        return None
    if len(by_rows) != 1:
        raise UsageError(f"{where} has no axis for the rows of a batch.")
    if len(by_tokens) > 1 or any(first.shape[at] != PROMPT for at in by_tokens):
        raise UsageError(f"{where} has another size for each prompt, and not the prompt's length.")
    axes = {by_rows[0], *by_tokens}
    shape = tuple(None if at in axes else size for at, size in enumerate(first.shape))
    grows = by_tokens[0] if by_tokens else None
    return Part(path, "", shape, by_rows[0], grows, first.dtype)


def _renamed(parts: Sequence[Part]) -> Iterator[Part]:
    """The parts under the names that files give them: the layer, and what the class calls it."""
    taken: set[str] = set()
    for part in parts:
        keys = [key for kind, key in part.path if kind == "attribute" or isinstance(key, int)]
        if part.path[1:2] and part.path[0] == ("attribute", "modules"):  # where the module stands
            keys = [int(key) if key.isdigit() else key for key in _steps(part.path)]
        numbers = [str(key) for key in keys if isinstance(key, int)]
        words = [key for key in keys if isinstance(key, str) and key != "layers"]
        word = words[-1] if words else "state"
        word = _CALLED.get(word, word.removesuffix("s").removeprefix("_"))
        name = "_".join([*numbers[:1], word])
        if name in taken or numbers[1:] not in ([], ["0"]):
            name = "_".join([name, *numbers[1:]])
        taken.add(name)
        yield replace(part, name=name)


def _steps(path: Path) -> list[str]:
    """The words and numbers on the way to an attribute of a module."""
    (_, module), (_, attribute) = path[1:]
    return [*module.split("."), attribute]


def _leaves(thing: Any, path: Path = (), above: tuple[int, ...] = ()) -> Iterator[tuple[Path, Any]]:
    """Every tensor and number in lists, dicts and objects that hold tensors."""
    if isinstance(thing, (Tensor, Real)) and not isinstance(thing, bool):
        yield path, thing
        return
    if id(thing) in above:
        return
    for key in _keys(thing):
        yield from _leaves(_get(thing, key), (*path, key), (*above, id(thing)))


def _keys(thing: Any) -> list[Key]:
    if isinstance(thing, (list, tuple)):
        return [("item", index) for index in range(len(thing))]
    if isinstance(thing, Mapping):
        return [("item", key) for key in thing]
    if isinstance(thing, (nn.Module, type)) or type(thing).__module__.startswith(_NO_HOLDERS):
        return []
    return [("attribute", name) for name in getattr(thing, "__dict__", ())]


def _get(thing: Any, key: Key) -> Any:
    kind, at = key
    return thing[at] if kind == "item" else getattr(thing, at)


def _at(holder: Any, path: Path) -> Any:
    for key in path:
        holder = _get(holder, key)
    return holder


def _put(holder: Any, path: Path, value: Any) -> None:
    holder, (kind, at) = _at(holder, path[:-1]), path[-1]
    if kind == "item":
        holder[at] = value
    else:
        setattr(holder, at, value)


def _shown(path: Path) -> str:
    parts = (f".{key}" if kind == "attribute" else f"[{key!r}]" for kind, key in path)
    return "".join(parts).removeprefix(".") or "it"
