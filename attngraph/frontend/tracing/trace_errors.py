"""Why a trace failed, or fixed a size, in a sentence with the user's line and what helps."""

from __future__ import annotations

import linecache
import os
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from attngraph.errors import CaptureError, LoadError, SampleError
from attngraph.frontend.interface.shapes import Request
from attngraph.frontend.interface.wrappers import hindrance
from attngraph.frontend.rewording.constants import depends_on_data
from attngraph.frontend.tracing.advice import advice
from attngraph.frontend.watching.locations import is_plumbing, quote, user_frame
from attngraph.frontend.watching.statements import goes_on_if

_GUARD = re.compile(r"Not all values of (\w+) = .*? satisfy the generated guard (.+?)\.?$", re.M)
_NESTED = str(Path(torch.__file__).parent / "nested") + os.sep
_UNKNOWN_OUTPUT = re.compile(r"Found <class '([\w.<>]+)'> in output")
_NO_META = re.compile(r"'(\w+)' object has no attribute 'meta'")  # an Enum, as an output
_UNKNOWN_INPUT = re.compile(r"Unsupported input type <class '([\w.<>]+)'>")
FIXED = re.compile(r"(\w+) = (\d+)")
_SAME = re.compile(r"(\w+) = (\w+)")
_OPEN_SIZES = "Cannot call sizes() on tensor with symbolic sizes"
_VMAP = (
    "torch's own code asks for numbers there, as under torch.vmap. Leave the dims static, or write "
    "out the axis that torch.vmap adds"
)
_RAISE = re.compile(r"(^|:)\s*raise\b")
_COUNTS = re.compile(r"\bfor\b.*\brange\(")
_TOP_K = re.compile(r"\bk (not in|out of) range\b")
_TOO_MANY = ": a top-k takes more than there are, such as more experts per token than experts"
LOOKED_UP = "a size that is looked up"
CUT = "an axis that is cut into a number of parts"
_BY_TORCH = re.compile(r"Caused by: \(_(refs|meta|prims|subclasses|decomp)")
_CONSTANT = re.compile(
    r"You marked (.+?) as dynamic but your code specialized it to be a constant "
)
_DERIVED = re.compile(r"(\w+) = (.*\b_\1\b.*)")

Places = Mapping[str, tuple[str, int] | None]
"""The user's file and line at which a size became a constant, by torch's name of the size."""


def suggestions(message: str) -> list[str]:
    _, found, rest = message.partition("Suggested fixes:\n")
    lines = rest.split("\n\n")[0].splitlines() if found else []
    return [line.strip() for line in lines if line.strip()]


def constants(message: str) -> list[str]:
    """The names of the dims that a trace took for constants.

    torch suggests nothing for one that is derived, such as 8*c, whose root it says nothing of.
    """
    found = [FIXED.fullmatch(line) for line in suggestions(message)]
    derived = [name for name in _CONSTANT.findall(message) if not name.isidentifier()]
    return [*(match[1] for match in found if match), *derived]


_NO_RULE = "Cannot create Dim with inconsistent"
"""torch's own failure, over its advice for a dim that the trace knows a single block of."""
_DEMANDS = ("Constraints violated", _NO_RULE)


class Specialised(CaptureError):
    """Dims that were asked for became constants, or multiples of a number.

    Where Python counts to one, `loop` is the place. `advice` is for who asked for the dims, and
    `cause` the message without it.
    """

    def __init__(
        self,
        cause: str,
        requests: tuple[Request, ...],
        *,
        advice: str = "",
        multiple: bool = False,
        loop: tuple[str, int] | None = None,
    ) -> None:
        super().__init__(f"{cause} {advice}".rstrip())
        self.cause = cause
        self.requests, self.multiple, self.loop = requests, multiple, loop


class AtMultiples(CaptureError):
    """What a trace failed with on a side that the code takes where these dims, as the sample's, are
    multiples of a number: `if padding > 0` left the padding out.
    """

    def __init__(self, cause: str, requests: tuple[Request, ...]) -> None:
        super().__init__(cause)
        self.requests = requests


def specialised(request: Request, fixed: Places) -> Specialised:
    return Specialised(
        f"{sentence(request)} can't be dynamic: the model fixes it to {request.size}"
        f"{where(request, fixed)}.",
        (request,),
        advice=f"Leave the dim static, or {rewrite(request, fixed)}; if it can't be every size, "
        "ask for the sizes that the model takes (Dim.AUTO, name=auto).",
        loop=loop_over(request, fixed),
    )


def loop_over(request: Request, fixed: Places) -> tuple[str, int] | None:
    """The line on which a size became a constant, if Python counts to it there."""
    place = None if CUT in fixed else _place(request, fixed)
    is_loop = place is not None and _COUNTS.search(linecache.getline(*place))
    return place if is_loop else None


def rewrite(request: Request, fixed: Places) -> str:
    """How to keep a size a size, by the line that made a number of it."""
    place = _place(request, fixed)
    if place is not None and place == fixed.get(LOOKED_UP):
        return "compare sizes with == there, as a set, a dict and functools.cache look up numbers"
    return advice(*(place or ("", 0)))


def where(request: Request, fixed: Places) -> str:
    place = _place(request, fixed)
    return f" at {quote(*place)}" if place else ""


def _place(request: Request, fixed: Places) -> tuple[str, int] | None:
    """The line at which a request's size became a constant, as far as it is known."""
    place = None
    for source, frame in fixed.items():
        if _is_of(source, request):
            place = frame
    return place or fixed.get(LOOKED_UP) or fixed.get(CUT)


def _is_of(source: str, request: Request) -> bool:
    """Whether this is torch's name for the size of a request's axis."""
    head = re.split(r"\W", request.input)[0]
    return source.endswith(f".size()[{request.axis}]") and f"'{head}'" in source


def fixed_first(request: Request, requests: Sequence[Request], fixed: Places) -> Request:
    """Among the axes of one dim, the one whose size became a constant first."""
    if request.name is None:
        return request
    same = [other for other in requests if other.name == request.name]
    return next((own for source in fixed for own in same if _is_of(source, own)), request)


def sentence(request: Request) -> str:
    return f"I{str(request)[1:]}"


def relates_sizes(error: Exception) -> bool:
    """Whether a trace demands of its dims what torch can't show, and not that one is a constant.

    Or that two are equal. torch fails over some of it while it looks for an advice.
    """
    message = str(error)
    if not any(said in message for said in _DEMANDS):
        return False
    return not constants(message) and not any(map(_SAME.fullmatch, suggestions(message)))


def returns_unknown(message: str) -> bool:
    """Whether torch may refuse an output of a class that it can't take apart."""
    return bool(_UNKNOWN_OUTPUT.search(message) or _NO_META.search(message))


def explained(
    error: Exception,
    module: torch.nn.Module,
    requests: tuple[Request, ...],
    fixed: Places,
    run: Callable[[], Exception | None],
) -> CaptureError:
    """`run` gives what the model raises without a trace, on the same inputs."""
    if why := hindrance(module):
        return CaptureError(why)
    by_name = {request.name: request for request in requests if request.name}
    for name in constants(str(error)):
        if name in by_name:
            return specialised(fixed_first(by_name[name], requests, fixed), fixed)
    for line in suggestions(str(error)):
        if (match := _SAME.fullmatch(line)) and {match[1], match[2]} <= by_name.keys():
            first, second = by_name[match[2]], by_name[match[1]]
            return CaptureError(
                f"The model needs {first} and {second} to be equal; give both the same Dim."
            )
        if (match := _DERIVED.fullmatch(line)) and match[1] in by_name:
            return Specialised(
                f"{sentence(by_name[match[1]])} can't take every size: the model needs "
                f"{match[1]} = {match[2]}; derive it from another Dim in that way, or leave it "
                "static.",
                tuple(r for r in requests if r.name == match[1]),
                multiple=True,
            )
    if _NO_RULE in str(error):
        dims = sorted({f"{name!r} of {each.size}" for name, each in by_name.items()})
        return CaptureError(
            f"The model's code does something else at other sizes than at the sample's (dim "
            f"{', '.join(dims)}), and torch.export finds no rule for those that it takes. Give a "
            "sample of a typical size, such as of two blocks and a part if it works in blocks, or "
            "ask for the sizes that the model takes (Dim.AUTO, name=auto)."
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
    if match := _UNKNOWN_INPUT.search(str(error)):
        name = match[1].rpartition(".")[2]
        return CaptureError(
            f"An input of {type(module).__name__} is or holds a {name}, in which torch.export "
            "finds no tensors: give those as inputs, and make the object of them in its forward."
        )
    own = run()
    if isinstance(own, LoadError):  # of what its folder put behind the model
        raise own
    place = user_frame(traceback.walk_tb(deepest(own or error).__traceback__))
    where = f" at {quote(*place)}" if place else ""
    if own is not None:
        said = f"{type(module).__name__} itself fails on its sample inputs{where}: {reason(own)}"
        return SampleError(said if said.endswith((".", "…")) else f"{said}.")
    text = (
        _nested(error)
        or _read_by_numpy(error)
        or _keyed(error)
        or _differentiated(str(deepest(error)))
        or _endless(str(deepest(error)), place)
        or _data_dependent(str(deepest(error)))
        or reason(error) + _numpy(error)
    )
    if raises_itself(error):
        text += (
            ". In a trace the model raises this, and not in a run: tensors are FakeTensor there, "
            "and sizes SymInt. Ask isinstance(x, torch.Tensor) in the place of type(x)."
        )
    if place is not None and _is_installed(place[0]) and chooses(error):
        text += " A subclass whose method computes it so compiles from a --factory that makes it."
    return CaptureError(f"torch.export can't trace {type(module).__name__}{where}: {text}")


def chooses(error: Exception) -> bool:
    """Whether Python decides by the values of a tensor, not by a size or a number made of them."""
    message = str(deepest(error))
    return depends_on_data(message) and "specialized integer" not in message


def raises_itself(error: BaseException) -> bool:
    """Whether a `raise` of the model's own ended the trace."""
    frames = [*traceback.walk_tb(deepest(error).__traceback__)]
    if not frames or is_plumbing(file := frames[-1][0].f_code.co_filename):
        return False
    return _RAISE.search(linecache.getline(file, frames[-1][1])) is not None


def _is_installed(file: str) -> bool:
    """Whether a file is a package's, which nobody changes in its place."""
    return bool({"site-packages", "dist-packages"} & set(Path(file).parts))


def _nested(error: Exception) -> str:
    """What helps where a nested tensor is made of parts of sizes that only a run knows."""
    frames = traceback.walk_tb(deepest(error).__traceback__)
    if not any(frame.f_code.co_filename.startswith(_NESTED) for frame, _ in frames):
        return ""
    return (
        "the rows of a nested tensor have lengths that are known at run time only, and a graph "
        "holds no such tensor. Compute on padded rows there, with a mask of what they hold: "
        "torch.arange(n) < lengths[:, None]."
    )


def _keyed(error: BaseException) -> str:
    """What helps where a key is made of a tensor's value, as `f"expert_{index}"`."""
    own = deepest(error)
    if not (isinstance(own, KeyError) and "FakeTensor(" in str(own)):
        return ""
    return (
        "a key is made of a tensor's value there, which a trace doesn't have: look up by numbers "
        "of Python, such as those of range()"
    )


def _differentiated(message: str) -> str:
    """What helps where the model takes gradients of a function as it runs."""
    if "fake tensor in the exported program constant's list" not in message:
        return ""
    return (
        "a tensor that the model makes as it runs was taken for one that it has, as where "
        "torch.autograd.grad is called in forward: write the derivative out in its place"
    )


def _read_by_numpy(error: Exception) -> str:
    """What helps where the model takes a tensor's values out of torch."""
    if ".numpy() is not supported" not in str(deepest(error)):
        return ""
    return (
        "numpy needs the values of a tensor there, which are known only when the model runs. "
        "Compute with torch there; where sizes are made of these values, make them int arguments."
    )


def _numpy(error: Exception) -> str:
    """What helps where numpy computes with a size, which is no number in a trace."""
    if "ufunc" not in str(deepest(error)):
        return ""
    return (
        ". numpy computes with numbers, not with sizes: take torch's functions there, such as "
        "torch.arange(size) and torch.sin, or leave the dims static"
    )


def _endless(message: str, place: tuple[str, int] | None) -> str:
    """What helps where a loop ends by a tensor's values, which a trace doesn't have."""
    if "data-dependent expression" not in message or place is None or goes_on_if(*place) is None:
        return ""
    return (
        "Python ends a loop by a data-dependent condition there: the values of a tensor, known "
        "only at run time. Run as many steps as there may be, for _ in range(steps), and in each "
        "one keep what is done: state = torch.where(running, new, state)."
    )


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
    if names and _BY_TORCH.search(message):
        return (
            "a size is made of a number that is in a tensor there, as torch.div of sizes makes "
            "one. Compute sizes with Python's integers, as in n // 2."
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
    which = sentence(named) if named else f"Dim {match[1]!r}"
    return CaptureError(
        f"{which} can't take every size: the trace relies on {condition}, which can't be shown to "
        "hold in its whole range. Leave the dim static, or write the slice or view behind the "
        "condition with sizes taken from the tensors' shapes."
    )


def deepest(error: BaseException) -> BaseException:
    """The first cause that a line of Python raised."""
    while error.__cause__ is not None and error.__cause__.__traceback__ is not None:
        error = error.__cause__
    return error


def reason(error: BaseException) -> str:
    """The first sentence or two of torch's message, on one line."""
    text = str(error).strip() or type(error).__name__
    text = re.split(r"\n\s*\n|\n(?:For more information|From user code|Exception raised)", text)[0]
    text = " ".join(text.split())
    if _OPEN_SIZES in text:
        return f"{text}: {_VMAP}"
    text += _TOO_MANY * bool(_TOP_K.search(text))
    return text if len(text) <= 300 else text[:299] + "…"
