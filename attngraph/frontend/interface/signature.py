"""How the caller's inputs and outputs, nested as the model has them, map to the graph's tensors."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from attngraph.errors import UsageError
from attngraph.frontend.interface.fixed_inputs import opened
from attngraph.frontend.interface.own_classes import make_known
from attngraph.inference import is_size
from attngraph.ir.storage import as_pairs, from_pairs


class _Hole:
    """Where an input of the graph was in the sample."""

    def __repr__(self) -> str:
        return "tensor"

    def __reduce__(self) -> str:
        return "_HOLE"  # there is one, of copies and pickled signatures too


_HOLE = _Hole()


@dataclass(frozen=True)
class Signature:
    """What a call of the model looks like.

    `inputs` are the sample's arguments by parameter, or by position where `parameters`, the
    signature of `forward`, isn't known; each of the graph's inputs is a hole in them, and other
    leaves are constants of the trace. `out_spec` is the structure of the eager output; `constants`
    are its leaves that the graph doesn't compute, `numbers` the positions of those that it returns
    as tensors and the model as numbers, `complexes` of those that it returns as pairs of reals. The
    graph takes complex inputs as pairs too.
    """

    parameters: inspect.Signature | None
    inputs: Mapping[str, Any]
    out_spec: pytree.TreeSpec
    constants: Mapping[int, Any]
    numbers: frozenset[int]
    complexes: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        parameters: inspect.Signature | None,
        sample: tuple[tuple[Any, ...], Mapping[str, Any]],
        out_spec: pytree.TreeSpec,
        constants: Mapping[int, Any],
        numbers: frozenset[int],
        complexes: frozenset[int] = frozenset(),
    ) -> Signature:
        """The signature of a model which was traced with `sample`, its (args, kwargs)."""
        given = _bound(parameters, *sample)
        inputs = pytree.tree_map_only(torch.Tensor, lambda _: _HOLE, given, is_leaf=is_size)
        return cls(parameters, inputs, out_spec, constants, numbers, complexes)

    def __reduce__(self) -> tuple[Any, ...]:
        """The structure is pickled as an output of that: torch warns as it loads its own class."""
        output = pytree.tree_unflatten([0] * self.out_spec.num_leaves, self.out_spec)
        rest = self.constants, self.numbers, self.complexes
        return _restored, (self.parameters, self.inputs, output, *rest)

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The graph's inputs, in order, from a call of the model.

        Raises UsageError for a call that differs from the sample in more than its tensors.
        """
        given = _bound(self.parameters, args, kwargs)
        if extra := [name for name in given if name not in self.inputs]:
            raise UsageError(
                f"Input {extra[0]!r} was not given when the model was compiled; it takes "
                f"{', '.join(self.inputs)}."
            )
        found: list[torch.Tensor] = []
        for name, sample in self.inputs.items():
            if name not in given:
                raise UsageError(f"Input {name!r} is missing; the model was compiled with it.")
            leaves, spec = pytree.tree_flatten(given[name], is_leaf=is_size)
            wanted, structure = pytree.tree_flatten(sample, is_leaf=is_size)
            if spec != structure:
                raise UsageError(
                    f"Input {name!r} is nested in another way than the sample that the model was "
                    f"compiled for, which was {sample!r}."
                )
            for leaf, fixed in zip(leaves, wanted, strict=True):
                is_tensor = isinstance(leaf, torch.Tensor)
                if leaf is fixed or (is_tensor if fixed is _HOLE else _equal(leaf, fixed)):
                    continue
                if fixed is _HOLE:
                    kind = type(leaf).__name__
                    raise UsageError(f"Input {name!r} must be a torch.Tensor, not {kind}.")
                shown = "a tensor" if is_tensor else reprlib.repr(leaf)
                raise UsageError(
                    f"Input {name!r} holds {shown} where the model was compiled for {fixed!r}; "
                    "compile it again with such a sample."
                )
            found += [as_pairs(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return found

    def left_out(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """The input that one of these tensors would be in a call of the model, by position, and
        that the sample left out; None where they can't be the model's own arguments.
        """
        if self.parameters is None:
            return None
        try:
            given = self.parameters.bind_partial(*tensors).arguments
        except TypeError:
            return None
        out = [name for name in given if self.inputs.get(name) is None]
        fits = all(self.inputs.get(name) in (None, _HOLE) for name in given)
        return out[0] if fits and out else None

    def unflatten(self, outputs: Sequence[Any], *, are_tensors: bool = False) -> Any:
        """The graph's outputs in the structure that the eager model returns.

        With `are_tensors` numbers stay the tensors that the graph returns.
        """
        rest = iter(outputs)
        known = self.constants
        count = self.out_spec.num_leaves
        leaves = [known[leaf] if leaf in known else next(rest) for leaf in range(count)]
        for leaf in () if are_tensors else self.numbers:
            leaves[leaf] = leaves[leaf].item()
        for leaf in self.complexes:
            leaves[leaf] = from_pairs(leaves[leaf])
        return opened(pytree.tree_unflatten(leaves, self.out_spec))


def _restored(
    parameters: inspect.Signature | None, inputs: Mapping[str, Any], output: Any, *rest: Any
) -> Signature:
    make_known(output)
    return Signature(parameters, inputs, pytree.tree_structure(output), *rest)


def _equal(leaf: Any, fixed: Any) -> bool:
    """Whether a value is the constant of a trace, and of its type: 1 · x isn't 1.0 · x."""
    try:
        return type(leaf) is type(fixed) and bool(leaf == fixed)
    except (TypeError, ValueError, RuntimeError):  # arrays have no one answer
        return False


def _bound(
    parameters: inspect.Signature | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments by parameter, with the defaults of those that are left out."""
    if parameters is None:
        return {**{str(position): arg for position, arg in enumerate(args)}, **kwargs}
    try:
        bound = parameters.bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(f"The inputs don't fit the model: {error}.") from error
    bound.apply_defaults()
    return bound.arguments
