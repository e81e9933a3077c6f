"""What a trace leaves of the dims that were asked for: narrower ranges, and axes that are fixed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch.export import ExportedProgram
from torch.export.dynamic_shapes import Dim, _DimHint, refine_dynamic_shapes_from_suggested_fixes
from torch.utils import _pytree as pytree
from torch.utils._sympy.numbers import int_oo

from attngraph.frontend.interface.shapes import Request
from attngraph.frontend.sizes.program_dims import is_held, open_sizes
from attngraph.frontend.tracing.guards import excluded_largest, excluded_small
from attngraph.frontend.tracing.trace_errors import (
    constants,
    fixed_first,
    rewrite,
    sentence,
    specialised,
    suggestions,
    where,
)

_RANGE = re.compile(r"(\w+) = Dim\('\1'(?:, min=(\d+))?(?:, max=(\d+))?\)")


def taken_for_constants(error: Exception, requests: tuple[Request, ...]) -> list[Request]:
    """The dims that the trace took for constants."""
    names = constants(str(error))
    return [request for request in requests if request.name in names]


def narrowed(
    message: str, requests: Sequence[Request], dynamic_shapes: Any, *, starts: bool
) -> Any:
    """The shapes with torch's suggestions applied, if all of them only narrow ranges.

    With `starts` that is also where a dim begins, beyond which slices are never cut short.
    """
    samples = {each.name: each.size for each in requests if each.name and each.name == each.root}
    found = suggestions(message) or excluded_largest(message)
    if not found and starts:
        found = excluded_small(message, samples)
    matches = [_RANGE.fullmatch(line) for line in found]
    if not matches or not dynamic_shapes or not all(matches):
        return None
    fixes = "\n".join(match[0] for match in matches if match)
    # torch refines named dims alone, and stops at a Dim.AUTO.
    named = pytree.tree_map(lambda dim: None if isinstance(dim, _DimHint) else dim, dynamic_shapes)
    try:
        refined = refine_dynamic_shapes_from_suggested_fixes(f"Suggested fixes:\n{fixes}", named)
    except AssertionError:  # one size is left, for which torch has no Dim
        return None
    return pytree.tree_map(
        lambda dim, new: dim if isinstance(dim, _DimHint) else new, dynamic_shapes, refined
    )


def ranges_of(dynamic_shapes: Any) -> dict[str, str]:
    """The range of each dim by name, as torch writes it."""
    found = {}
    for dim in pytree.tree_leaves(dynamic_shapes):
        if isinstance(dim, Dim):
            most = "" if dim.max == int_oo else f" <= {dim.max}"
            found[dim.__name__] = f"{dim.min} <= {dim.__name__}{most}"
    return found


def made_constant(
    program: ExportedProgram,
    requests: tuple[Request, ...],
    fixed: Mapping[str, tuple[str, int] | None],
) -> tuple[Request, ...]:
    """The axes of Dim.AUTO, "where the model allows", that became constants.

    Raises CaptureError where a dim that was asked for by name became one.
    """
    found = []
    for request, size in open_sizes(program, requests):
        if size is not None and not size.is_number and not is_held(program, request):
            continue
        if request.name is not None:
            raise specialised(fixed_first(request, requests, fixed), fixed)
        found.append(request)
    return tuple(found)


def fixed_note(request: Request, fixed: Mapping[str, tuple[str, int] | None]) -> str:
    return (
        f"{sentence(request)} stays {request.size}: the model makes a constant of it"
        f"{where(request, fixed)}. For other sizes: {rewrite(request, fixed)}."
    )
