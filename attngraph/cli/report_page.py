"""A report as one HTML page: the verdict first, then what led to it.

It fetches nothing and runs nothing: names and source lines are escaped, and its own policy
(Content-Security-Policy) lets a browser apply its one style sheet and no more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from attngraph.cli.text import human_bytes
from attngraph.errors import counted
from attngraph.reports.content_policy import content_policy
from attngraph.reports.pictures import Picture, Place, Weight
from attngraph.reports.report import Report
from attngraph.reports.site_groups import site_groups
from attngraph.versions import versions

_ROWS = 12


@dataclass(frozen=True)
class Drawn:
    """What a page shows beside the report: pictures by site, and the weights of its files."""

    pictures: Mapping[Place, Picture] = field(default_factory=dict)
    weights: Sequence[Weight] = ()


Shown = tuple[Report, Mapping[str, str | int] | None, Drawn]
"""What is shown of a file: its report, the `path` and `bytes` of what was written, and pictures."""


def page_of(
    report: Report,
    output: Mapping[str, str | int] | None = None,
    drawn: Drawn | None = None,
) -> str:
    """The page, for a report of `optimize` with the `path` and `bytes` of what it wrote, or of
    `explain` without.
    """
    return page_of_parts([(report, output, drawn or Drawn())])


def page_of_parts(parts: Sequence[Shown]) -> str:
    """The page of a model that is several files, one below the other."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        bytes=human_bytes,
        counted=counted,
        policy=content_policy,
        svg=Markup,
        figure="{:.1e}".format,
        seconds=_seconds,
    )
    template = files("attngraph.cli").joinpath("report.html.j2").read_text("utf-8")
    shown = [_part(place, *part) for place, part in enumerate(parts)]
    return f"{environment.from_string(template).render(parts=shown, versions=versions())}\n"


def _part(
    place: int, report: Report, output: Mapping[str, str | int] | None, drawn: Drawn
) -> dict[str, Any]:
    """What the template shows of a file; `place` counts those before it."""
    parity = [] if report.parity is None else list(report.parity.outputs)
    parity.sort(key=lambda output: -output.ratio)
    return {
        "suffix": f"-{place + 1}" if place else "",
        "report": report,
        "output": output,
        "groups": site_groups(report.sites),
        "worst": parity[:_ROWS],
        "others": parity[_ROWS:],
        "rewrites": Counter((r.made_by, r.what, r.location) for r in report.reassociated),
        "changed": [result for result in report.passes if result.changed],
        "unchanged": [result for result in report.passes if not result.changed],
        "pictures": drawn.pictures,
        "weights": sorted(drawn.weights, key=lambda weight: -weight.bytes)[:_ROWS],
    }


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{1000 * value:.1f} ms"
