"""What the page draws of an attention: the nodes it was, those it became, and what its mask hides.

The pictures lie in the page: SVG with its style sheet's classes, and images as data.
"""

from __future__ import annotations

import base64
import contextlib
import linecache
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import networkx
import onnx_ir
import torch

from attngraph.analysis.masks.masking import masking_of, scores_shape
from attngraph.dialect.attention import masked_softmax
from attngraph.errors import AttngraphError
from attngraph.ir import Graph, Loc, Node, TensorType, Value, clone, interpret
from attngraph.ir.dead import eliminate_dead_code
from attngraph.ir.dims import substitute
from attngraph.ir.traits import ATTENTION
from attngraph.reports.heat_map import png
from attngraph.reports.report import Site

_MOST = 48
"""Nodes of a drawing; what has more is counted and not drawn."""
_STEP, _HEIGHT, _LETTER = 34, 22, 6.7
_LONGEST = 64
"""Queries and keys of a mask's picture."""


@dataclass(frozen=True)
class Picture:
    """`before` and `after` are SVG, "" where there is nothing to draw; `mask` is a PNG's data URL,
    and `at` the size that it shows; `line` is the source line."""

    before: str = ""
    after: str = ""
    mask: str = ""
    at: str = ""
    line: str = ""


@dataclass(frozen=True)
class Weight:
    """A tensor of a file."""

    name: str
    dtype: str
    shape: str
    bytes: int


Place = tuple[str, str]
"""A site's location and module."""


def pictures(
    sites: Iterable[Site], graph: Graph, origin: Graph | None, model: onnx_ir.Model | None
) -> dict[Place, Picture]:
    """A picture of each site; `graph` is the optimised one, `origin` the captured one."""
    attentions: dict[Place, tuple[Node, set[Loc]]] = {}
    for node in graph:
        if node.op in ATTENTION:
            places = {_place(loc): loc for loc in (node.loc, *node.loc.fused)}
            for place in places:
                attentions.setdefault(place, (node, {_plain(loc) for loc in places.values()}))
    found = {}
    for site in sites:
        place = site.location, site.module
        line = _source_line(site.location)
        if place not in attentions:
            found[place] = Picture(line=line)
            continue
        node, locs = attentions[place]
        before = [n for n in origin or () if _plain(n.loc) in locs]
        texts = {str(loc) for loc in (node.loc, *locs)}
        nodes = (
            []
            if model is None
            else [n for n in model.graph if n.metadata_props.get("attngraph.loc") in texts]
        )
        mask, at = _mask(graph, node)
        found[place] = Picture(_drawn_graph(before), _drawn_model(nodes), mask, at, line)
    return found


def _place(loc: Loc) -> Place:
    return loc.place, loc.module


def _plain(loc: Loc) -> Loc:
    return Loc(loc.file, loc.line, loc.module)


def _source_line(location: str) -> str:
    """The text of `file:line`, wherever the file is imported from."""
    file, _, line = location.rpartition(":")
    if not line.isdigit():
        return ""
    for root in ("", *sys.path):
        if text := linecache.getline(os.path.join(root, file), int(line)).strip():
            return text
    return ""


def _drawn_graph(nodes: Sequence[Node]) -> str:
    labels = {node: node.op.removeprefix("aten.").removesuffix(".Tensor") for node in nodes}
    edges = [(v.producer, n) for n in nodes for v in n.inputs if isinstance(v, Value)]
    return drawing(labels, [(a, b) for a, b in edges if a in labels])


def _drawn_model(nodes: Sequence[onnx_ir.Node]) -> str:
    labels = {node: node.op_type for node in nodes}
    edges = [(v.producer(), n) for n in nodes for v in n.inputs if v is not None]
    return drawing(labels, [(a, b) for a, b in edges if a in labels])


def drawing(labels: Mapping[Any, str], edges: Sequence[tuple[Any, Any]]) -> str:
    """A graph as SVG: a row for each depth, laid out by networkx; "" for none."""
    if not labels:
        return ""
    if len(labels) > _MOST:
        return f'<p class="quiet">{len(labels)} nodes</p>'
    graph = networkx.DiGraph()
    graph.add_nodes_from(labels)
    graph.add_edges_from(edges)
    rows = [list(row) for row in networkx.topological_generations(graph)]
    for depth, row in enumerate(rows):
        for node in row:
            graph.nodes[node]["depth"] = depth
    widest = max(sum(_width(labels[node]) + 12 for node in row) for row in rows)
    order = networkx.multipartite_layout(graph, subset_key="depth", align="horizontal")
    centre: dict[Any, tuple[float, float]] = {}
    for depth, row in enumerate(rows):
        row.sort(key=lambda node: order[node][0])
        taken = sum(_width(labels[node]) + 12 for node in row)
        x = (widest - taken) / 2 + 6
        for node in row:
            centre[node] = x + _width(labels[node]) / 2, depth * _STEP + _HEIGHT / 2 + 1
            x += _width(labels[node]) + 12
    height = len(rows) * _STEP - _STEP + _HEIGHT + 2
    parts = [
        f'<line x1="{centre[a][0]:.0f}" y1="{centre[a][1] + _HEIGHT / 2:.0f}" '
        f'x2="{centre[b][0]:.0f}" y2="{centre[b][1] - _HEIGHT / 2:.0f}"/>'
        for a, b in edges
    ]
    for node, label in labels.items():
        x, y = centre[node]
        width = _width(label)
        parts.append(
            f'<rect x="{x - width / 2:.0f}" y="{y - _HEIGHT / 2:.0f}" width="{width:.0f}" '
            f'height="{_HEIGHT}" rx="4"/><text x="{x:.0f}" y="{y + 4:.0f}">{escape(label)}</text>'
        )
    return (
        f'<svg class="drawing" role="img" width="{widest:.0f}" height="{height}" '
        f'viewBox="0 0 {widest:.0f} {height}">{"".join(parts)}</svg>'
    )


def _width(label: str) -> float:
    return len(label) * _LETTER + 14


def _mask(graph: Graph, node: Node) -> tuple[str, str]:
    """(a data URL, the size shown) of which keys each query of one head sees; "" where all do.

    Rows are queries, columns keys. Inputs are all ones at the sizes of the sample, or all zeros
    where more is seen with these, so nothing is padded.
    """
    if node.op != "attn.attention":
        return "", ""
    hints = {name: info.hint for name, info in graph.dims.items()}
    batch, heads, queries, keys = (int(substitute(n, hints)) for n in scores_shape(node))
    masking = masking_of(node)
    given = {"bias": masking.bias, "mask": masking.mask, "lengths": masking.lengths}
    wanted = {name: value for name, value in given.items() if value is not None}
    causal, window = masking.causal, masking.window
    if not (wanted or causal or window) or max(queries, keys) > _LONGEST:
        return "", ""
    found = []
    for fill in (1, 0):
        with contextlib.suppress(AttngraphError, RuntimeError, KeyError):
            held = _evaluated(graph, wanted, hints, fill)
            shares = masked_softmax(
                torch.zeros(batch, heads, queries, keys),
                *(held.get(name) for name in ("bias", "mask", "lengths")),
                queries=queries,
                past=int(substitute(masking.past, hints)),
                causal=causal,
                window=window,
            )
            found.append((shares[-1, 0] > 0).float())
    if not found:
        return "", ""
    seen = max(found, key=lambda each: float(each.sum()))
    data = base64.b64encode(png(seen * 0.5)).decode()
    return f"data:image/png;base64,{data}", f"{queries} queries × {keys} keys"


def _evaluated(
    graph: Graph, wanted: Mapping[str, Value], hints: Mapping[str, int], fill: int
) -> dict[str, torch.Tensor]:
    if not wanted:
        return {}
    part = clone(graph)
    by_name = {value.name: value for node in part for value in node.outputs}
    by_name |= {value.name: value for value in (*part.inputs, *part.constants.values())}
    part.set_outputs([by_name[value.name] for value in wanted.values()], list(wanted))
    eliminate_dead_code(part)
    inputs = []
    for value in part.inputs:
        assert isinstance(value.type, TensorType)
        shape = [int(substitute(dim, hints)) for dim in value.shape]
        inputs.append(torch.full(shape, fill, dtype=value.dtype))
    with torch.no_grad():
        return dict(zip(wanted, interpret(part, inputs), strict=True))


def weights_of(model: onnx_ir.Model) -> list[Weight]:
    """The tensors that a file holds."""
    return [
        Weight(name, str(held.dtype), " × ".join(map(str, held.shape)), held.nbytes)
        for name, value in model.graph.initializers.items()
        if (held := value.const_value) is not None
    ]
