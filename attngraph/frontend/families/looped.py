"""The parts of a language model that keep states, in a loop over the tokens of a call.

A model computes several tokens by code of its own, which may forget what it keeps or fix a number
of chunks; for one token it computes the recurrence. So the innermost modules that write a state are
run token by token, in a scan, and the rest of the model on all tokens at once. Which modules these
are, and which of their arguments have tokens, is found by running the model: no class is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan_op
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from attngraph.errors import UsageError
from attngraph.frontend.families.kept import Kept, Part

Forward = Callable[..., Any]

_SEVERAL = 3


@dataclass(frozen=True)
class Mixer:
    """A module that writes the states `parts`.

    `axes` are those of the tokens in the leaves of its arguments: None where one is passed on as it
    is. `fixed` are the leaves that are None for one token, whatever they are for several. `given`
    are the axes of the tokens in what it returns; a result that has none isn't returned.
    """

    module: nn.Module
    parts: tuple[Part, ...]
    axes: tuple[int | None, ...]
    fixed: tuple[bool, ...]
    given: tuple[int | None, ...]

    def looped(
        self,
        own_forward: Forward,
        kept: Kept,
        holder: Any,
        shown: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Its own forward's result for all tokens; a token that isn't `shown` (B, S) leaves the
        states of its row alone. The states in `holder` are those after the last token."""
        leaves, spec = _flat((args, kwargs))
        forward = self.module.forward
        nested: list[Any] = []
        written = [kept.at(holder, part) for part in self.parts]
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        weights = {name: x for name, x in tensors if all(x is not each for each in written)}
        sliced = [at for at, axis in enumerate(self.axes) if axis is not None]
        others = [
            at
            for at, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and at not in sliced and not self.fixed[at]
        ]
        states = [kept.at(holder, part) for part in self.parts]
        items = [leaves[at].movedim(self.axes[at] or 0, 0) for at in sliced]
        items += [] if shown is None else [shown.movedim(1, 0)]

        def step(*given: Tensor) -> list[Tensor]:
            before, given = given[: len(states)], given[len(states) :]
            now, read = given[: len(items)], given[len(items) :]
            own = [None if none else leaf for leaf, none in zip(leaves, self.fixed, strict=True)]
            for at, item in zip(sliced, now, strict=False):
                own[at] = item.unsqueeze(self.axes[at] or 0)
            for at, leaf in zip(others, read, strict=False):
                own[at] = leaf
            for part, state in zip(self.parts, before, strict=True):
                kept.put(holder, part, state.clone())
            one_args, one_kwargs = pytree.tree_unflatten(own, spec)
            replaced = dict(zip(weights, read[len(others) :], strict=True))
            self.module.forward = own_forward
            try:
                result = torch.func.functional_call(self.module, replaced, one_args, one_kwargs)
            finally:
                self.module.forward = forward
            flat, how = _flat(result)
            nested[:] = [how]
            after = [kept.at(holder, part) for part in self.parts]
            if shown is not None:
                after = [
                    new.where(_of_rows(now[-1], new.ndim, part.rows), old)
                    for part, new, old in zip(self.parts, after, before, strict=True)
                ]
            pairs = zip(flat, self.given, strict=True)
            made = [leaf.squeeze(axis) for leaf, axis in pairs if axis is not None]
            if shown is not None:  # what a hidden token gives, nothing else need depend on
                made = [each.where(_of_rows(now[-1], each.ndim, 0), 0) for each in made]
            return [*(state.clone() for state in after), *(each.clone() for each in made)]

        fixed = (*(leaves[at] for at in others), *weights.values())
        found = (scan_op if _is_traced(items) else _in_turn)(step, states, items, fixed)
        for part, state in zip(self.parts, found, strict=False):
            kept.put(holder, part, state)
        stacked = iter(found[len(states) :])
        whole = [None if axis is None else next(stacked).movedim(0, axis) for axis in self.given]
        return pytree.tree_unflatten(whole, nested[0])


def _flat(thing: Any) -> tuple[list[Any], Any]:
    """Its leaves and how they are nested; an object of a model's own class is a leaf."""
    return pytree.tree_flatten(thing, lambda each: not isinstance(each, (tuple, list, dict)))


def _is_traced(tensors: Sequence[Tensor]) -> bool:
    return any(isinstance(tensor, FakeTensor) for tensor in tensors)


def _in_turn(
    step: Callable[..., list[Tensor]],
    states: list[Tensor],
    items: Sequence[Tensor],
    fixed: Sequence[Tensor],
) -> list[Tensor]:
    """The scan in eager, where gradients are asked for as well."""
    stacks: list[list[Tensor]] = []
    for now in zip(*items, strict=True):
        found = step(*states, *now, *fixed)
        states = found[: len(states)]
        stacks.append(found[len(states) :])
    return [*states, *map(torch.stack, zip(*stacks, strict=True))]


def _of_rows(shown: Tensor, rank: int, axis: int) -> Tensor:
    """One bool for each row, along that axis of a tensor."""
    return shown.reshape([-1 if at == axis else 1 for at in range(rank)])


@contextmanager
def replaced(modules: Sequence[nn.Module], by: Callable[[int, Forward], Forward]) -> Iterator[None]:
    """Within, each module's forward is what `by` makes of its place and its own forward."""
    with ExitStack() as stack:
        for at, module in enumerate(modules):
            own = module.__dict__.get("forward")
            module.__dict__["forward"] = by(at, module.forward)
            stack.callback(_put_back, module, own)
        yield


def _put_back(module: nn.Module, own: Any) -> None:
    del module.__dict__["forward"]
    if own is not None:
        module.__dict__["forward"] = own


def find_mixers(run: Callable[[int, Any], Any], model: nn.Module, kept: Kept) -> tuple[Mixer, ...]:
    """The modules of a model that write its states. Raises UsageError where they can't be looped.

    `run` calls the model on so many tokens, behind a few others, with what is kept in an object.
    """
    states = tuple(part for part in kept.parts if part.tokens is None)
    written = _written(run, model, kept, states)
    inner = _innermost(written)
    found = [part.name for module in inner for part in written[module]]
    if sorted(found) != sorted(part.name for part in states):
        raise UsageError("Which of its modules write its states can't be told.")
    one = _calls(run, inner, 1, {})
    several = _calls(run, inner, _SEVERAL, one)
    one = _without_unread(run, inner, one, several)
    return tuple(
        _mixer(module, tuple(written[module]), one[module], several[module]) for module in inner
    )


def _innermost(written: Mapping[nn.Module, Sequence[Part]]) -> list[nn.Module]:
    """The modules that write some state themselves, but those within another that does."""

    def inside(module: nn.Module) -> list[nn.Module]:
        return [each for each in module.modules() if each is not module and each in written]

    own = [
        module
        for module, parts in written.items()
        if {part.name for each in inside(module) for part in written[each]}
        != {part.name for part in parts}
    ]
    within = {each for module in own for each in inside(module)}
    return [module for module in own if module not in within]


def _written(
    run: Callable[[int, Any], Any], model: nn.Module, kept: Kept, states: Sequence[Part]
) -> dict[nn.Module, list[Part]]:
    """The states that each module, and the modules in it, change in a call with one token."""
    written: dict[nn.Module, list[Part]] = {}
    holder: list[Any] = []

    def now() -> list[Tensor]:
        return [kept.at(holder[0], part).clone() for part in states]

    def before(module: nn.Module, *given: Any) -> None:
        open_calls.append(now())

    def after(module: nn.Module, *given: Any) -> None:
        changes = zip(states, open_calls.pop(), now(), strict=True)
        parts = [part for part, old, new in changes if not torch.equal(old, new)]
        if parts:
            written.setdefault(module, []).extend(parts)

    open_calls: list[list[Tensor]] = []
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(before).remove)
            stack.callback(module.register_forward_hook(after).remove)
        run(1, holder.append)
    return written


@dataclass(frozen=True)
class _Call:
    leaves: list[Any]
    spec: Any
    result: Any


def _calls(
    run: Callable[[int, Any], Any],
    modules: Sequence[nn.Module],
    tokens: int,
    known: Any,
    left_out: Mapping[nn.Module, Sequence[int]] = MappingProxyType({}),
) -> dict[nn.Module, _Call]:
    """How the modules are called on so many tokens; what they return for several is zeros, as long
    as `known` says that it is for one. Leaves that are `left_out` are None."""
    calls: dict[nn.Module, _Call] = {}

    def recorded(at: int, own: Forward) -> Forward:
        module = modules[at]

        def forward(*args: Any, **kwargs: Any) -> Any:
            if module in calls:
                raise UsageError("A module that writes states is called twice.")
            leaves, spec = _flat((args, kwargs))
            for at in left_out.get(module, ()):
                leaves[at] = None
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            result = known[module].result if known else own(*args, **kwargs)
            calls[module] = _Call(leaves, spec, result)
            if not known:
                return result
            flat, nested = _flat(result)
            return pytree.tree_unflatten([_longer(leaf, tokens) for leaf in flat], nested)

        return forward

    with replaced(modules, recorded):
        run(tokens, lambda holder: None)
    return calls


def _without_unread(
    run: Callable[[int, Any], Any],
    modules: Sequence[nn.Module],
    one: Mapping[nn.Module, _Call],
    several: Mapping[nn.Module, _Call],
) -> dict[nn.Module, _Call]:
    """The calls with one token, with None for a tensor of which that is no part, if none reads it.

    Such is a mask of the attentions of other layers, that all layers are handed.
    """
    left_out = {
        module: [
            at
            for at, more in enumerate(several[module].leaves)
            if isinstance(more, Tensor) and _differ(call.leaves[at], more) > 1
        ]
        for module, call in one.items()
        if call.spec == several[module].spec
    }
    if not any(left_out.values()):
        return dict(one)
    again = _calls(run, modules, 1, {}, left_out)
    for module, call in again.items():
        pairs = zip(_flat(call.result)[0], _flat(one[module].result)[0], strict=True)
        if any(isinstance(a, Tensor) and not torch.equal(a, b) for a, b in pairs):
            raise UsageError("What it is given for one token is no part of that for several.")
    return again


def _differ(single: Any, more: Tensor) -> int:
    """Along how many axes two tensors have other sizes."""
    pairs = zip(single.shape, more.shape, strict=True) if isinstance(single, Tensor) else ()
    return sum(a != b for a, b in pairs)


def _longer(leaf: Any, tokens: int) -> Any:
    axis = _token_axis(leaf)
    return None if axis is None else torch.zeros_like(leaf).repeat_interleave(tokens, axis)


def _token_axis(leaf: Any) -> int | None:
    """The axis of one token in a result (batch, 1, width); None where it has none by itself."""
    shape = leaf.shape if isinstance(leaf, Tensor) else ()
    found = [at for at, size in enumerate(shape) if size == 1]
    return found[0] if len(found) == 1 else None


def _mixer(module: nn.Module, parts: tuple[Part, ...], one: _Call, several: _Call) -> Mixer:
    if one.spec != several.spec:
        raise UsageError("It is called otherwise on one token.")
    axes: list[int | None] = []
    for single, more in zip(one.leaves, several.leaves, strict=True):
        axis = None
        if isinstance(single, Tensor) and isinstance(more, Tensor):
            shapes = list(zip(single.shape, more.shape, strict=True))
            longer = [at for at, (a, b) in enumerate(shapes) if a != b]
            if len(longer) > 1 or any(shapes[at] != (1, _SEVERAL) for at in longer):
                raise UsageError("What it is given for one token is no part of that for several.")
            axis = longer[0] if longer else None
        elif single is not None and single is not more:
            is_same = type(single) is type(more)
            if not is_same or (isinstance(single, (int, float, str)) and single != more):
                raise UsageError("It is given something else for one token.")
        axes.append(axis)
    fixed = tuple(leaf is None for leaf in one.leaves)
    given = tuple(map(_token_axis, _flat(one.result)[0]))
    if not any(axis is not None for axis in given):
        raise UsageError("Which axis of its results has the tokens can't be told.")
    return Mixer(module, parts, tuple(axes), fixed, given)
