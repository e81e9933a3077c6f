"""Run torch.export quietly on a module in inference, and say in a sentence why it can't."""

from __future__ import annotations

import logging
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    redirect_stderr,
    suppress,
)
from dataclasses import dataclass, field
from typing import Any, TextIO, cast

import torch
from torch.export import ExportedProgram
from torch.export.dynamic_shapes import _DimHint, refine_dynamic_shapes_from_suggested_fixes
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from attngraph.errors import CaptureError
from attngraph.frontend.branches import Place, followed_branches
from attngraph.frontend.comparisons import decided_comparisons, wants_bool
from attngraph.frontend.constants import depends_on_data, known_constants
from attngraph.frontend.contiguity import excludes_a_size, undecided_contiguity
from attngraph.frontend.guards import always_hold, excluded_largest
from attngraph.frontend.locations import quote, user_frame
from attngraph.frontend.memoised import forgetting, looks_up_a_size
from attngraph.frontend.questions import Question, recorded_questions
from attngraph.frontend.recurrent import recurrent_layers
from attngraph.frontend.rewordings import Rewordings
from attngraph.frontend.shapes import Request, requested_dims
from attngraph.inference import inference

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
_LOGGERS = (
    "torch.fx.experimental.symbolic_shapes",
    "torch.export._trace",
    "torch._dynamo",
    "torch._guards",
    "torch._subclasses.fake_tensor",
)
_RANGE = re.compile(r"(\w+) = Dim\('\1'(?:, min=(\d+))?(?:, max=(\d+))?\)")
_GUARD = re.compile(r"Not all values of (\w+) = .*? satisfy the generated guard (.+?)\.?$", re.M)
_UNKNOWN_OUTPUT = re.compile(r"Found <class '([\w.<>]+)'> in output")
_FIXED = re.compile(r"(\w+) = (\d+)")
_SAME = re.compile(r"(\w+) = (\w+)")
_DERIVED = re.compile(r"(\w+) = (.*\b_\1\b.*)")


@dataclass(frozen=True)
class Traced:
    """A program and the dims that were asked for.

    `requests` have the ranges of the trace, `asked` those that the caller gave. `questions` are
    what the model's code asked of its sizes. `notes` name the dims of Dim.AUTO that it fixes.
    `branches` are the places where the code chooses by a tensor's values, with the side followed.
    """

    program: ExportedProgram
    requests: tuple[Request, ...]
    asked: tuple[Request, ...]
    questions: tuple[Question, ...] = ()
    notes: tuple[str, ...] = ()
    branches: Mapping[Place, bool] = field(default_factory=dict)


def trace(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    combined: Mapping[str, Any],
    dynamic_shapes: Any,
    sides: Mapping[Place, bool] | None = None,
) -> Traced:
    """Exports the module; narrows a dim's range where the model demands it.

    `sides` say which side of a branch on a tensor's values is followed, true where they don't say;
    with None such a branch is an error.
    Raises CaptureError with torch's reason and the user's line.
    """
    asked = requested_dims(combined, dynamic_shapes)
    deferred = False
    bytecode: Exception | None = None  # what had it read from bytecode; that names a line
    constant: list[Request] = []
    remedies = dict(_REMEDIES)
    taken: list[Callable[[], AbstractContextManager[None]]] = []
    follows = bool(sides)
    for _ in range(_ATTEMPTS):
        requests = requested_dims(combined, dynamic_shapes)
        fixed: dict[str, tuple[str, int] | None] = {}
        questions: list[Question] = []
        branches: dict[Place, bool] = {}
        try:
            with ExitStack() as stack:
                for context in (*taken, recurrent_layers, Rewordings, forgetting, _quiet):
                    stack.enter_context(context())
                stack.enter_context(inference(module))
                _forget(module, args, kwargs, constant)
                stack.enter_context(_watch_specialisations(fixed))
                stack.enter_context(recorded_questions(questions))
                if follows and sides is not None:
                    stack.enter_context(followed_branches(sides, branches))
                program = torch.export.export(
                    module,
                    args,
                    dict(kwargs),
                    dynamic_shapes=dynamic_shapes,
                    strict=bytecode is not None,
                    prefer_deferred_runtime_asserts_over_guards=deferred,
                )
        except Exception as error:
            if not deferred and always_hold(str(error)):
                deferred = True
                continue
            if remedy := next((cure for cure in remedies if remedies[cure](str(error))), None):
                del remedies[remedy]
                taken.append(remedy)
                continue
            if bytecode is None and (_reads_better(str(error)) or looks_up_a_size(str(error))):
                bytecode = error
                continue
            if not constant and (constant := _constants(error, requests)):
                continue
            narrowed = _narrow(str(error), dynamic_shapes)
            if narrowed is None and sides is not None and not follows and _chooses(error):
                follows, bytecode = True, None
                continue
            if narrowed is None:
                told = error if bytecode is None or not depends_on_data(str(error)) else bytecode
                raise _explain(told, module, requests, fixed) from told
            dynamic_shapes = narrowed
        else:
            notes = _fixed_notes(program, requests, fixed)
            return Traced(program, requests, asked, tuple(questions), notes, branches)
    raise CaptureError(
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


def _constants(error: Exception, requests: tuple[Request, ...]) -> list[Request]:
    """The dims that the trace took for constants."""
    found = [_FIXED.fullmatch(line) for line in _suggestions(str(error))]
    names = {match[1] for match in found if match}
    return [request for request in requests if request.name in names]


def _forget(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    constant: list[Request],
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


class _WithoutGraphs:
    """stderr without the partial graph that torch prints when an export fails."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._skips_newline = False

    def write(self, text: str) -> int:
        skip = "def forward(self" in text or (self._skips_newline and text == "\n")
        self._skips_newline = skip and text != "\n"
        return len(text) if skip else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's own warnings and logs: what matters of them is in the error."""

    def silence(record: logging.LogRecord) -> bool:
        return False

    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(silence)
    try:
        with warnings.catch_warnings(), redirect_stderr(cast(TextIO, _WithoutGraphs(sys.stderr))):
            for module in ("torch", "typing_extensions", "copyreg"):
                warnings.filterwarnings("ignore", module=rf"{module}(\.|$)")
            warnings.filterwarnings("ignore", "The tensor attribute")  # they are as they were
            warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_")
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(silence)


@contextmanager
def _watch_specialisations(found: dict[str, tuple[str, int] | None]) -> Iterator[None]:
    """Records the user's line where a size becomes a constant; torch keeps only its own line.

    Keys are torch's names of sizes (`L['x'].size()[0]`).
    """
    original: Callable[..., Any] | None = getattr(ShapeEnv, "_set_replacement", None)
    if original is None:
        with nullcontext():
            yield
        return
    call = original

    def recording(self: ShapeEnv, symbol: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(target, "is_number", False):
            frame = user_frame(reversed(list(traceback.walk_stack(sys._getframe(1)))))
            for source in self.var_to_sources.get(symbol, ()):
                name = source.name if isinstance(source.name, str) else source.name()
                found.setdefault(name, frame)
        return call(self, symbol, target, *args, **kwargs)

    setattr(ShapeEnv, "_set_replacement", recording)  # noqa: B010
    try:
        yield
    finally:
        setattr(ShapeEnv, "_set_replacement", call)  # noqa: B010


def _suggestions(message: str) -> list[str]:
    _, found, rest = message.partition("Suggested fixes:\n")
    lines = rest.split("\n\n")[0].splitlines() if found else []
    return [line.strip() for line in lines if line.strip()]


def _narrow(message: str, dynamic_shapes: Any) -> Any:
    """The shapes with torch's suggestions applied, if all of them only narrow ranges."""
    suggestions = _suggestions(message) or excluded_largest(message)
    matches = [_RANGE.fullmatch(line) for line in suggestions]
    if not matches or not dynamic_shapes or not all(matches):
        return None
    fixes = "\n".join(match[0] for match in matches if match)
    # torch refines named dims alone, and stops at a Dim.AUTO.
    named = pytree.tree_map(lambda dim: None if isinstance(dim, _DimHint) else dim, dynamic_shapes)
    refined = refine_dynamic_shapes_from_suggested_fixes(f"Suggested fixes:\n{fixes}", named)
    return pytree.tree_map(
        lambda dim, new: dim if isinstance(dim, _DimHint) else new, dynamic_shapes, refined
    )


def _fixed_notes(
    program: ExportedProgram,
    requests: tuple[Request, ...],
    fixed: Mapping[str, tuple[str, int] | None],
) -> tuple[str, ...]:
    """A sentence for each axis of Dim.AUTO, "where the model allows", that became a constant.

    Raises CaptureError where a dim that was asked for by name became one.
    """
    placeholders = user_placeholders(program)
    notes = []
    for request in requests:
        size = placeholders[request.leaf].meta["val"].shape[request.axis]
        if isinstance(size, torch.SymInt) and not size.node.expr.is_number:
            continue
        if request.name is not None:
            raise _specialised(request, fixed)
        notes.append(
            f"{_sentence(request)} stays {request.size}: the model makes a constant of it"
            f"{_where(request, fixed)}. For other sizes take it from the tensor's shape there."
        )
    return tuple(notes)


def user_placeholders(program: ExportedProgram) -> list[torch.fx.Node]:
    """The nodes of the model's own inputs, tensors or not, in order."""
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    return placeholders[len(placeholders) - len(program.graph_signature.user_inputs) :]


def _specialised(request: Request, fixed: Mapping[str, tuple[str, int] | None]) -> CaptureError:
    return CaptureError(
        f"{_sentence(request)} can't be dynamic: the model fixes it to {request.size}"
        f"{_where(request, fixed)}. Take the size from the tensor there, or leave the dim static."
    )


def _where(request: Request, fixed: Mapping[str, tuple[str, int] | None]) -> str:
    """The line at which a request's size became a constant, as far as it is known."""
    head = re.split(r"\W", request.input)[0]
    place = None
    for source, frame in fixed.items():
        if source.endswith(f".size()[{request.axis}]") and f"'{head}'" in source:
            place = frame
    return f" at {quote(*place)}" if place else ""


def _sentence(request: Request) -> str:
    return f"I{str(request)[1:]}"


def _explain(
    error: Exception,
    module: torch.nn.Module,
    requests: tuple[Request, ...],
    fixed: Mapping[str, tuple[str, int] | None],
) -> CaptureError:
    by_name = {request.name: request for request in requests if request.name}
    for line in _suggestions(str(error)):
        if (match := _FIXED.fullmatch(line)) and match[1] in by_name:
            return _specialised(by_name[match[1]], fixed)
        if (match := _SAME.fullmatch(line)) and {match[1], match[2]} <= by_name.keys():
            first, second = by_name[match[2]], by_name[match[1]]
            return CaptureError(
                f"The model needs {first} and {second} to be equal; give both the same Dim."
            )
        if (match := _DERIVED.fullmatch(line)) and match[1] in by_name:
            return CaptureError(
                f"{_sentence(by_name[match[1]])} can't take every size: the model needs "
                f"{match[1]} = {match[2]}; derive it from another Dim in that way, or leave it "
                "static."
            )
    if match := _GUARD.search(str(error)):
        return _guarded(match, requests, by_name)
    if match := _UNKNOWN_OUTPUT.search(str(error)):
        name = match[1].rpartition(".")[2]
        hint = 'pass kwargs={"use_cache": False}' if "Cache" in name else "return tensors only"
        return CaptureError(
            f"{type(module).__name__} returns a {name}, which torch.export can't take apart: "
            f"{hint}, "
            "or register the type with torch.utils._pytree.register_pytree_node."
        )
    place = user_frame(traceback.walk_tb(_deepest(error).__traceback__))
    where = f" at {quote(*place)}" if place else ""
    text = _data_dependent(str(_deepest(error))) or reason(error)
    return CaptureError(f"torch.export can't trace {type(module).__name__}{where}: {text}")


def _chooses(error: Exception) -> bool:
    """Whether Python decides by the values of a tensor, not by a size or a number made of them."""
    message = str(_deepest(error))
    return depends_on_data(message) and "specialized integer" not in message


def _data_dependent(message: str) -> str:
    """What Python asks of a tensor's values, where torch says that it does; else empty."""
    if "data-dependent expression" not in message:
        return ""
    sizes = re.search(r"Size-like symbols: ([^)]*)", message)
    asked = re.search(r"data-dependent expression (.*?) \(unhinted", message)
    names = set(re.findall(r"\bu\d+\b", asked[1] if asked else ""))
    if sizes and names & set(sizes[1].split(", ")):
        return (
            "Python decides by a data-dependent size there: one that the values of a tensor make, "
            "as those of nonzero() and x[mask] do. Keep the size and mask instead of selecting, or "
            "don't let Python branch on it."
        )
    if "specialized integer" in message:
        return (
            "Python needs a data-dependent number there, which is in a tensor until the model "
            "runs. Keep it a tensor (torch.arange(n) < length instead of x[:length]), or make it "
            "an int argument."
        )
    return (
        "Python decides by a data-dependent condition there: the values of a tensor, known only at "
        "run time. Use torch.where."
    )


def _guarded(
    match: re.Match[str], requests: tuple[Request, ...], by_name: Mapping[str, Request]
) -> CaptureError:
    """A condition on a dim that the trace met, in the dims' own names."""
    condition = match[2]
    for request in requests:
        if request.name:
            source = re.escape(f"L['{request.input}'].size()[{request.axis}]")
            condition = re.sub(source, request.name, condition)
    named = by_name.get(match[1])
    which = _sentence(named) if named else f"Dim {match[1]!r}"
    return CaptureError(
        f"{which} can't take every size: the trace relies on {condition}, which can't be shown to "
        "hold in its whole range. Leave the dim static, or write the slice or view behind the "
        "condition with sizes taken from the tensors' shapes."
    )


def _deepest(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def reason(error: BaseException) -> str:
    """The first sentence or two of torch's message, on one line."""
    text = str(error).strip() or type(error).__name__
    text = re.split(r"\n\s*\n|\nFor more information|\nFrom user code", text)[0]
    text = " ".join(text.split())
    return text if len(text) <= 300 else text[:299] + "…"
