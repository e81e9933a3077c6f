"""`attngraph explain`."""

from __future__ import annotations

import json
from dataclasses import replace

from attngraph.cli.failures import reported
from attngraph.cli.flags import DebugOption, JsonOption, ModelArgument, ReportOption, grouped
from attngraph.cli.output import check_output, write_page
from attngraph.cli.stages import working
from attngraph.frontend.files.source import Source
from attngraph.options import Assumptions, Options, TargetName

_SHOWN = ("source", "target", "attention", "sites", "timings", "notes")


@grouped
def explain(
    model: ModelArgument = None,
    *,
    target: TargetName = "cpu",
    report_page: ReportOption = None,
    assume: Assumptions = (),
    given: Source,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List every attention of a model: what it is fused into, or why it is not.

    A table on a terminal; elsewhere one line each, as file:line: module: …
    """
    with reported(debug):
        with working(debug) as stages:
            if report_page is not None:
                check_output(report_page, (model, given.npz))
            options = Options(target, assume=assume)
            source = replace(given, path=model)
            source.check()
            stages("import torch")
            from attngraph.cli.render import print_sites
            from attngraph.cli.report_page import page_of
            from attngraph.cli.work import analysed

            drawn, report = analysed(source, options, draws=report_page is not None)
            report.timings = {"import": stages.seconds("import torch"), **report.timings}
        if report_page is not None:
            write_page(report_page, page_of(report, drawn=drawn))
        if as_json:
            full = report.to_dict()
            print(json.dumps({key: full[key] for key in _SHOWN}, indent=2, allow_nan=False))
        else:
            print_sites(report)
