"""Which trace of a module is kept: the one that leaves most sizes open."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import sympy
import torch

from attngraph.errors import CaptureError
from attngraph.frontend.branches import Place
from attngraph.frontend.exporting import Traced, export
from attngraph.frontend.numbers import Numbers
from attngraph.frontend.program_dims import bounded, demanded, of_size, shape_env
from attngraph.frontend.resampled import (
    is_cut_for_memory,
    is_model,
    is_rounded_for_speed,
    other_samples,
)
from attngraph.frontend.shapes import Request, combine, requested_dims
from attngraph.frontend.trace_errors import Specialised

_AGAIN = 3
"""Traces of code that makes numbers of sizes: what is called first may hide what comes after."""


def trace(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    combined: Mapping[str, Any],
    dynamic_shapes: Any,
    sides: Mapping[Place, bool] | None = None,
    *,
    elsewhere: bool = False,
) -> Traced:
    """Exports the module; narrows a dim's range where the model demands it.

    `sides` say which side of a branch on a tensor's values is followed, true where they don't say;
    with None such a branch is an error.
    Where the code makes numbers of sizes, it is traced again with those that may stay sizes.
    Raises CaptureError with torch's reason and the user's line.
    """
    numbers = Numbers(rounded={} if elsewhere else None)
    constant: tuple[Request, ...] = ()
    best: Traced | CaptureError | None = None
    for _ in range(_AGAIN):
        known = len(numbers), constant
        try:
            found: Traced | CaptureError = export(
                module, args, kwargs, combined, dynamic_shapes, sides, numbers, constant
            )
        except CaptureError as error:
            found = error
        if isinstance(found, Traced) and found.unrounded:
            sized = of_size(found.program, found.asked, set().union(*found.unrounded.values()))
            if not is_rounded_for_speed(module, args, kwargs, sized, numbers.functions):
                numbers.rounded = None
                continue
        scanned = found.program if isinstance(found, Traced) and found.scanned else None
        if scanned is not None and not is_model(scanned, module, args, kwargs, ()):
            break
        best = found if best is None else _better(best, found)
        if isinstance(found, Traced):
            constant = constant or found.constant
        if (len(numbers), constant) == known:
            break
    assert best is not None
    numbers = replace(numbers, rounded=None)
    if elsewhere:
        best = _elsewhere(best, module, args, kwargs, combined, dynamic_shapes, sides, numbers)
    if isinstance(best, Traced):
        return best
    raise best


def _elsewhere(
    best: Traced | CaptureError,
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    combined: Mapping[str, Any],
    dynamic_shapes: Any,
    sides: Mapping[Place, bool] | None,
    numbers: Numbers,
) -> Traced | CaptureError:
    """The trace with axes that are cut into parts whole, or at other sizes, if it fixes less."""
    asked = requested_dims(combined, dynamic_shapes)
    constant, is_multiple = _constant(best, asked)
    if not constant:
        return best
    if numbers.cuts and is_cut_for_memory(module, args, kwargs, constant, numbers.cuts):
        numbers = replace(numbers, whole=frozenset(numbers.cuts))
        with suppress(CaptureError):
            whole = export(module, args, kwargs, combined, dynamic_shapes, sides, numbers, ())
            best = _better(best, whole)
        constant, is_multiple = _constant(best, asked)
        if not constant:
            return best
    for sample in other_samples(module, args, kwargs, asked, constant, multiple=is_multiple):
        known = -1
        for deferred in (True, True, False):
            if len(numbers) == known and deferred:
                continue
            known = len(numbers)
            with suppress(CaptureError):
                found = export(
                    module,
                    *sample,
                    combine(module, *sample),
                    dynamic_shapes,
                    sides,
                    numbers,
                    (),
                    deferred=deferred,
                )
                if _better(best, found) is found and is_model(
                    found.program, module, args, kwargs, constant
                ):
                    return replace(found, requests=asked, asked=asked, resampled=True)
    return best


def _constant(
    traced: Traced | CaptureError, asked: tuple[Request, ...]
) -> tuple[tuple[Request, ...], bool]:
    """The dims that a trace doesn't keep open, and whether it takes them for multiples."""
    if isinstance(traced, Specialised):
        return traced.requests, traced.multiple
    if isinstance(traced, CaptureError):
        return (), False
    constant = traced.constant or bounded(traced.program, traced.asked)
    return (constant, False) if constant else (demanded(traced.program, asked), True)


def _better(before: Traced | CaptureError, after: Traced | CaptureError) -> Traced | CaptureError:
    """The trace that fixes fewer sizes; the first where neither does."""
    if isinstance(after, CaptureError):
        return before
    if isinstance(before, CaptureError) or _fixes(after) < _fixes(before):
        return after
    return before


def _fixes(traced: Traced) -> tuple[int, bool, int, int]:
    """How many dims a trace has made constants of, bounded, and how many expressions of them; and
    whether it took functions that round for what they make of the sample."""
    env = shape_env(traced.program)
    guards = [guard.expr for guard in env.guards] if env is not None else []
    equations = sum(isinstance(guard, sympy.Eq) for guard in guards)
    return (
        len(traced.notes),
        not traced.written,
        len(bounded(traced.program, traced.asked)),
        equations,
    )
