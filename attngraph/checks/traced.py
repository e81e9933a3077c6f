"""Whether a captured graph is what the model computes, and on which conditions."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch

from attngraph.checks.bisect import difference
from attngraph.checks.check import Check
from attngraph.checks.weight_only import reference_of
from attngraph.errors import IRError, ParityError, UsageError
from attngraph.frontend.sizes.blocks import blocks
from attngraph.frontend.sizes.suspects import Suspect, is_largest
from attngraph.ir import Dim, Graph, TensorType, Value, interpret
from attngraph.ir.conditions import Condition, left_out_alone, multiples
from attngraph.ir.dims import DIVIDING, functions_of, substitute, symbol, symbols_of
from attngraph.ir.interpreter import Observer
from attngraph.ir.ranges import Ranges

_ROUNDING = 2.0**-11
"""Half the digits of float32, in which a trace may hold tables that the model computes."""


_APART = 2.0**-8
"""The difference, of the outputs' scale and in float64, from which on two sides are told apart."""
_LARGEST = 4096
"""Up to which size a dim's end is tried."""
_TIMES, _MOST_SIZES = 8, 8
"""How far beyond the sample, and how many of the sizes, at which other code runs are tried."""
LONGEST = 2048
"""Up to which size it is tried what follows the largest of a trace."""
_SMALL = 4
"""Up to this size each is tried: a part of 4 is shorter there."""


def trace_differs(check: Check, graph: Graph) -> str:
    """A sentence if the captured graph computes something else than the model, else "".

    Both are evaluated in float64, where rounding explains no difference; a model without a
    float64 form is compared in its own dtypes.
    """
    references = check.all_references()
    evaluated = reference_of(graph, check.precision)
    for label, tensors in check.all_cases().items():
        own, traced = references[label], evaluated(tensors, {})
        pairs = zip(own.exact, traced.exact, strict=True)
        wide = [(a, b) for a, b in pairs if a is not None and b is not None]
        if len(wide) < len(own.exact):
            wide = list(zip(own.eager, traced.eager, strict=True))
        off = max((difference(a, b) for a, b in wide), default=0.0)
        if off > _ROUNDING:
            return (
                f"No pass is to blame: what torch.export traced of {check.model.source} already "
                f"differs from it at {label} (by {off:.2e} of the output's scale, in float64). "
                "Look for code that runs differently under a trace, such as "
                "torch.compiler.is_compiling(), for a number that the trace made a constant, "
                "or for an `if` that compares two sizes."
            )
    return ""


def required_conditions(check: Check, graph: Graph) -> list[Suspect]:
    """The suspects that the captured graph needs in order to compute what the model does, and the
    largest sizes that the model itself takes.

    Each is tried at sizes that break it: 1, what the dim is a multiple of, or is cut into, one that
    all its dims have, and of one that the sample breaks, or that few sizes do, sizes all over. At
    the smallest and the largest of them other values are tried than the sample's, too.
    """
    sample, *_ = check.samples.sizes()
    steps = multiples(check.captured.graph.conditions)
    known: dict[str, bool] = {}
    contrasted: dict[str, bool] = {}

    def apart(sizes: Mapping[str, int]) -> bool:
        label = str(sizes)
        if label not in contrasted:
            inputs = check.samples.contrasts(check.samples.at(sizes))
            contrasted[label] = any(is_told_apart(check, graph, each) for each in inputs)
        return contrasted[label]

    chances = [suspect.condition for suspect in check.captured.suspects if suspect.chance]
    limits = check.samples.limits
    relations = tuple(each for each in limits.relations if each not in chances)
    found: list[Suspect] = []
    # Where a dim begins comes first: below that, nothing is to be learned of the others.
    for suspect in sorted(check.captured.suspects, key=_by_start):
        if suspect.assumed:
            continue
        starts = tuple(each.condition for each in found if each.start is not None)
        limits = replace(limits, relations=(*relations, *starts))
        names = sorted(symbols_of(suspect.condition) & sample.keys())
        common = [1, *steps.values(), *(sample[name] for name in names)]
        tried = [{name: n} for name in names for n in (1, steps.get(name, 1))] + [steps]
        tried += [dict.fromkeys(names, n) for n in common]
        cut = [each for each in blocks(suspect.condition).values() if each[0] in names]
        tried += [{name: n} for name, size in cut for n in (size, size // 2)]
        if suspect.chance:
            tried += [*_together(suspect, sample), *_ends(suspect, graph)]
        is_start = suspect.start is not None
        if suspect.beyond or is_start or functions_of(suspect.condition) & DIVIDING:
            tried += _elsewhere(suspect, sample)
        broken = [
            sizes
            for sizes in ({**sample, **ones} for ones in tried)
            if Ranges({}, (suspect.condition,)).broken(sizes) and not limits.broken(sizes)
        ]
        if (suspect.chance or suspect.recur) and not broken:
            found.append(suspect)
        untaken = 0
        for sizes in broken:
            label = str(sizes)
            if label not in known:
                tensors = check.samples.at(sizes)
                if suspect.beyond and _fails(check, tensors):
                    untaken += 1
                    continue  # a size that the model doesn't take says nothing of its other side
                known[label] = is_traced(check, graph, tensors)
            if not known[label]:
                found.append(_begun_lower(check, graph, suspect, sample) if is_start else suspect)
                break
        else:
            if untaken == len(broken):
                # The model fails beyond it, as at the end of a table, or that is too long to try.
                if suspect.beyond and _narrows(suspect.condition, graph):
                    found.append(replace(suspect, beyond=False, is_end=True))
            elif any(apart(sizes) for sizes in _extremes(broken)):
                found.append(suspect)
    return [*found, *_not_one(check, graph, Ranges({}, tuple(s.condition for s in found)))]


def _narrows(condition: Condition, graph: Graph) -> bool:
    """Whether it says how large a dim is at most, which is larger otherwise."""
    if not is_largest(condition) or str(condition.lts) not in graph.dims:
        return False
    high = graph.dims[str(condition.lts)].high
    return high is None or high > condition.gts


def _begun_lower(
    check: Check, graph: Graph, suspect: Suspect, sample: Mapping[str, int]
) -> Suspect:
    """The suspect with the least size from which on the graph is the model at each one.

    A trace that cuts the nearest 4 of n points takes n for more than 4, and is right at 4.
    """
    names, start = symbols_of(suspect.condition), suspect.start
    if start is None or suspect.refusal is not None or len(names) != 1:
        return suspect
    (name,) = names
    least = start
    while least > 1 and is_traced(check, graph, check.samples.at({**sample, name: least - 1})):
        least -= 1
    if least == start:
        return suspect
    return replace(suspect, condition=sympy.Ge(symbol(name), least), start=least)


def _by_start(suspect: Suspect) -> tuple[bool, int]:
    return suspect.start is None, suspect.start or 0


def conditions_with(
    graph: Graph, suspects: Iterable[Suspect], required: Iterable[Suspect]
) -> tuple[Condition, ...]:
    """The conditions of a graph with those of its suspects that are required, and no others."""
    needed = [suspect.condition for suspect in required]
    own = [suspect.condition for suspect in suspects if suspect.chance]
    kept = [each for each in graph.conditions if each not in own]
    return (*kept, *needed)


def _elsewhere(suspect: Suspect, sample: Mapping[str, int]) -> list[dict[str, int]]:
    """Sizes at which the model runs other code than was traced: all, or some from all over them."""
    found = []
    for name in sorted(symbols_of(suspect.condition) & sample.keys()):
        sizes = range(1, _TIMES * sample[name] + 1)
        only = Ranges({}, (suspect.condition,))
        left_out = [size for size in sizes if only.broken({**sample, name: size})]
        step = max(1, -(-len(left_out) // _MOST_SIZES))
        near = [size for size in left_out if abs(size - sample[name]) == 1]
        small = left_out[:_SMALL]
        found += [{name: size} for size in (*left_out[::step], *left_out[-1:], *near, *small)]
        if is_largest(suspect.condition):
            most = int(suspect.condition.gts)
            found += [{name: size} for size in (most + 1, 2 * most) if size <= LONGEST]
    return found


def _extremes(tried: Sequence[dict[str, int]]) -> list[dict[str, int]]:
    """The smallest and the largest of the sizes that were tried."""
    ordered = sorted(tried, key=lambda sizes: math.prod(sizes.values()))
    return ordered[:1] + ordered[1:][-1:]


def _together(suspect: Suspect, sample: Mapping[str, int]) -> list[dict[str, int]]:
    """Sizes that all dims of a condition have, and that break it."""
    names = sorted(symbols_of(suspect.condition) & sample.keys())
    only = Ranges({}, (suspect.condition,))
    alike = [
        dict.fromkeys(names, size)
        for size in range(1, _TIMES * max((sample[name] for name in names), default=0) + 1)
    ]
    return [sizes for sizes in alike if only.broken({**sample, **sizes})][:_MOST_SIZES]


def _ends(suspect: Suspect, graph: Graph) -> list[dict[str, int]]:
    """The one size that it leaves out, or else the largest sizes of its dims: of a table that is
    taken whole, its length.
    """
    names = symbols_of(suspect.condition) & graph.dims.keys()
    if (alone := left_out_alone(suspect.condition)) is not None:
        sizes = dict.fromkeys(names, alone)
    else:
        sizes = {name: high for name in names if (high := graph.dims[name].high) is not None}
    return [{name: sizes[name]} for name in sorted(sizes) if 0 < sizes[name] <= _LARGEST]


def _not_one(check: Check, graph: Graph, known: Ranges) -> list[Suspect]:
    """The dims that the captured graph is wrong for where they are 1, beside what is known.

    All of them are tried at once, and each by itself only if they fail. Where the model itself
    fails, nothing is asked of the graph.
    """
    sample, *_ = check.samples.sizes()
    limits = check.samples.limits
    assumed = {
        name: suspect
        for suspect in check.captured.suspects
        for name in symbols_of(suspect.condition) & sample.keys()
        if suspect.assumed
    }

    def differs(names: Iterable[str]) -> bool:
        sizes = {**sample, **dict.fromkeys(names, 1)}
        if limits.broken(sizes) or known.broken(sizes):
            return False
        tensors = check.samples.at(sizes)
        with contextlib.suppress(UsageError):
            check.references(tensors)
            return not is_traced(check, graph, tensors)
        return False

    if not assumed or not differs(assumed):
        return []
    return [suspect for name, suspect in assumed.items() if differs([name])]


def agrees(check: Check, graph: Graph) -> bool:
    """Whether a captured graph computes what the model does in every case."""
    return all(is_traced(check, graph, tensors) for tensors in check.all_cases().values())


def is_traced(check: Check, graph: Graph, tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether the captured graph is what the model computes, in the shapes that its types say;
    False where that fails.

    Passes and the lowering go by the types, an op by what it is given: thirds of an axis, traced
    where they are equal, may have the right numbers elsewhere, and types that are wrong.
    """
    try:
        reference = check.references(tensors)
        outputs = interpret(graph, tensors, observe=_typed(check.samples.sizes_of(tensors)))
        return check.held(reference, outputs, tensors).passed
    except (UsageError, IRError, ParityError, RuntimeError, IndexError):
        return False  # ParityError: of other outputs; IndexError: of a row of none


def is_told_apart(
    check: Check, graph: Graph, tensors: tuple[torch.Tensor, ...], *, failing: bool = True
) -> bool:
    """Whether a captured graph computes something else than the model where both are finite.

    False where the model fails; `failing` where only the graph does. What overflows, and what
    rounding explains, tells nothing: numbers may be far larger than those that the model is meant
    for.
    """
    if _fails(check, tensors) or is_traced(check, graph, tensors):
        return False
    own = check.references(tensors)
    if check.says_otherwise(own):
        return True
    try:
        traced = reference_of(graph, check.precision)(tensors, {})
    except (UsageError, IRError, RuntimeError, IndexError):
        return failing
    if len(own.exact) != len(traced.exact):
        return True
    outputs = zip(own.eager, traced.eager, own.exact, traced.exact, strict=True)
    return any(_differ(a, b) if c is None or d is None else _differ(c, d) for a, b, c, d in outputs)


def _differ(expected: torch.Tensor, found: torch.Tensor) -> bool:
    if expected.shape != found.shape:
        return True
    if not expected.is_floating_point() or not found.is_floating_point():
        return not torch.equal(expected, found)
    finite = expected.isfinite() & found.isfinite()
    if not bool(finite.any()):
        return False
    expected, found = expected[finite].double(), found[finite].double()
    return bool((expected - found).abs().max() > _APART * expected.abs().max())


def _fails(check: Check, tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether the model itself takes no such inputs."""
    try:
        check.references(tensors)
    except UsageError:
        return True
    return False


def _typed(sizes: Mapping[str, int]) -> Observer:
    """Raises IRError for a value that isn't of its type at these sizes."""
    known: dict[Dim, int] = {}

    def observe(value: Value, result: Any) -> None:
        if not isinstance(value.type, TensorType):
            return
        if len(value.shape) != result.dim():
            raise IRError(f"%{value.name} has shape {list(result.shape)}, not {value.type}.")
        for dim, actual in zip(value.shape, result.shape, strict=True):
            if dim not in known and symbols_of(dim) <= sizes.keys():
                known[dim] = substitute(dim, sizes)
            if known.get(dim, actual) != actual:
                raise IRError(f"%{value.name} has shape {list(result.shape)}, not {value.type}.")

    return observe
