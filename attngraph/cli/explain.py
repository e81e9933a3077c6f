"""`attngraph explain`."""

from __future__ import annotations

import json

from attngraph.cli.failures import reported
from attngraph.cli.options import (
    AssumeOption,
    DebugOption,
    DimOption,
    FactoryOption,
    InputOption,
    JsonOption,
    ModelArgument,
    NpzOption,
    ReportOption,
    Source,
    TargetOption,
    TrustOption,
)
from attngraph.cli.output import check_output, write_page
from attngraph.cli.stages import working

_SHOWN = ("source", "target", "attention", "sites", "timings", "notes")


def explain(
    model: ModelArgument = None,
    target: TargetOption = "cpu",
    report_page: ReportOption = None,
    assume: AssumeOption = None,
    factory: FactoryOption = None,
    trust_pickle: TrustOption = False,
    inputs: InputOption = None,
    npz: NpzOption = None,
    dims: DimOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List every attention of a model: what it is fused into, or why it is not.

    A table on a terminal; elsewhere one line each, as file:line: module: …
    """
    with reported(debug):
        with working(debug) as stages:
            if report_page is not None:
                check_output(report_page, (model, npz))
            stages("import torch")
            from attngraph.cli.work import analysed

            source = Source.of(model, factory, trust_pickle, inputs, npz, dims)
            assumed = tuple(assume or ())
            report = analysed(source, target=target, assume=assumed, stages=stages)
        if report_page is not None:
            from attngraph.cli.report_page import page_of

            write_page(report_page, page_of(report))
        if as_json:
            full = report.to_dict()
            print(json.dumps({key: full[key] for key in _SHOWN}, indent=2, allow_nan=False))
        else:
            from attngraph.cli.render import print_sites

            print_sites(report)
