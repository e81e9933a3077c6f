"""Runs passes over a graph. A pass is a frozen dataclass whose fields are its options."""

from __future__ import annotations

import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Protocol, cast, dataclass_transform

from attngraph.errors import UsageError
from attngraph.ir import Graph, Remark, clone
from attngraph.passes.rewriting.findings import Findings, recorded
from attngraph.passes.rewriting.outcomes import Tally


class Pass(Protocol):
    """`run` changes the graph in place and returns what there is to say about it.

    `exact`: every element is still computed by the model's own formula, from the model's own
    numbers; docs/architecture.md draws the line. Where a pass has rewrites of both kinds it says
    False and has an option `exact_only`. A pass that says `bitwise` too keeps every bit.
    """

    name: ClassVar[str]
    exact: ClassVar[bool]

    def run(self, graph: Graph) -> list[Remark]: ...


@dataclass
class PassResult:
    """What one pass did: seconds, nodes before and after, whether it changed anything, what there
    is to say of it, and what it found that later stages compute with.
    """

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int
    changed: bool
    remarks: list[Remark] = field(default_factory=list)
    findings: Findings = field(default_factory=Findings)

    @property
    def tally(self) -> Tally:
        """How many of its rewrites were proved, evaluated and left out."""
        return self.findings.tally


Hook = Callable[[Graph, PassResult], None]

OBSERVERS: list[Hook] = []
"""Called between passes in every run of this process, those over loop bodies included."""

_PASSES: dict[str, Callable[[], Pass]] = {}


@dataclass_transform(frozen_default=True)
class GraphPass(ABC):
    """The base of every pass here: a subclass is a frozen dataclass, and known under its name."""

    name: ClassVar[str]
    exact: ClassVar[bool]
    bitwise: ClassVar[bool]

    def __init_subclass__(cls, *, name: str, exact: bool, bitwise: bool = False) -> None:
        cls.name, cls.exact, cls.bitwise = name, exact, bitwise
        _PASSES[name] = dataclass(frozen=True)(cls)

    @abstractmethod
    def run(self, graph: Graph) -> list[Remark]: ...


def registered() -> dict[str, Callable[[], Pass]]:
    """Every known pass by name, in the order of their files."""
    return dict(_PASSES)


def make(pipeline: str | Iterable[str]) -> list[Pass]:
    """Passes from `"canonicalize,fuse-attention"`. Raises UsageError listing the known names."""
    names = pipeline.split(",") if isinstance(pipeline, str) else list(pipeline)
    passes = []
    for name in (name.strip() for name in names if name.strip()):
        if name not in _PASSES:
            raise UsageError(f"There is no pass {name!r}; there are {', '.join(sorted(_PASSES))}.")
        passes.append(_PASSES[name]())
    return passes


def _has_both(item: Pass) -> bool:
    return any(option.name == "exact_only" for option in fields(cast(Any, item)))


def label_of(item: Pass) -> str:
    """`exact`, `reassociating`, or `exact and reassociating` for a pass with rewrites of both."""
    if type(item).exact:
        return "exact"
    return "exact and reassociating" if _has_both(item) else "reassociating"


def purpose_of(item: Pass) -> str:
    """What a pass does: the first paragraph of its file, behind the pass's name."""
    text = inspect.getdoc(inspect.getmodule(type(item))) or ""
    return " ".join(text.split("\n\n")[0].split()).partition(": ")[2]


def only_exact(names: Iterable[str]) -> list[Pass]:
    """The exact passes among these; one that has rewrites of both kinds makes the exact ones."""
    kept = []
    for item in make(names):
        if type(item).exact:
            kept.append(item)
        elif _has_both(item):
            kept.append(replace(cast(Any, item), exact_only=True))
    return kept


def run(
    graph: Graph, pipeline: str | Sequence[Pass], *, after_each: Hook | None = None
) -> list[PassResult]:
    """Runs the passes in order; `after_each` sees the graph between passes.

    A pass that stops, whatever stops it, is left out, and a remark tells of its defect.
    """
    passes = make(pipeline) if isinstance(pipeline, str) else pipeline
    graph.settle_sizes()
    origin = clone(graph)
    results: list[PassResult] = []
    done: list[Pass] = []
    for item in passes:
        epoch, before, start = graph.epoch, len(graph), time.perf_counter()
        try:
            with recorded(graph) as found:
                remarks = item.run(graph)
            done.append(item)
        except Exception as error:  # a defect, and no reason to give the user nothing
            remarks, found = [_stopped(item, error)], Findings()
            graph.become(clone(origin))
            for earlier in done:
                earlier.run(graph)
        seconds = time.perf_counter() - start
        changed = graph.epoch != epoch
        result = PassResult(item.name, seconds, before, len(graph), changed, remarks, found)
        results.append(result)
        for observer in OBSERVERS if after_each is None else [*OBSERVERS, after_each]:
            observer(graph, result)
    for value in origin.constants.values():  # nodes and graphs are cycles, which stay for a while
        value.data = None
    return results


def _stopped(item: Pass, error: Exception) -> Remark:
    said = " ".join(str(error).split()) or type(error).__name__
    return Remark(
        "note",
        "unequal",
        f"{item.name} stopped, so what it made was taken back: {said[:300].rstrip('.')}.",
        hint=f"This is a defect of {item.name}: please report it with the model.",
        blamed=item.name,
    )
