"""One architecture compiled and checked, as a record of plain data."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from pathlib import Path
from typing import Any

import onnx_ir
import torch

from attngraph.compiling.compiler import Model, analyse, optimize
from attngraph.errors import CaptureError, ParityError
from attngraph.frontend.tracing.trace_errors import reason
from attngraph.ir import Graph, Node
from attngraph.ir.ops import attribute
from attngraph.ir.traits import CAUSAL_CONVOLUTION, CONVOLUTION
from attngraph.optimized import Optimized
from attngraph.reports.report import Report, Site
from tests.corpus.architectures import build
from tests.corpus.rows import parse_row

Record = dict[str, Any]
"""Keys: model, attention, outcome, stage, error, fused, declined, sites, kinds, silent, unequal,
parity, nodes, timings, sha256.

`outcome` is "right", "wrong" (ran, out of its error budget), "failed" (at `stage`, with `error`) or
"absent" (transformers has no such attention for the model, or none that works). `declined` counts
codes, and `sites` says where and why those are. `kinds` counts what else became one operator, as
`KINDS` names it, and what of that kind is left. `silent` are the softmaxes that are left in the
graph and that no remark is about. `unequal` are the rewrites that were taken back because they were
wrong. `sha256` is of the ONNX file: a change that is to change no file shows it by leaving all of
them as they are.
"""


KINDS = (
    ("recurrences", "loops left"),
    ("short convolutions", "convolutions by channel left"),
    ("mixtures of experts", "mixtures left"),
)


def attempt(model: str, attention: str, **options: Any) -> Record:
    """Builds, compiles and verifies one model. Raises nothing that the model is to blame for.

    `options` are those of `optimize`.
    """
    torch.set_num_threads(1)
    record: Record = {"model": model, "attention": attention, "outcome": "right", "stage": "build"}
    begin = time.perf_counter()
    alone = parse_row(model).attention
    if alone not in (None, attention):
        return {**record, "outcome": "absent", "error": f"It works with {alone} alone."}
    try:
        built = build(model, attention)
    except Exception as error:
        absent = isinstance(error, ValueError) and "does not support" in str(error)
        outcome = "absent" if absent else "failed"
        return {**record, "outcome": outcome, "error": _sentence(error)}

    def at(stage: str) -> None:
        record["stage"] = stage

    def compiled() -> Optimized:
        dims = built.dynamic_shapes
        return optimize(built.module, built.args, dynamic_shapes=dims, progress=at, **options)

    try:
        try:
            optimized = compiled()
        except CaptureError as error:
            if "the model demands" not in str(error):
                raise
            built = built.of_any_size()
            optimized = compiled()
    except Exception as error:
        wrong = isinstance(error, ParityError)
        record |= {"outcome": "wrong" if wrong else "failed", "error": _sentence(error)}
        if record["stage"] in ("lower", "parity"):
            _, report = analyse(
                Model(built.module, None, built.args, {}, built.dynamic_shapes, model)
            )
            record |= _sites(report.sites) | {"unequal": _unequal(report)}
    else:
        report = optimized.report
        assert report.parity is not None
        worst = report.parity.worst
        record |= _sites(report.sites)
        record["unequal"] = _unequal(report)
        record["kinds"] = _kinds(optimized.graph, report.sites)
        record["silent"] = _silent(optimized.graph, report.sites)
        record["parity"] = {"error": worst.error, "budget": worst.budget}
        if optimized.target.provider != "cpu":
            record["placement"] = optimized.session.placement
        record["nodes"] = {"before": report.nodes_before, "after": report.nodes_after}
        record["sha256"] = _digest(optimized.model)
        record["timings"] = {stage: round(spent, 2) for stage, spent in report.timings.items()}
    return {**record, "seconds": round(time.perf_counter() - begin, 2)}


def _digest(model: onnx_ir.Model) -> str:
    proto = onnx_ir.to_proto(model)
    return hashlib.sha256(proto.SerializeToString(deterministic=True)).hexdigest()


def _sites(sites: list[Site]) -> Record:
    declined = [site for site in sites if site.status == "declined"]
    return {
        "fused": sum(site.status == "fused" for site in sites),
        "declined": dict(sorted(Counter(site.code for site in declined).items())),
        "sites": [
            {"code": site.code, "location": _short(site.location), "reason": site.reason}
            for site in declined
        ],
    }


def _kinds(graph: Graph, sites: list[Site]) -> dict[str, int]:
    codes = Counter(site.code for site in sites)
    loops = sum(node.op == "attn.scan" for node in graph)
    short = sum(node.op in CAUSAL_CONVOLUTION for node in graph)
    left = sum(node.op in CONVOLUTION and _is_by_channel(node) for node in graph)
    counts = codes["recurrence"], loops, short, left, codes["experts"], codes["experts-kept"]
    names = [name for pair in KINDS for name in pair]
    return {name: count for name, count in zip(names, counts, strict=True) if count}


def _is_by_channel(node: Node) -> bool:
    """Whether a convolution is of each channel over time."""
    x, groups = node.inputs[0], attribute(node, "groups")
    return x is not None and len(x.shape) == 3 and groups > 1 and groups == x.shape[1]


def _silent(graph: Graph, sites: list[Site]) -> list[str]:
    named = {(site.location, site.module) for site in sites}
    left = [node.loc for node in graph if "softmax" in node.op]
    places = [(f"{loc.file}:{loc.line}", loc.module) for loc in left]
    return [f"{_short(place)} {module}" for place, module in places if (place, module) not in named]


def _unequal(report: Report) -> list[str]:
    remarks = [(result.name, remark) for result in report.passes for remark in result.remarks]
    return [f"{name}: {said.reason}" for name, said in remarks if said.code == "unequal"]


def _short(location: str) -> str:
    """The path from its package on: where it is installed says nothing."""
    _, found, inside = location.partition("site-packages/")
    return inside if found else location


def _sentence(error: Exception) -> str:
    text = reason(error).replace(str(Path(torch.__file__).parents[1]) + "/", "")
    return f"{type(error).__name__}: {text}"
