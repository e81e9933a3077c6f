"""Attention weights as one HTML page: heat maps with the tokens on both axes, readable offline."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from html import escape

import torch

from attngraph.reports.attention_weights import AttentionWeights
from attngraph.reports.content_policy import content_policy

_CELL, _LETTER = 14, 6
_STYLE = """
:root { --ink: #1c2733; --quiet: #55626f; --page: #fff }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dfe6ee; --quiet: #93a1b1; --page: #0f151b } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 78rem; padding: 0 1rem;
       color: var(--ink); background: var(--page); overflow-wrap: anywhere }
h1 { font-size: 1.4rem } h2 { font-size: 1.05rem; margin: 2.2rem 0 .4rem }
p { margin: .2rem 0; color: var(--quiet) } .maps { display: flex; flex-wrap: wrap; gap: 1.2rem }
.maps text { fill: var(--quiet) }
figure { margin: 0; max-width: 100%; overflow-x: auto }
figcaption { color: var(--quiet); font-size: .85rem }
"""
_SVG_STYLE = (
    "text{font:10px ui-monospace,monospace;fill:#33414f}"
    "image{image-rendering:pixelated}rect{fill:none;stroke:#c9d2da}"
)


def attention_page(
    source: str,
    views: Sequence[AttentionWeights],
    queries: Sequence[str] | None,
    keys: Sequence[str] | None,
    element: int,
    notes: Sequence[str] = (),
) -> str:
    """The page for one element of the batch. A length without tokens is labelled by number."""
    policy = content_policy(_STYLE, _SVG_STYLE)
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f'<meta http-equiv=Content-Security-Policy content="{policy}">',
        "<meta name=viewport content='width=device-width'>",
        "<meta name=color-scheme content='light dark'>",
        f"<title>Attention of {escape(source)}</title><style>{_STYLE}</style>",
        f"<h1>Attention of {escape(source)}</h1>",
        f"<p>Batch element {element}. A row is a query, a column a key; the darker, the more of "
        "the query's attention goes there (white 0, darkest 1).</p>",
        *(f"<p>{escape(note)}</p>" for note in notes),
    ]
    for view in views:
        told = "compared with eager PyTorch's" if view.checked else "not compared with eager's"
        parts.append(
            f"<h2>Attention {view.layer}: {escape(view.module or 'the model')}</h2>"
            f"<p>{escape(view.location)}; weights {told}.</p><div class=maps>"
        )
        for at, head in enumerate(view.heads):
            drawn = heat_map(view.weights[element, at], queries, keys)
            parts.append(f"<figure>{drawn}<figcaption>head {head}</figcaption></figure>")
        parts.append("</div>")
    return "\n".join([*parts, "</html>\n"])


def heat_map(
    weights: torch.Tensor, queries: Sequence[str] | None, keys: Sequence[str] | None
) -> str:
    """Weights (S, T) as SVG: a row for each query, a column for each key, with their tokens."""
    rows, columns = weights.shape
    left, top = _labels(queries, rows), _labels(keys, columns)
    x, y = (10 + _LETTER * max(map(len, words)) for words in (left, top))
    words = [
        f'<text x="{x - 5}" y="{y + at * _CELL + 10}" text-anchor="end">{escape(word)}</text>'
        for at, word in enumerate(left)
    ]
    for at, word in enumerate(top):
        turn = f"translate({x + at * _CELL + 10} {y - 5}) rotate(-90)"
        words.append(f'<text transform="{turn}">{escape(word)}</text>')
    width, height = columns * _CELL, rows * _CELL
    place = f'x="{x}" y="{y}" width="{width}" height="{height}"'
    width, height = x + width + 1, y + height + 1
    picture = base64.b64encode(png(weights)).decode()
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}"><style>{_SVG_STYLE}</style>'
        f'<image {place} preserveAspectRatio="none" href="data:image/png;base64,{picture}"/>'
        f"<rect {place} />{''.join(words)}</svg>"
    )


def _labels(tokens: Sequence[str] | None, count: int) -> list[str]:
    if tokens is not None and len(tokens) == count:
        return list(tokens)
    return [str(at) for at in range(count)]


def png(weights: torch.Tensor) -> bytes:
    """An image of one pixel per weight, from white to a dark blue."""
    share = weights.float().clamp(0, 1)[..., None]
    dark = torch.tensor([8.0, 48.0, 107.0])
    pixels = (255 + (dark - 255) * share.sqrt()).round().to(torch.uint8)
    rows = b"".join(b"\0" + row.contiguous().numpy().tobytes() for row in pixels)
    height, width, _ = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows, 9)) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def _chunk(kind: bytes, data: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + checksum
