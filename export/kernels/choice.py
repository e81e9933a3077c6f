"""The form of each attention site: the fastest legal one, the runner-up, and why not that one."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import onnxruntime

from attngraph.errors import ProviderError
from attngraph.export.kernels import crossovers as lengths
from attngraph.export.kernels.facts import ATTENTION, PACKED, PACKED_ATTENTION, Facts, facts_of
from attngraph.export.kernels.needs import NEEDS
from attngraph.export.kernels.table import (
    FORMS,
    KERNELS,
    LEGAL,
    PRIMITIVE,
    RELEASES,
    Form,
    Kernel,
    Legal,
)
from attngraph.export.target import Provider, Target
from attngraph.ir import Graph, Node


@dataclass(frozen=True)
class Candidate:
    """A form at a site: legal, or `refused` with the reason; `kernel` is what it runs on."""

    form: Form
    refused: str = ""
    kernel: str = ""
    rank: int = 0


@dataclass(frozen=True)
class Choice:
    """The form chosen for a site. `form` serves `start` queries and more, `below` fewer."""

    form: Form
    kernel: str
    start: int = 0
    below: Form | None = None
    below_kernel: str = ""
    runner_up: Form | None = None
    why_not: str = ""
    tuned: bool = False

    def to_dict(self) -> dict[str, object]:
        """Plain strings and numbers."""
        below = (
            {"form": self.below.name, "op": self.below.op, "kernel": self.below_kernel}
            if self.below
            else None
        )
        return {
            "form": self.form.name,
            "op": self.form.op,
            "kernel": self.kernel,
            "from_queries": self.start,
            "below": below,
            "runner_up": None if self.runner_up is None else self.runner_up.name,
            "why_not": self.why_not,
            "tuned": self.tuned,
        }

    @property
    def chosen(self) -> str:
        """The form and its kernel, in words."""
        text = _on(self.form, self.kernel)
        if self.below is not None:
            text += f" from {self.start} queries on, below {_on(self.below, self.below_kernel)}"
        return text

    def __str__(self) -> str:
        if self.runner_up is None:
            return self.chosen
        return f"{self.chosen}; rather than {self.runner_up.name}: {self.why_not}"


def _on(form: Form, kernel: str) -> str:
    """A kernel that is named as its operator is not named again."""
    return f"{form.name} on " + ("the CPU" if kernel == f"CPU {form.op.split('.')[-1]}" else kernel)


def version_of(text: str) -> tuple[int, int]:
    """(1, 31) of "1.31.1" or of a development build of it."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def is_known(text: str, provider: Provider = "cpu") -> bool:
    """Whether the kernel table covers an onnxruntime, so that a model can be compiled for it."""
    return version_of(text) in RELEASES[provider]


def check_version(text: str | None = None, provider: Provider = "cpu") -> None:
    """Raises ProviderError for an onnxruntime that the kernel table knows nothing about."""
    text = text or onnxruntime.__version__
    if is_known(text, provider):
        return
    known = RELEASES[provider]
    on, name = ("", "onnxruntime") if provider == "cpu" else (" on CUDA", "onnxruntime-gpu")
    raise ProviderError(
        f"The kernel table has no row for onnxruntime {text}{on}: it knows {known}. Install one of "
        f'them, for example with pip install "{name}=={known.newest}".'
    )


def choose(facts: Facts, target: Target, version: str | None = None) -> Choice:
    """The form for a site on a target, by the kernel table.

    Raises ProviderError where the table has no row for that onnxruntime.
    """
    version = version or onnxruntime.__version__
    check_version(version, target.provider)
    return _choose(facts, target, version_of(version))


@functools.lru_cache(maxsize=4096)
def _choose(facts: Facts, target: Target, version: tuple[int, int]) -> Choice:
    found = candidates(facts, target, version)
    ranked = sorted((c for c in found if not c.refused), key=lambda c: c.rank)
    times = lengths.measured(facts, target.family) if target.provider == "cpu" else {}
    return pick(ranked, [c for c in found if c.refused], times, facts)


def choose_all(graph: Graph, target: Target, *, static: bool = False) -> dict[Node, Choice]:
    """The choice for each attention of a graph; `static` as in `facts_of`."""
    sites = (node for node in graph if node.op in (ATTENTION, PACKED_ATTENTION))
    return {node: choose(facts_of(node, graph.dims, static=static), target) for node in sites}


def pick(
    ranked: list[Candidate],
    refused: list[Candidate],
    times: lengths.Times,
    facts: Facts,
    *,
    tuned: bool = False,
) -> Choice:
    """Among candidates of the best rank, the one that the times favour; else the first."""
    best = [c for c in ranked if c.rank == ranked[0].rank]
    timed = {c.form.name: times[c.form.name] for c in best if c.form.name in times}
    found = lengths.split(timed, facts.queries)
    by_name = {candidate.form.name: candidate for candidate in ranked}
    first = by_name[found.long] if found else ranked[0]
    choice = Choice(first.form, first.kernel, tuned=tuned)
    if found and found.short:
        below = by_name[found.short]
        choice = replace(choice, start=found.start, below=below.form, below_kernel=below.kernel)
    choice = _without_empty_blocks(choice, ranked, facts)
    return _with_runner_up(choice, ranked, refused, timed, first, facts.queries)


def _without_empty_blocks(choice: Choice, ranked: list[Candidate], facts: Facts) -> Choice:
    """n blocks of a dynamic length need n² queries, so fewer get a form that cuts nothing."""
    low, high = facts.queries
    if low == high:
        return choice
    whole = next(c for c in ranked if c.form.blocks < 2)
    below, kernel = choice.below, choice.below_kernel
    if below is not None and _needed(below) > low:
        below, kernel = whole.form, whole.kernel
    start = choice.start
    if max(low, start) < _needed(choice.form):
        start = _needed(choice.form)
        below, kernel = (below, kernel) if below is not None else (whole.form, whole.kernel)
    return replace(choice, start=start, below=below, below_kernel=kernel)


def _needed(form: Form) -> int:
    return form.blocks**2 if form.blocks > 1 else 0


def _with_runner_up(
    choice: Choice,
    ranked: list[Candidate],
    refused: list[Candidate],
    timed: lengths.Times,
    first: Candidate,
    queries: tuple[int, int | None],
) -> Choice:
    others = [c for c in ranked if c.form not in (choice.form, choice.below)]
    fused = [c for c in others if c.form != PRIMITIVE]
    if not fused and refused:
        other = max(refused, key=lambda c: c.form.op != choice.form.op)
        return replace(choice, runner_up=other.form, why_not=other.refused)
    if not others:
        return choice
    same = [c for c in others if c.rank == first.rank and c.form.name in timed]
    if not same or choice.form.name not in timed:
        other = others[0]
        why = f"{other.kernel} ranks below {first.kernel}"
        if other.kernel == first.kernel and (left := first.form.inside - other.form.inside):
            why = f"{' and '.join(sorted(left))} would be operators of their own"
        elif other.kernel == first.kernel:
            why = "it runs on the same kernel, and writes keys and values out besides"
        if other.rank == first.rank:
            why = "it ranks the same, and which is faster here was not measured"
        return replace(choice, runner_up=other.form, why_not=why)
    mine = timed[choice.form.name]
    known = [n for n in lengths.within(sorted(mine), queries) if n >= choice.start]
    if not known:
        return replace(choice, runner_up=same[0].form, why_not="it was not measured here")
    length = known[0] if choice.start else known[-1]
    timed_there = [c for c in same if length in timed[c.form.name]]
    if not timed_there:
        return replace(choice, runner_up=same[0].form, why_not="it was not measured here")
    other = min(timed_there, key=lambda c: timed[c.form.name][length])
    theirs, ours = timed[other.form.name][length], mine[length]
    at = "1 query" if length == 1 else f"{length} queries"
    why = f"it took {theirs:.3g} ms at {at}, as measured, and this {ours:.3g}"
    if f"{theirs:.3g}" == f"{ours:.3g}":
        why = f"it is no faster: either took {ours:.3g} ms at {at}, as measured"
    elif theirs < ours:
        why += ", which is too little to gain"
    return replace(choice, runner_up=other.form, why_not=why)


def candidates(facts: Facts, target: Target, version: tuple[int, int]) -> list[Candidate]:
    """Every form of the table at a site, in the order of the table."""
    found = []
    for form in FORMS:
        rows = [r for r in LEGAL if form in r.forms and r.provider == target.provider]
        if PACKED in facts.features and not any(PACKED in row.takes for row in rows):
            continue  # a form that leaves no row out is no runner-up either
        rows = [r for r in rows if version in RELEASES[r.provider]]
        absent = target.refuses(form.op, form.since)
        # a form that is pointless here is no runner-up
        refusals = [
            absent or _refusal(row, facts, target) for row in rows if row.must <= facts.traits
        ]
        if all(refusals):
            if refusals:
                found.append(Candidate(form, refusals[-1]))
            continue
        found.append(Candidate(form, "", *_expected(form, facts, target, version)))
    return found


def _refusal(row: Legal, facts: Facts, target: Target) -> str:
    if facts.dtype not in row.dtypes:
        return f"it has no kernel for {str(facts.dtype).removeprefix('torch.')}"
    if extra := facts.features - row.takes:
        return f"it takes no {' and no '.join(sorted(extra))}"
    for need in row.needs:
        answer = NEEDS[need](facts)
        if not answer:
            told = f"it runs only where {need}"
            return told if answer is False else f"{told}, which is not proved"
    if row.sm and (target.sm is None or target.sm < row.sm):
        return f"{target} is not known to have SM ≥ {row.sm}"
    return ""


def _expected(
    form: Form, facts: Facts, target: Target, version: tuple[int, int]
) -> tuple[str, int]:
    """The kernels a form may run on, in words, and the rank of the worst of them."""
    names: list[str] = []
    rank = 0
    for row in KERNELS:
        if (
            form not in row.forms
            or row.provider != target.provider
            or version not in RELEASES[row.provider]
        ):
            continue
        if facts.dtype not in row.dtypes:
            continue
        open_questions = _open(row, facts, target)
        if open_questions is None:
            continue
        rank = max(rank, row.rank)
        if not open_questions:
            return ", else ".join([*names, row.name]), rank
        names.append(f"{row.name} where {' and '.join(open_questions)}")
    return ", else ".join([*names, "the CPU"]), 100


def _open(row: Kernel, facts: Facts, target: Target) -> list[str] | None:
    """The needs of a row that only a run can tell; None where one of them fails."""
    answers: Iterable[tuple[str, bool | None]] = (
        *((need, NEEDS[need](facts)) for need in row.needs),
        *(
            [(f"SM ≥ {row.sm}", None if target.sm is None else target.sm >= row.sm)]
            if row.sm
            else []
        ),
    )
    found = []
    for need, answer in answers:
        if answer is False:
            return None
        if answer is None:
            found.append(need)
    return found
