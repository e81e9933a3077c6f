"""Results as text: a report's closing summary, its attention sites, and a comparison of times."""

from __future__ import annotations

from collections import Counter
from itertools import chain, groupby, repeat
from operator import attrgetter
from pathlib import Path

from rich.text import Text

from attngraph.cli.text import Page, human_bytes
from attngraph.errors import counted
from attngraph.export.parity.budget import OutputParity, Parity
from attngraph.export.precision.quantize import Quantised
from attngraph.measuring.contest import Contest, Row
from attngraph.reports.coverage import Coverage
from attngraph.reports.report import Report
from attngraph.reports.site_groups import SiteGroup, site_groups
from attngraph.verification.verify import Verification

_INDENT = 13
_LINEARS = 3  # that are listed with their share of the error; --json has all
_SITE_INDENT = 16


def print_summary(report: Report, output: Path, size: int) -> None:
    """What became of the model: sizes, attention sites, parity, time."""
    page, bound = Page(), f", {report.operators}" if report.operators else ""
    page.line(
        Text.assemble(
            ("✓ ", "bold green"),
            report.source,
            (" → ", "dim"),
            (str(output), "bold"),
            (f" ({human_bytes(size)}, for {report.target} in {report.precision}{bound})", "dim"),
        )
    )
    if report.dims:
        bounds = [
            Text(f"{name} {low}..{'' if high is None else high}")
            for name, (low, high) in report.dims.items()
        ]
        bounds += [Text(relation, "yellow") for relation in report.relations]
        page.items(Text("  dims", "dim"), bounds, _INDENT)
    _field(page, "nodes", Text(f"{report.nodes_before} → {report.nodes_after}"))
    _field(page, "attention", _attention(report))
    kernels = Counter(site.kernel.chosen for site in report.sites if site.kernel)
    for kernel, count in kernels.items():
        _field(page, "kernel", Text(f"{kernel} ({counted(count, 'site')})"))
    if merged := sum(bool(site.merged) for site in report.sites):
        _field(page, "merged", Text(f"{counted(merged, 'attention')} into fewer, of more heads"))
    if joined := sum(bool(site.cache) for site in report.sites):
        _field(
            page, "cache", Text(f"joined inside {joined} of {counted(report.fused, 'attention')}")
        )
    weights = f"{counted(report.weights, 'tensor')}, {human_bytes(report.weight_bytes)}"
    if report.weight_bytes < 0.9 * report.weight_bytes_before:
        weights += f" of {human_bytes(report.weight_bytes_before)}"
    _field(page, "weights", Text(weights))
    if report.quantised is not None:
        page.items(
            Text(f"  {report.quantised.weights}", "dim"), _quantised(report.quantised), _INDENT
        )
    _print_parity(page, report.parity, report.coverage)
    page.items(Text("  rewrites", "dim"), _rewrites(report), _INDENT)
    total = Text(f"{sum(report.timings.values()):.1f} s")
    stages = [Text(f"{name} {seconds:.2f}", "dim") for name, seconds in report.timings.items()]
    if stages:
        page.items(Text("  time", "dim"), [total, *stages], _INDENT)
    for note in report.notes:
        _field(page, "note", Text(note))
    for group in site_groups(report.sites):
        if group.site.status == "declined":
            page.line()
            _print_declined(page, group)


def _rewrites(report: Report) -> list[Text]:
    """How many rewrites were made, by proof or by evaluation, and which of them reassociate."""
    counts = report.rewrites
    parts = [Text(f"{counts.by_proof} by proof"), Text(f"{counts.by_evaluation} by evaluation")]
    if counts.left_out:
        parts.append(Text(f"{counts.left_out} left out", "yellow"))
    if report.reassociated:
        made = Counter(rewrite.made_by for rewrite in report.reassociated)
        parts += [Text(f"{count} × {name}") for name, count in made.items()]
        parts[-1].append(" reassociate; --exact leaves them out", "dim")
    return parts


def print_verification(found: Verification) -> None:
    """The verdict, each output at each size, and what diverges first."""
    page, parity = Page(), found.parity
    mark = Text("✓ ", "bold green") if found.passed else Text("✗ ", "bold red")
    verdict = "is within the error budget of"
    if not parity.passed:
        verdict = "is out of the error budget of"
    elif not found.passed:
        verdict = "holds other weights than"
    bits = "" if found.quantised is None else f" with its weights in {found.quantised.weights}"
    if found.quantised is not None and found.quantised.activations is not None:
        bits += f" and activations in {found.quantised.activations}"
    page.line(
        Text.assemble(
            mark,
            (found.path, "bold"),
            f" {verdict} {found.source}{bits}",
            (f" (on {found.target}, in {parity.precision})", "dim"),
        )
    )
    if found.culprit:
        _field(page, "because", Text(found.culprit, "yellow"))
    for name, outputs in groupby(
        sorted(parity.outputs, key=attrgetter("name")), attrgetter("name")
    ):
        for label, output in zip(chain([name], repeat("")), outputs, strict=False):
            page.field(Text(f"  {label}", "dim"), _figures(output), _INDENT)
    if found.coverage is not None:
        style = "green" if found.coverage.whole else "yellow"
        _field(page, "covered", Text(str(found.coverage), style))
    if found.quantised is not None:
        page.items(
            Text(f"  {found.quantised.weights}", "dim"), _quantised(found.quantised), _INDENT
        )
    for what, how in found.paired.items():
        if how != "name":
            _field(page, what, Text(f"paired in their {how}: the names differ", "yellow"))
    for note in dict.fromkeys((*found.notes, *parity.notes)):
        _field(page, "note", Text(note))


def _figures(output: OutputParity) -> Text:
    mark = ("passed", "green") if output.passed else ("FAILED", "bold red")
    figures = "".join(f", {what} {figure:.1e}" for what, figure in output.figures.items())
    where = f" at {output.case}" if "=" in output.case else f" {output.case}"
    return Text.assemble(mark, figures, (where.rstrip(), "dim"))


def print_sites(report: Report) -> None:
    """Each attention with its reasons on a terminal, those of equal layers as one; in a pipe one
    line each, `file:line: module: …`.
    """
    page = Page()
    if not report.sites:
        page.line(f"{report.source} has no attention.")
        return
    if page.on_terminal:
        for group in site_groups(report.sites):
            _print_site(page, group)
        page.line(Text.assemble(_attention(report), (f" in {report.source}", "dim")))
        for note in report.notes:
            page.field(Text("note ", "dim"), Text(note), 5)
    else:
        for site in report.sites:
            page.line(str(site))


def _field(page: Page, label: str, value: Text) -> None:
    page.field(Text(f"  {label}", "dim"), value, _INDENT)


def _attention(report: Report) -> Text:
    fused, declined = report.fused, report.declined
    if not report.sites or all(site.code == "distribution" for site in report.sites):
        return Text("none", "yellow")
    parts = [Text(f"{fused} fused", "green" if fused else "yellow")]
    if declined:
        parts.append(Text(f"{declined} declined", "yellow"))
    return Text(", ").join(parts)


def _quantised(found: Quantised) -> list[Text]:
    """What quantized weights save and cost: of the first output, and the largest of the others."""
    before, after = human_bytes(found.bytes_before), human_bytes(found.bytes_after)
    parts = [
        Text(f"{found.linears} of {counted(found.total, 'linear')}, {before} → {after}"),
        Text(
            f"weights off by at most {found.weight_error:.1e}, of {found.bound:.1e} allowed", "dim"
        ),
    ]
    if found.activations is not None:
        forms = Counter(linear.form for linear in found.forms)
        said = ", ".join(f"{count} × {form}" for form, count in forms.items())
        parts.append(Text(f"activations in {found.activations}: {said}"))
        told = [each for each in found.forms if each.share is not None]
        told.sort(key=lambda each: each.share or 0.0, reverse=True)
        parts += [
            Text(f"{each.weight} has {each.share:.0%} of the error, in {each.form}", "dim")
            for each in told[:_LINEARS]
        ]
    if found.moved is not None:
        moved = found.moved
        parts.append(
            Text(
                f"outliers of {counted(moved.values, 'value')} moved into weights: error "
                f"{moved.before:.1e} → {moved.after:.1e}"
            )
        )
    if not found.errors:
        return [*parts, Text("cost not measured (--verify off)", "yellow")]
    first, *others = found.errors
    parts.append(Text(f"{first.name} off by {first.rms:.1e} of its rms", "yellow"))
    if first.top1 is not None:
        parts.append(Text(f"top-1 the same in {first.top1:.1%} of rows", "yellow"))
    if others:
        worst = max(others, key=attrgetter("rms"))
        parts.append(Text(f"of the other outputs {worst.name} most, by {worst.rms:.1e}", "dim"))
    parts.append(Text("parity is that of the kernels, with these weights", "dim"))
    return parts


def _print_parity(page: Page, parity: Parity | None, coverage: Coverage | None) -> None:
    if parity is None:
        _field(page, "parity", Text("not checked (--verify off)", "yellow"))
        return
    parts = [Text(f"{what} {figure:.1e}") for what, figure in parity.worst.figures.items()]
    verdict = [Text("passed", "green")]
    if coverage is not None:
        verdict.append(Text(str(coverage), "green" if coverage.whole else "yellow"))
    page.items(Text("  parity", "dim"), [*verdict, *parts], _INDENT)
    cases = dict.fromkeys(output.case for output in parity.outputs)
    where = [Text(case.replace(", ", " "), "dim") for case in cases if "=" in case]
    if where:
        where[0] = Text("at ", "dim").append_text(where[0])
        page.items("", where, _INDENT)
    if parity.reference == "eager":
        _field(page, "", Text("against eager: float64 can't serve as the reference", "yellow"))
    if parity.reference == "parts":
        _field(page, "", Text("against the other two files, which were compared with eager", "dim"))
    for note in parity.notes:
        _field(page, "", Text(note, "dim"))


def _print_declined(page: Page, group: SiteGroup) -> None:
    site = group.site
    page.line(
        Text.assemble(
            ("  declined ", "yellow"),
            (site.location or "unknown place", "bold"),
            f" {group.name}" if any(group.modules) else "",
            (f" [{site.code}]", "dim"),
        )
    )
    page.field("", Text(site.reason), 4)
    if site.blamed and site.location not in site.blamed:
        page.field("    because of ", Text(site.blamed), 15)
    if site.hint:
        page.field(Text("    hint: ", "cyan"), Text(site.hint), 10)


_MARKS = {"fused": ("✓ ", "green"), "declined": ("✗ ", "yellow"), "named": ("· ", "dim")}


def _print_site(page: Page, group: SiteGroup) -> None:
    site, kernel = group.site, group.site.kernel
    place = (f"  {site.location or 'unknown place'}", "dim")
    page.field(Text(*_MARKS[site.status]), Text.assemble((group.name, "bold"), place), 2)
    code = "" if site.status == "fused" else f" [{site.code}]"
    stays = "stays " if site.status == "declined" else ""  # one that is named may be an operator
    told = f"{stays}{site.op}{code}: {site.reason}"
    page.field(Text(f"    {site.status}", "dim"), Text(told), _SITE_INDENT)
    facts = {
        "because of": site.blamed,
        "hint": site.hint,
        "mask": site.mask,
        "cache": site.cache,
        "merged": site.merged,
        "kernel": "" if kernel is None else str(kernel),
    }
    for label, fact in facts.items():
        if fact:
            page.field(Text(f"    {label}", "dim"), Text(fact), _SITE_INDENT)
    page.line()


_WIDTH = 56


def print_contest(contest: Contest) -> None:
    """One line for each engine: milliseconds per call and the ratio, or why there are none."""
    page = Page()
    shapes = ", ".join(str(tuple(shape)) for shape in contest.inputs)
    page.line(Text(f"  inputs {shapes}; {contest.threads} threads", "dim"))
    for row in contest.rows:
        page.field(Text(f"  {row.title}"), _timed(row, contest), _WIDTH)
    page.line(Text(f"  {contest.load}", "dim" if contest.load.is_trusted else "yellow"))


def _timed(row: Row, contest: Contest) -> Text:
    if row.median_ms is None:
        return Text(f"{row.status}: {row.reason}" if row.reason else row.status, "yellow")
    text = Text(f"{row.median_ms:10.3f} ms ({min(row.ms):.3f} to {max(row.ms):.3f})")
    if row.ratio is not None and row is not contest.ours:
        style = "green" if row.ratio >= 1 else "yellow"
        text.append(f"  {row.ratio:.2f} × attngraph's", style)
        if row.spread is not None:
            text.append(f" ({row.spread[0]:.2f} to {row.spread[1]:.2f})", "dim")
    if row.error is not None:
        text.append(f", error {row.error:.2%} rms", "yellow")
    return text
