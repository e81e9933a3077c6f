"""Runs calls of one op in onnxruntime and in PyTorch, and says where the results differ."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import onnxruntime
import torch

from attngraph import dialect
from attngraph.errors import AttngraphError
from attngraph.export.kernels import Choice
from attngraph.export.kernels.choice import version_of
from attngraph.export.lowering.lower import lower
from attngraph.export.runtime.session import Session
from attngraph.export.target import Target, parse_target
from attngraph.ir import Graph, interpret, parse
from attngraph.ir.types import dtype_name
from tests.kernels.values import without_denormals

assert dialect  # importing it registers the attn ops

MODES = ("computed", "constant", "mixed")
"""Operands are all inputs; all constants, which onnxruntime folds; or the first alone an input."""

Calls = Callable[[torch.dtype], Sequence["Call"]]
Where = Callable[[Sequence[torch.Tensor], torch.Tensor], torch.Tensor]
"""Of a call's operands and a result of it, the elements of the result that are meant."""


@dataclass(frozen=True)
class Call:
    """A node in the IR's text form on the operands %0, %1 …, with its number of results.

    Those after the first `compared` are not returned.
    """

    text: str
    operands: tuple[torch.Tensor, ...] = ()
    results: int = 1
    compared: int = 9
    modes: tuple[str, ...] = MODES


@dataclass(frozen=True)
class Case:
    """What an op is called with in each dtype.

    Floats may differ by `ulps` roundings of the result, or of `scale` where that is larger: what
    the steps to it round to. The sign of a zero counts where it is `signed`. Denormals count as
    zeros, as in a session, unless it is `strict`.

    `undefined` is where PyTorch promises nothing, `because` of what. A case with a `difference` is
    one that onnxruntime gets wrong, `until` a release of it, and the sentence says how: a case that
    it gets right fails. `choice` is the form of its attentions.
    """

    name: str
    calls: Calls
    dtypes: tuple[torch.dtype, ...]
    ulps: float = 0.0
    scale: float = 0.0
    signed: bool = False
    strict: bool = False
    undefined: Where | None = None
    because: str = ""
    difference: str = ""
    until: tuple[int, int] = (99, 0)
    choice: Choice | None = None


@dataclass(frozen=True)
class Found:
    """What became of the calls of a case in one dtype.

    `kind` is "same", "differs", "refused" (there is no file, or none that onnxruntime opens or
    runs: the user is told) or "none" (PyTorch has no such call). `elsewhere` are the ONNX operators
    that ran on another provider than the target's.
    """

    case: Case
    dtype: torch.dtype
    kind: str
    detail: str = ""
    elsewhere: tuple[str, ...] = ()

    @property
    def is_as_known(self) -> bool:
        is_wrong = self.case.difference and version_of(onnxruntime.__version__) < self.case.until
        return self.kind == "differs" if is_wrong else self.kind != "differs"

    def __str__(self) -> str:
        return f"{self.case.name} on {dtype_name(self.dtype)} {self.kind}: {self.detail}"


def observe(case: Case, dtype: torch.dtype, target: str = "cpu") -> Found:
    """Runs all calls in one session."""
    if target != "cpu" and case.choice is not None and case.choice.start:
        return Found(case, dtype, "none", "a form of the CPU alone")
    calls, why = [], ""
    for call in case.calls(dtype):
        try:
            interpret(*graph_of([(call, "computed")]))
            calls.append(call)
        except Exception as error:  # whatever torch raises for a dtype that it lacks
            why = f"{error}".partition("\n")[0]
    runs = [(call, mode) for call in calls for mode in call.modes if _is_another(call, mode)]
    if not runs:
        return Found(case, dtype, "none", why)
    try:
        wrong, elsewhere = _compared(case, runs, parse_target(target))
    except AttngraphError as error:
        return Found(case, dtype, "refused", f"{error}")
    if not wrong:
        return Found(case, dtype, "same", elsewhere=elsewhere)
    detail = f"{wrong[0]} ({len(wrong)} of {len(runs)} calls)"
    return Found(case, dtype, "differs", detail, elsewhere)


def emitted(case: Case) -> set[tuple[str, str]]:
    """The ONNX operators of a case's first calls, each with the dtype of its first input."""
    found: set[tuple[str, str]] = set()
    wanted = {torch.float32, torch.float16, torch.int64, torch.bool}.intersection(case.dtypes)
    for dtype in wanted or case.dtypes[:1]:
        call = case.calls(dtype)[0]
        try:
            graph, _ = graph_of([(call, call.modes[0])])
            found.update(_operators(_lowered(case, graph, parse_target("cpu")).graph))
        except Exception:
            continue  # not a call of torch, or refused
    return found


def graph_of(runs: Sequence[tuple[Call, str]]) -> tuple[Graph, list[torch.Tensor]]:
    """A graph of all calls, and its inputs."""
    lines: list[str] = []
    weights: dict[str, torch.Tensor] = {}
    feeds: list[torch.Tensor] = []
    outputs: list[str] = []
    for number, (call, mode) in enumerate(runs):
        text = call.text
        for place, operand in enumerate(call.operands):
            name = f"x{number}.{place}"
            text = text.replace(f"%{place}", f"%{name}")
            type = f"{dtype_name(operand.dtype)}[{', '.join(map(str, operand.shape))}]"
            if mode == "computed" or (mode == "mixed" and place == 0):
                lines.insert(len(feeds), f"input %{name} : {type}")
                feeds.append(operand)
            else:
                lines.insert(len(feeds), f"parameter %{name} : {type}")
                weights[name] = operand
        results = [f"r{number}.{at}" for at in range(call.results)]
        lines.append(f"{', '.join(f'%{name}' for name in results)} = {text}")
        outputs += results[: call.compared]
    returned = ", ".join(f'%{name} as "{name}"' for name in outputs)
    return parse("\n".join(["graph @kernels {", *lines, f"return {returned}", "}"]), weights), feeds


def _lowered(case: Case, graph: Graph, target: Target) -> ir.Model:
    if case.choice is None:
        return lower(graph, target=target)
    sites = [node for node in graph if node.op == "attn.attention"]
    return lower(graph, target=target, kernels=dict.fromkeys(sites, case.choice))


def _is_another(call: Call, mode: str) -> bool:
    """Whether the mode makes a difference to the call."""
    return mode == "computed" or len(call.operands) > (1 if mode == "mixed" else 0)


def _compared(
    case: Case, runs: Sequence[tuple[Call, str]], target: Target
) -> tuple[list[str], tuple[str, ...]]:
    """The calls with a wrong result, each with examples; the operators that ran elsewhere."""
    graph, feeds = graph_of(runs)
    named = dict(zip((value.name for value in graph.inputs), feeds, strict=True))
    content = ir.to_proto(_lowered(case, graph, target)).SerializeToString()
    with Session.open(content, target, threads=1) as session:
        actual = iter(session.run([named[name] for name in session.input_names]))
        placed = session.placement
    references = [iter(interpret(graph, feeds))]
    if not case.strict:
        constants = {name: without_denormals(v.data) for name, v in graph.constants.items()}
        flushed = list(map(without_denormals, feeds))
        references.append(iter(interpret(graph, flushed, constants=constants)))
    told: dict[str, str] = {}
    for call, mode in runs:
        for _ in range(min(call.results, call.compared)):
            found = next(actual)
            expected = [torch.as_tensor(next(reference)) for reference in references]
            wrong = _wrong(found, expected, case)
            if case.undefined is not None and wrong.ndim == expected[0].ndim:
                wrong = wrong & ~case.undefined(call.operands, expected[0])
            if wrong.any():
                told[f"{mode} {call.text}"] = _examples(wrong, found, expected[0])
    others = {
        op for where, ops in placed.items() if where != target.execution_provider for op in ops
    }
    return [f"{what}: {examples}" for what, examples in told.items()], tuple(sorted(others))


def _operators(graph: ir.Graph) -> Iterator[tuple[str, str]]:
    for node in graph.all_nodes():
        first = next((value for value in node.inputs if value is not None), None)
        dtype = None if first is None else first.dtype
        yield node.op_type, "" if dtype is None else dtype.name


def _wrong(found: torch.Tensor, expected: Sequence[torch.Tensor], case: Case) -> torch.Tensor:
    """The elements that are none of the expected ones."""
    if found.dtype != expected[0].dtype or found.shape != expected[0].shape:
        return torch.ones((), dtype=torch.bool)
    right = torch.zeros_like(found, dtype=torch.bool)
    for one in expected:
        right |= _same(found, one, case)
    return ~right


def _same(found: torch.Tensor, expected: torch.Tensor, case: Case) -> torch.Tensor:
    equal = found == expected
    if not expected.dtype.is_floating_point:
        return equal
    limits, wide = torch.finfo(expected.dtype), expected.double()
    allowed = case.ulps * limits.eps * wide.abs().clamp(min=case.scale)
    if expected.dtype != torch.float16 and not case.strict:
        allowed = allowed + limits.smallest_normal  # what is denormal may be zero
    near = equal | ((found.double() - wide).abs() <= allowed)
    if case.signed:
        near = near & (found.signbit() == expected.signbit())
    return near | (found.isnan() & expected.isnan())


def _examples(wrong: torch.Tensor, found: torch.Tensor, expected: torch.Tensor) -> str:
    if wrong.shape != expected.shape:
        types = [f"{dtype_name(t.dtype)}{list(t.shape)}" for t in (found, expected)]
        return f"{types[0]} instead of {types[1]}"
    pairs = [
        f"{found[place].item()!r} instead of {expected[place].item()!r}"
        for place in itertools.islice(map(tuple, wrong.nonzero().tolist()), 3)
    ]
    return f"{int(wrong.sum())} of {wrong.numel()} elements: {', '.join(pairs)}"


# torch logs a traceback for each call that it rejects, which is how it is asked
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
