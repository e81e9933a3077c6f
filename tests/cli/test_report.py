"""`--report`: one page that fetches nothing and holds what the run did."""

from __future__ import annotations

import json
import os
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from attngraph.cli.report_page import page_of
from attngraph.export.parity.budget import OutputParity, Parity
from attngraph.reports.report import Report, Site
from attngraph.reports.site_groups import site_groups

USAGE, OUTPUT = 2, 9
MIXED = ("--factory", "examples.talking_heads:build")
_VOID = {"meta", "br", "hr", "img", "input", "link"}


class _Page(HTMLParser):
    """Checks that tags close in order, and keeps what a browser would show or fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.shown: list[str] = []
        self.fetched: list[str] = []
        self.styles: list[str] = []
        self.policy = ""
        self.feed(text)
        self.close()
        assert self.open == []
        digests = [sha256(style.encode()).digest() for style in self.styles]
        assert self.policy.split("; ") == [
            "default-src 'none'",
            "img-src data:",
            " ".join(["style-src", *(f"'sha256-{b64encode(each).decode()}'" for each in digests)]),
            "base-uri 'none'",
            "form-action 'none'",
        ]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self.open.append(tag)
        given = dict(attrs)
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""
        assert not [name for name in given if name == "style" or name.startswith("on")]
        self.fetched += [str(value) for name, value in attrs if name in ("src", "href", "srcset")]
        self.fetched += [tag] if tag in ("script", "link", "iframe", "object", "img") else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.shown.append(data)
        else:
            self.styles.append(data)
            assert "url(" not in data
            assert "@import" not in data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.shown).split())


def _page(path: Path) -> _Page:
    page = _Page(path.read_text("utf-8"))
    assert page.fetched == []
    return page


def test_the_page_holds_what_the_report_says(attngraph: Any, here: Path) -> None:
    ran = attngraph("optimize", *MIXED, "-o", "out.onnx", "--report", "out.html", "--json")
    assert ran.code == 0, ran.err
    report = json.loads(ran.out)
    text = _page(here / "out.html").text
    assert "✓ Within the error budget: examples.talking_heads:build → out.onnx" in text
    assert f"{report['nodes']['before']} → {report['nodes']['after']}" in text
    for site in report["sites"]:
        for fact in ("module", "location", "op", "reason", "hint", "mask", "blamed"):
            assert site[fact] in text, fact
    kernel = next(site["kernel"] for site in report["sites"] if site["kernel"])
    assert f"{kernel['form']} on the CPU" in text
    assert f"{kernel['runner_up']}: {kernel['why_not']}" in text
    for output in report["parity"]["outputs"]:
        assert output["case"] in text
        assert f"{output['error']:.1e}" in text
    for item in report["passes"]:
        assert item["name"] in text
    for rewrite in report["reassociated"]:
        assert rewrite["what"] in text
    counts = report["rewrites"]
    assert "all covered" in text
    assert f"The largest of {report['weights']['tensors']} tensors" in text
    root = Path(__file__).parents[2]
    for place in {site["location"] for site in report["sites"] if site["status"] == "fused"}:
        file, _, line = place.rpartition(":")
        assert (root / file).read_text("utf-8").splitlines()[int(line) - 1].strip() in text
    proved, evaluated = counts["by_proof"], counts["by_evaluation"]
    different, unknown = counts["different"], counts["not_evaluated"]
    assert proved + evaluated > 0
    assert f"{proved} rewrites by proof, {evaluated} by evaluation" in text
    assert f"{different + unknown} left out: {different} that differ, {unknown} that" in text
    assert text.index("declined stays") < text.index("fused into")
    assert "torch 2." in text
    assert "onnxruntime" in text


def test_explain_writes_a_page_too(attngraph: Any, here: Path) -> None:
    ran = attngraph("explain", *MIXED, "--report", "out.html")
    assert ran.code == 0, ran.err
    text = _page(here / "out.html").text
    assert "Nothing was compiled" in text
    assert "[talking-heads]" in text
    assert "Parity" not in text


def _site(module: str, **facts: Any) -> Site:
    fields = {"status": "fused", "op": "attn.attention", "code": "attention", "reason": "2 heads"}
    return Site(**{**fields, "location": "a.py:3", **facts}, module=module)


def test_sites_of_equal_layers_are_told_once_and_all_are_listed() -> None:
    layers = [_site(f"layers.{number}") for number in range(12)]
    other = _site("pool", status="declined", code="talking-heads", hint="<b>mix</b> & match")
    report = Report("m<o>del", "cpu", "fp32", sites=[*layers, other], notes=["A <defect>."])
    groups = site_groups(report.sites)
    assert [len(group) for group in groups] == [1, 12]
    assert groups[1].name == "layers.0 … layers.11 (12 attentions)"
    page = _Page(page_of(report))
    for number in range(12):
        assert f"layers.{number}" in page.text
    assert "<b>mix</b> & match" in page.text  # escaped, hence text
    assert "A <defect>." in page.text
    assert "m<o>del" in page.text


@pytest.mark.parametrize(("parity", "said"), [(None, "Not checked"), (True, "✓"), (False, "✗")])
def test_the_verdict_comes_first(parity: bool | None, said: str) -> None:
    report = Report("model", "cpu", "fp32")
    if parity is not None:
        output = OutputParity("y", (2,), 1e-7 if parity else 1e-3, 1e-7, 4e-7, parity)
        report.parity = Parity((output,), "fp32")
    text = _Page(page_of(report, {"path": "out.onnx", "bytes": 12})).text
    assert said in text.removeprefix("attngraph: model ")[:20]
    assert ("FAILED" in text) is (parity is False)
    assert "model has no attention" in text


@pytest.mark.parametrize(
    ("page", "code", "message"),
    [
        ("nowhere/out.html", OUTPUT, "There is no folder nowhere"),
        (".", OUTPUT, "is a folder"),
        ("out.onnx", USAGE, "out.onnx is also what"),
    ],
)
def test_a_page_that_can_not_be_written_stops_the_run_before_any_work(
    attngraph: Any, page: str, code: int, message: str
) -> None:
    ran = attngraph("optimize", *MIXED, "-o", "out.onnx", "--report", page)
    assert ran.code == code
    assert message in ran.sentence
    assert os.listdir() == ["user_models.py"]
