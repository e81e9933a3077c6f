"""The pages in a headless browser: readable in light and in dark, and within a phone's width."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PHONE, DESK = 390, 1280
"""CSS pixels across."""
READABLE = 4.5
"""The contrast that WCAG 2.2 asks of text at level AA."""

# A page can't be asked from outside without a driver, so it is a frame of another, which asks it.
FRAME = """
<body style="margin:0"><iframe src="page.html" style="border:0;width:WIDTHpx;height:900px"></iframe>
<script>
const channels = text => text.match(/[\\d.]+/g).map(Number);
const light = text => {
  const [r, g, b] = channels(text).map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
onload = () => {
  const page = document.querySelector("iframe").contentDocument;
  const style = e => page.defaultView.getComputedStyle(e);
  const behind = e => {
    for (; e; e = e.parentElement) {
      const paint = style(e).backgroundColor;
      if ((channels(paint)[3] ?? 1) === 1) return paint;
    }
    return "rgb(255, 255, 255)";
  };
  const texts = [...page.querySelectorAll("body *")].filter(e =>
    !e.closest("svg, script, style") && e.checkVisibility() &&
    [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()));
  const faint = texts.map(e => {
    const [a, b] = [light(style(e).color), light(behind(e))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    return [contrast, e.tagName, e.className, e.textContent.trim().slice(0, 40)];
  }).sort((a, b) => a[0] - b[0]);
  document.body.dataset.found = JSON.stringify({
    across: page.documentElement.scrollWidth,
    paper: light(style(page.body).backgroundColor),
    texts: texts.length,
    faintest: faint[0],
    drawings: page.querySelectorAll("svg").length,
    fetched: page.defaultView.performance.getEntriesByType("resource").map(e => e.name),
  });
};
</script>
"""


def look(folder: Path, width: int, scheme: str) -> dict[str, Any]:
    """What a browser of this width and colour scheme makes of folder/page.html."""
    assert CHROMIUM is not None
    frame = folder / "frame.html"
    frame.write_text(FRAME.replace("WIDTH", str(width)))
    line = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    line += ["--allow-file-access-from-files", f"--user-data-dir={folder / 'profile'}"]
    line += [f"--blink-settings=preferredColorScheme={int(scheme == 'light')}"]
    line += ["--virtual-time-budget=5000", "--dump-dom", frame.as_uri()]
    said = subprocess.run(line, capture_output=True, text=True, timeout=120).stdout
    found = re.search('data-found="([^"]*)"', said)
    assert found is not None, said[:500]
    result: dict[str, Any] = json.loads(html.unescape(found[1]))
    return result


@pytest.mark.machine
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize(
    ("line", "drawings"),
    [
        ("optimize -o o.onnx --report page.html --weights int8 --factory examples.gqa:build", 1),
        ("explain --html page.html --factory user_models:waves", 0),
        ("attend -o page.html --factory examples.gqa:build", 8),
    ],
)
def test_a_page_is_readable(line: str, drawings: int, attngraph: Any, here: Path) -> None:
    ran = attngraph(*line.split())
    assert ran.code == 0, ran.err
    for width in (PHONE, DESK):
        for scheme in ("light", "dark"):
            found = look(here, width, scheme)
            assert found["across"] <= width, "it scrolls sideways"
            assert (found["paper"] > 0.5) == (scheme == "light")
            assert found["texts"] > 5
            assert found["faintest"][0] >= READABLE, found["faintest"]
            assert found["drawings"] >= drawings
            assert found["fetched"] == []
