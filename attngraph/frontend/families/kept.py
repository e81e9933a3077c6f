"""What a language model keeps between calls, as tensors: found by running it, whatever holds them.

Keys and values, states of recurrences and of convolutions lie in an object of the model's own class
(a cache of transformers, a list of tensors). None of these classes is known here, and attributes of
modules are not looked at. The model is run on prompts of other lengths and with more rows, and each
tensor that it kept tells what it is by its sizes: an axis that is longer with more rows counts
them, one that is longer with more tokens counts those, and the others are fixed.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.errors import UsageError
from attngraph.frontend.tracing.trace_errors import reason
from attngraph.inference import holders_of, inference

Key = tuple[str, Any]  # ("attribute", name) or ("item", index)
Path = tuple[Key, ...]

_ROWS, _PROMPT = 2, 3
_TRIED = ((_ROWS, _PROMPT), (_ROWS + 1, _PROMPT), (_ROWS, _PROMPT + 2))
_CALLED = {"keys": "key", "values": "value"}
_NONE = torch.empty(0)
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
    a prompt, but without these tensors. The flags in it say that there is a past; so a past without
    a token is states of zeros and keys of length 0.
    """

    argument: str
    holder: Any
    parts: tuple[Part, ...]

    @property
    def grows(self) -> bool:
        """Whether any part holds each token by itself, as keys and values do."""
        return any(part.tokens is not None for part in self.parts)

    def filled(self, tensors: Mapping[str, Tensor]) -> Any:
        """The model's own object with these tensors in it, by name; a call may write into it."""
        holder = copy.deepcopy(self.holder)
        for part in self.parts:
            _put(holder, part.path, tensors[part.name].clone())
        return holder

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
        """Of rows without a token."""
        return {
            part.name: torch.zeros(part.sized(batch, 0), dtype=part.dtype, device=device)
            for part in self.parts
        }


class DoesNotRun(UsageError):
    """A model doesn't run at all, whatever it keeps."""


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


def states_of_modules(model: nn.Module) -> list[str]:
    """The tensors that a prompt leaves in a model's own modules, where no call hands them on.

    What other tokens leave as it is, as a table of positions, is none.
    """

    def held(token: int) -> dict[str, Tensor]:
        _called(model, _ROWS, _PROMPT, {}, token)
        items = ((each.path(key), x) for each in holders_of(model) for key, x in each.items())
        return {name: x for name, x in items if isinstance(x, Tensor)}

    with inference(model), suppress(UsageError):
        first, second = held(1), held(2)
        return [name for name in second if not torch.equal(first.get(name, _NONE), second[name])]
    return []


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
    return Kept(argument, holder, tuple(_renamed(parts)))


def _runs(model: nn.Module) -> tuple[str, list[Any]]:
    """The name of the argument, and what was kept of each prompt that is tried."""
    own = _run(model, _ROWS, _PROMPT, {})
    taken = inspect.signature(model.forward).parameters
    found = [
        name
        for name, value in own.items()
        if name in taken and value is not None and not isinstance(value, Tensor)
    ]
    if len(found) != 1:
        raise UsageError(
            f"The cache of {type(model).__name__} can't be found: of what it returns, its forward "
            f"takes {' and '.join(found) or 'nothing'} again."
        )
    (argument,) = found
    kept = []
    for rows, length in _TRIED:
        fresh = _fresh(model, own[argument])
        result = _run(model, rows, length, {} if fresh is None else {argument: fresh})
        kept.append(result[argument])
    return argument, kept


def _run(model: nn.Module, rows: int, length: int, given: Mapping[str, Any]) -> Mapping[str, Any]:
    with inference(model):
        return _called(model, rows, length, given)


def _called(
    model: nn.Module, rows: int, length: int, given: Mapping[str, Any], token: int = 1
) -> Mapping[str, Any]:
    device = next(model.parameters()).device
    inputs: dict[str, Any] = dict(given)
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = torch.arange(length, device=device).expand(rows, -1)
    ids = torch.full((rows, length), token, device=device)
    try:
        result: Mapping[str, Any] = model(input_ids=ids, use_cache=True, **inputs)
    except Exception as error:
        raise DoesNotRun(
            f"{type(model).__name__} doesn't run on a few tokens: {reason(error).rstrip('.')}."
        ) from error
    return result


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
    if len(by_tokens) > 1 or any(first.shape[at] != _PROMPT for at in by_tokens):
        raise UsageError(f"{where} has another size for each prompt, and not the prompt's length.")
    axes = {by_rows[0], *by_tokens}
    shape = tuple(None if at in axes else size for at, size in enumerate(first.shape))
    grows = by_tokens[0] if by_tokens else None
    return Part(path, "", shape, by_rows[0], grows, first.dtype)


def _renamed(parts: Sequence[Part]) -> Iterator[Part]:
    """With the names that files give them: the layer, and what the model's class calls it."""
    taken: set[str] = set()
    for part in parts:
        numbers = [str(key) for _, key in part.path if isinstance(key, int)]
        words = [key for kind, key in part.path if kind == "attribute" and key != "layers"]
        word = words[-1] if words else "state"
        word = _CALLED.get(word, word.removesuffix("s").removeprefix("_"))
        name = "_".join([*numbers[:1], word])
        if name in taken or numbers[1:] not in ([], ["0"]):
            name = "_".join([name, *numbers[1:]])
        taken.add(name)
        yield replace(part, name=name)


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
