"""What an optimisation did: sites, sizes, parity, timings. `to_dict` is the JSON of `--json`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from attngraph.errors import counted
from attngraph.export.formats import Precision
from attngraph.export.kernels import Choice
from attngraph.export.parity.budget import Parity
from attngraph.export.precision.quantize import Quantised
from attngraph.ir import Node, Remark
from attngraph.passes.rewriting.manager import PassResult
from attngraph.passes.rewriting.outcomes import Tally
from attngraph.reports.coverage import Coverage


@dataclass(frozen=True)
class Site:
    """One attention: `status` is "fused" or "declined"; docs/remarks.md explains `code`. A softmax
    with values that is named, but is no attention, has the status "named".

    `op` is what it became, or the op that stayed; `location` is "file:line", `module` the path of
    the module that ran it; `mask` says what its masks became, `cache` how keys and values are
    joined to a past, `merged` which attention of more heads it is now a part of; `kernel` is the
    ONNX form of a fused site and what it is expected to run on.
    """

    status: str
    op: str
    code: str
    reason: str
    location: str
    module: str
    hint: str = ""
    blamed: str = ""
    mask: str = ""
    cache: str = ""
    merged: str = ""
    kernel: Choice | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain strings and dicts."""
        return {**asdict(self), "kernel": None if self.kernel is None else self.kernel.to_dict()}

    def __str__(self) -> str:
        """One line, `file:line: module: …`."""
        verdict = f"fused into {self.op}: " if self.status == "fused" else f"{self.status} "
        code = f"[{self.code}] " if self.status != "fused" else ""
        mask = f"; mask: {self.mask.rstrip('.')}" if self.mask else ""
        merged = f"; merged: {self.merged.rstrip('.')}" if self.merged else ""
        kernel = f"; kernel: {self.kernel}" if self.kernel else ""
        hint = f" Hint: {self.hint}" if self.hint else ""
        told = f"{verdict}{code}{self.reason}{mask}{merged}{kernel}{hint}"
        return f"{self.location or 'unknown place'}: {self.module or 'the model'}: {told}"


@dataclass(frozen=True)
class Reassociation:
    """One rewrite that changes roundings: the pass that made it, what it did, and where."""

    made_by: str
    what: str
    location: str
    module: str


@dataclass
class Report:
    """The results of one compile. `parity` and `coverage` are None where verification was off;
    `kept` are the groups of nodes that stay in float32 for the sake of the error budget.
    `operators` says which ones alone the file may hold, "" where there is no such wish,
    `timed_on` on which family of CPUs the times were measured that chose forms.
    `weight_bytes` counts what the file holds, `weight_bytes_before` what the graph held in the
    model's own precision. `dims` are the least and the largest size that each dim was compiled for,
    None for no limit, and `relations` what the sizes have beside that, such as "past + seq ≤ 12",
    without those that others imply.
    With `quantised` weights `parity` is that of the kernels, against the stored weights in float64.
    """

    source: str
    target: str
    precision: Precision
    operators: str = ""
    timed_on: str = ""
    sites: list[Site] = field(default_factory=list)
    reassociated: list[Reassociation] = field(default_factory=list)
    parity: Parity | None = None
    coverage: Coverage | None = None
    timings: dict[str, float] = field(default_factory=dict)
    passes: list[PassResult] = field(default_factory=list)
    nodes_before: int = 0
    nodes_after: int = 0
    dims: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    relations: list[str] = field(default_factory=list)
    weights: int = 0
    weight_bytes: int = 0
    weight_bytes_before: int = 0
    kept: list[dict[str, Any]] = field(default_factory=list)
    quantised: Quantised | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def fused(self) -> int:
        """The number of fused sites."""
        return sum(site.status == "fused" for site in self.sites)

    @property
    def rewrites(self) -> Tally:
        """How many rewrites all passes made, by proof and by evaluation, and how many they left
        out because the two forms were different or could not be evaluated.
        """
        total = Tally()
        for result in self.passes:
            total.add(result.tally)
        return total

    @property
    def declined(self) -> int:
        """The number of sites left as they were, each with a reason."""
        return sum(site.status == "declined" for site in self.sites)

    def __str__(self) -> str:
        """Some lines: the sizes, each site, parity and the notes."""
        what = f"{self.source} for {self.target} in {self.precision}"
        nodes = f"{self.nodes_before} → {self.nodes_after} nodes"
        parity = "not checked" if self.parity is None else str(self.parity)
        if self.coverage is not None:
            parity += f"; {self.coverage}"
        return "\n".join((f"{what}: {nodes}", *map(str, self.sites), parity, *self.notes))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts."""
        return {
            "source": self.source,
            "target": self.target,
            "precision": self.precision,
            "operators": self.operators,
            "timed_on": self.timed_on,
            "dims": {name: list(bounds) for name, bounds in self.dims.items()},
            "relations": self.relations,
            "nodes": {"before": self.nodes_before, "after": self.nodes_after},
            "weights": {
                "tensors": self.weights,
                "bytes": self.weight_bytes,
                "bytes_before": self.weight_bytes_before,
            },
            "kept_in_fp32": self.kept,
            "quantised": None if self.quantised is None else asdict(self.quantised),
            "attention": {"fused": self.fused, "declined": self.declined},
            "sites": [site.to_dict() for site in self.sites],
            "rewrites": self.rewrites.to_dict(),
            "reassociated": [asdict(rewrite) for rewrite in self.reassociated],
            "parity": None if self.parity is None else self.parity.to_dict(),
            "coverage": None if self.coverage is None else self.coverage.to_dict(),
            "timings": self.timings,
            "passes": [
                {
                    "name": result.name,
                    "seconds": result.seconds,
                    "nodes_before": result.nodes_before,
                    "nodes_after": result.nodes_after,
                    "changed": result.changed,
                    "rewrites": result.tally.to_dict(),
                }
                for result in self.passes
            ],
            "notes": self.notes,
        }


_OF_EXPERTS = ("experts", "experts-kept")


def sites_of(results: Sequence[PassResult], kernels: Mapping[Node, Choice]) -> list[Site]:
    """One entry per attention, in the order of the graph, with its mask's and its own new form.

    An attention that a later pass has rewritten is found by its source line and module. The softmax
    of a router, which what is said of its experts names, is no distribution beside it.
    """
    remarks = [remark for result in results for remark in result.remarks]
    notes: dict[tuple[str, str], str] = {(r.code, r.node): r.reason for r in remarks}
    by_name = {node.outputs[0].name: choice for node, choice in kernels.items()}
    by_place = {
        (loc.file, loc.line, loc.module): choice
        for node, choice in kernels.items()
        for loc in (node.loc, *node.loc.fused)
    }
    routers = {(each.op, each.loc) for each in remarks if each.code in _OF_EXPERTS}
    sites = []
    for remark in remarks:
        if remark.status not in ("fused", "declined", "named"):
            continue
        if remark.code == "distribution" and (remark.op, remark.loc) in routers:
            continue
        loc, choice, node = remark.loc, None, remark.node
        said = dict.fromkeys(("mask", "cache", "merged"), "")
        for node in _names(remark.node, results):
            said = {code: notes.get((code, node), known) for code, known in said.items()}
        if remark.status == "fused":
            choice = by_name.get(node) or by_place.get((loc.file, loc.line, loc.module))
        sites.append(_site(remark, said, choice))
    return sites


def _names(node: str, results: Iterable[PassResult]) -> Iterator[str]:
    """What an attention is called after each pass that replaced it, some of them in two steps.

    A later pass may use a name again that an earlier one has freed.
    """
    yield node
    for result in results:
        left = dict(result.findings.became)
        while (new := left.pop(node, None)) is not None:
            yield (node := new)


def assumptions_of(results: Iterable[PassResult], assume: Iterable[str]) -> list[str]:
    """A sentence on each assumption: at how many attentions a rewrite relies on it."""
    used = Counter(name for result in results for name in result.findings.assumed)
    notes = []
    for name in dict.fromkeys(assume):
        said = f"Assumed {name}, without proof, at {counted(used[name], 'attention')}."
        notes.append(said if used[name] else f"No rewrite relies on the assumption {name}.")
    return notes


def reassociations_of(results: Iterable[PassResult]) -> list[Reassociation]:
    """The rewrites that `--exact` would have left out, in the order they were made."""
    return [
        Reassociation(result.name, remark.reason, remark.loc.place, remark.loc.module)
        for result in results
        for remark in result.remarks
        if remark.code == "reassociated"
    ]


def defects_of(results: Iterable[PassResult]) -> list[str]:
    """A sentence on each rewrite that was taken back because it was not equal."""
    notes = _notes(results, "unequal")
    return [f"{remark.blamed}: {remark.reason} {remark.hint}" for remark in notes]


def hidden_rows_of(results: Iterable[PassResult]) -> list[str]:
    """A sentence on each softmax that stays spelled out for the sake of fully masked rows."""
    return _placed(_notes(results, "hidden-rows"))


def loops_of(results: Iterable[PassResult]) -> list[str]:
    """A sentence on each loop over time that stays one, or unrolled."""
    results = list(results)
    return _placed([*_notes(results, "unrolled"), *_notes(results, "recurrence-kept")])


def fills_of(results: Iterable[PassResult]) -> list[str]:
    """A sentence on each line that fills scores with a number that some might reach."""
    results = list(results)
    notes = [*_notes(results, "weak-fill"), *_notes(results, "tied-choice")]
    return list(dict.fromkeys(_placed(notes)))


def _placed(remarks: Iterable[Remark]) -> list[str]:
    return [
        f"{remark.loc.place or 'unknown place'}: {remark.reason} {remark.hint}"
        for remark in remarks
    ]


def _notes(results: Iterable[PassResult], code: str) -> list[Remark]:
    return [
        remark
        for result in results
        for remark in result.remarks
        if remark.status == "note" and remark.code == code
    ]


def _site(remark: Remark, notes: dict[str, str], kernel: Choice | None) -> Site:
    return Site(
        remark.status,
        remark.op,
        remark.code,
        remark.reason,
        remark.loc.place,
        remark.loc.module,
        remark.hint,
        remark.blamed,
        **notes,
        kernel=kernel,
    )
