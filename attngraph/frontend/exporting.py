"""One trace by torch.export of a module in inference, tried again with what helps if it fails."""

from __future__ import annotations

import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    suppress,
)
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import sympy
import torch
from torch._dynamo import config as dynamo_config
from torch.export import ExportedProgram
from torch.export.dynamic_shapes import Dim, _DimHint, refine_dynamic_shapes_from_suggested_fixes
from torch.utils import _pytree as pytree
from torch.utils._sympy.numbers import int_oo

from attngraph.errors import CaptureError
from attngraph.frontend.branches import Place, followed_branches
from attngraph.frontend.comparisons import decided_comparisons, open_extremes, wants_bool
from attngraph.frontend.constants import depends_on_data, known_constants
from attngraph.frontend.contiguity import excludes_a_size, undecided_contiguity
from attngraph.frontend.distributions import unvalidated
from attngraph.frontend.guards import always_hold, excluded_largest, excluded_small
from attngraph.frontend.hit_loops import Hits, does_nothing_else
from attngraph.frontend.locations import user_frame
from attngraph.frontend.memoised import forgetting, looks_up_a_size
from attngraph.frontend.numbers import (
    Numbers,
    add_raising,
    recorded_numbers,
    sizes_as_numbers,
)
from attngraph.frontend.output_classes import make_known
from attngraph.frontend.program_dims import user_placeholders
from attngraph.frontend.questions import Question, recorded_questions
from attngraph.frontend.quiet import quiet, watched_specialisations
from attngraph.frontend.recurrent import recurrent_layers
from attngraph.frontend.rewordings import Rewordings
from attngraph.frontend.rounded_sizes import rounded_up
from attngraph.frontend.shapes import Request, requested_dims, without_names
from attngraph.frontend.trace_errors import (
    FIXED,
    LOOKED_UP,
    UNKNOWN_OUTPUT,
    chooses,
    deepest,
    explained,
    relates_sizes,
    rewrite,
    sentence,
    specialised,
    suggestions,
    where,
)
from attngraph.inference import inference

_ALWAYS = (open_extremes, recurrent_layers, rounded_up, unvalidated)
_ATTEMPTS = 7


@contextmanager
def _compiled_anew() -> Iterator[None]:
    """Dynamo forgets what it compiled before.

    A loop's body goes through it, in eager too. It looks for one that it has by asking the sizes of
    the trace whether they are those of an earlier call. Each no stays as a condition, and a yes
    makes the dim a constant.
    """
    torch._dynamo.reset()
    yield


_FIXES = "your code specialized it to be a constant"

_REMEDIES: Mapping[Callable[[], AbstractContextManager[None]], Callable[[str], bool]] = {
    decided_comparisons: wants_bool,
    undecided_contiguity: excludes_a_size,
    _compiled_anew: lambda message: excludes_a_size(message) or _FIXES in message,
    known_constants: depends_on_data,
}
"""What a trace is tried again with, if its error is one that this may help against."""


@dataclass
class Remedies:
    """Those that the traces of one model have `taken`, each once and for all that come after."""

    taken: list[Callable[[], AbstractContextManager[None]]] = field(default_factory=list)

    def take(self, message: str) -> bool:
        """Takes all that may help against an error; whether there are any."""
        found = [cure for cure, helps in _REMEDIES.items() if helps(message)]
        new = [cure for cure in found if cure not in self.taken]
        self.taken += new
        return bool(new)


class OtherNumbersError(CaptureError):
    """A trace failed in which sizes became numbers at places that weren't known."""


_RANGE = re.compile(r"(\w+) = Dim\('\1'(?:, min=(\d+))?(?:, max=(\d+))?\)")


@dataclass(frozen=True)
class Traced:
    """A program and the dims that were asked for.

    `requests` have the ranges of the trace, `asked` those that the caller gave. `questions` are
    what the model's code asked of its sizes. `notes` name the dims of Dim.AUTO that it fixes, which
    are `constant`.
    `branches` are the places where the code chooses by a tensor's values, with the side followed.
    `replayed` are functions of libraries whose operators were traced in their stead, `unrounded`
    are roundings of sizes that were left out, and some are `written` as arithmetic. What is
    `resampled` was traced at these sizes of its requests. A `refusal` is torch's, which took its
    demands for more than what was asked; it stands where they are.
    """

    program: ExportedProgram
    requests: tuple[Request, ...]
    asked: tuple[Request, ...]
    questions: tuple[Question, ...] = ()
    notes: tuple[str, ...] = ()
    branches: Mapping[Place, bool] = field(default_factory=dict)
    constant: tuple[Request, ...] = ()
    replayed: tuple[str, ...] = ()
    resampled: tuple[int, ...] = ()
    unrounded: Mapping[str, set[sympy.Symbol]] = field(default_factory=dict)
    written: bool = False
    scanned: bool = False
    refusal: CaptureError | None = None
    whole: tuple[Place, ...] = ()
    everywhere: tuple[Place, ...] = ()


def export(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    combined: Mapping[str, Any],
    dynamic_shapes: Any,
    sides: Mapping[Place, bool] | None,
    numbers: Numbers,
    constant: Sequence[Request],
    remedies: Remedies,
    *,
    deferred: bool = False,
    settled: bool = True,
) -> Traced:
    """One trace, in which sizes stay sizes at the places of `numbers`.

    Adds other places that made numbers of them. `constant` are dims of an earlier trace that fixed
    them, for which tables of earlier calls may be to blame. With `deferred` a condition on a dim is
    an assertion in the graph, also where it excludes sizes that were asked for. Raises
    OtherNumbersError where the first attempt fails and `numbers` grew, unless they are `settled`.
    """
    asked = requested_dims(combined, dynamic_shapes)
    known = numbers.copy()
    bytecode: Exception | None = None  # what had it read from bytecode; that names a line
    follows = bool(sides)
    refusal: CaptureError | None = None
    hits = None if sides is None else Hits()
    for _ in range(_ATTEMPTS):
        requests = requested_dims(combined, dynamic_shapes)
        shapes = dynamic_shapes if refusal is None else without_names(dynamic_shapes)
        fixed: dict[str, tuple[str, int] | None] = {}
        if bytecode is not None and looks_up_a_size(str(bytecode)):
            fixed[LOOKED_UP] = user_frame(traceback.walk_tb(bytecode.__traceback__))
        questions: list[Question] = []
        branches: dict[Place, bool] = {}
        try:
            with ExitStack() as stack:
                for context in (*remedies.taken, *_ALWAYS):
                    stack.enter_context(context())
                stack.enter_context(Rewordings(numbers.cuts, known.whole, hits))
                for context in (forgetting, quiet):
                    stack.enter_context(context())
                # torch would keep each result under its symbolic sizes, for good, and read none
                stack.enter_context(dynamo_config.patch(fake_tensor_cache_enabled=False))
                stack.enter_context(inference(module))
                _forget(module, args, kwargs, constant)
                stack.enter_context(watched_specialisations(fixed, sys._getframe()))
                stack.enter_context(recorded_questions(questions))
                stack.enter_context(recorded_numbers(numbers))
                stack.enter_context(sizes_as_numbers(known))
                if follows and sides is not None:
                    stack.enter_context(followed_branches(sides, branches))
                program = torch.export.export(
                    module,
                    args,
                    dict(kwargs),
                    dynamic_shapes=shapes,
                    strict=bytecode is not None,
                    prefer_deferred_runtime_asserts_over_guards=deferred,
                )
        except Exception as error:
            if UNKNOWN_OUTPUT.search(str(error)) and _known_output(module, args, kwargs):
                continue
            if hits is not None and hits.shorten(str(error)):
                continue
            helped = remedies.take(str(error))
            if not settled and len(numbers) > len(known):
                raise OtherNumbersError(str(error)) from error
            if helped:
                continue
            # After the remedies, with which a trace asks less: torch leaves out of its message what
            # follows from the sample's own remainder, and a deferred trace demands that as well.
            if not deferred and always_hold(str(error)):
                deferred = True
                continue
            if bytecode is None and (_reads_better(str(error)) or looks_up_a_size(str(error))):
                bytecode = error
                if looks_up_a_size(str(error)):
                    add_raising(numbers, deepest(error).__traceback__)
                continue
            if not constant and (constant := _constants(error, requests)):
                continue
            narrowed = _narrow(str(error), requests, dynamic_shapes)
            if narrowed is None and sides is not None and not follows and chooses(error):
                follows, bytecode = True, None
                continue
            if narrowed is None:
                add_raising(numbers, deepest(error).__traceback__)
                told = error if bytecode is None or not depends_on_data(str(error)) else bytecode
                own = partial(_own, module, args, kwargs)
                if refusal is not None:
                    raise refusal from error
                refusal = explained(told, module, requests, fixed, own)
                if relates_sizes(error) and without_names(dynamic_shapes) is not None:
                    continue
                raise refusal from told
            # What else it demands may hold in the narrower range: the next trace needn't find that.
            deferred = deferred or always_hold(str(error), _ranges(narrowed))
            dynamic_shapes = narrowed
        else:
            loops = set() if hits is None else {*hits.places}
            inputs = args, dict(kwargs)
            if loops and hits and not does_nothing_else(module, inputs, requests, hits):
                hits = None
                continue
            made = _made_constant(program, requests, fixed)
            notes = tuple(_fixed_note(request, fixed) for request in made)
            return Traced(
                program,
                requests,
                asked,
                tuple(questions),
                notes,
                branches,
                made,
                tuple(known.replayed),
                unrounded=known.rounded or {},
                written=bool(known.rounded or known.exact),
                scanned=bool(known.loops),
                refusal=refusal,
                whole=tuple(sorted(known.whole)),
                everywhere=tuple(sorted(loops)),
            )
    raise refusal or CaptureError(
        "torch.export keeps asking for other dim ranges; give them with Dim(name, min=…, max=…)."
    )


def _reads_better(message: str) -> bool:
    """Whether Dynamo, which reads the code instead of running it, may take what a run doesn't.

    It leaves out a move of a module to the device where it is, and `int(tensor)` is
    `tensor.item()` to it.
    """
    return (
        "_apply(): Couldn't swap" in message
        or "Could not extract specialized integer from data-dependent expression" in message
    )


def _own(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Exception | None:
    """What the model itself raises on the inputs that it is traced with; warnings are no failure,
    even where they are set to be errors."""
    try:
        with inference(module), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module(*args, **kwargs)
    except Exception as error:
        return error
    return None


def _known_output(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether the classes that the model returns could be made known to torch's pytree."""
    try:
        with inference(module):
            output = module(*args, **kwargs)
    except Exception:
        return False
    return make_known(output)


def _constants(error: Exception, requests: tuple[Request, ...]) -> list[Request]:
    """The dims that the trace took for constants."""
    found = [FIXED.fullmatch(line) for line in suggestions(str(error))]
    names = {match[1] for match in found if match}
    return [request for request in requests if request.name in names]


def _forget(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    constant: Sequence[Request],
) -> None:
    """Runs the model with sizes below the dims' ranges.

    A table that an earlier call left for the sample's size is then one of a size that no dim has,
    and to ask whether it still fits is no condition.
    """
    if not constant:
        return
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    for request in constant:
        below = max(request.low or 2, 2) - 1
        leaves[request.leaf] = leaves[request.leaf].narrow(request.axis, 0, below)
    small, named = pytree.tree_unflatten(leaves, structure)
    with suppress(Exception):
        module(*small, **named)


def _narrow(message: str, requests: Sequence[Request], dynamic_shapes: Any) -> Any:
    """The shapes with torch's suggestions applied, if all of them only narrow ranges."""
    samples = {each.name: each.size for each in requests if each.name and each.name == each.root}
    found = suggestions(message) or excluded_largest(message) or excluded_small(message, samples)
    matches = [_RANGE.fullmatch(line) for line in found]
    if not matches or not dynamic_shapes or not all(matches):
        return None
    fixes = "\n".join(match[0] for match in matches if match)
    # torch refines named dims alone, and stops at a Dim.AUTO.
    named = pytree.tree_map(lambda dim: None if isinstance(dim, _DimHint) else dim, dynamic_shapes)
    refined = refine_dynamic_shapes_from_suggested_fixes(f"Suggested fixes:\n{fixes}", named)
    return pytree.tree_map(
        lambda dim, new: dim if isinstance(dim, _DimHint) else new, dynamic_shapes, refined
    )


def _ranges(dynamic_shapes: Any) -> dict[str, str]:
    """The range of each dim by name, as torch writes it."""
    found = {}
    for dim in pytree.tree_leaves(dynamic_shapes):
        if isinstance(dim, Dim):
            most = "" if dim.max == int_oo else f" <= {dim.max}"
            found[dim.__name__] = f"{dim.min} <= {dim.__name__}{most}"
    return found


def _made_constant(
    program: ExportedProgram,
    requests: tuple[Request, ...],
    fixed: Mapping[str, tuple[str, int] | None],
) -> tuple[Request, ...]:
    """The axes of Dim.AUTO, "where the model allows", that became constants.

    Raises CaptureError where a dim that was asked for by name became one.
    """
    placeholders = user_placeholders(program)
    found = []
    for request in requests:
        size = placeholders[request.leaf].meta["val"].shape[request.axis]
        if isinstance(size, torch.SymInt) and not size.node.expr.is_number:
            continue
        if request.name is not None:
            raise specialised(request, fixed)
        found.append(request)
    return tuple(found)


def _fixed_note(request: Request, fixed: Mapping[str, tuple[str, int] | None]) -> str:
    return (
        f"{sentence(request)} stays {request.size}: the model makes a constant of it"
        f"{where(request, fixed)}. For other sizes: {rewrite(request, fixed)}."
    )
