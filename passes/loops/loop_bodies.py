"""loop-bodies: runs the other passes on the body of each loop."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from attngraph.ir import Graph, Node, Remark, Value, parse
from attngraph.ir.ops import attribute
from attngraph.ir.printer import format_graph
from attngraph.passes.rewriting.manager import Pass, register, run
from attngraph.passes.rewriting.outcomes import tally_of

_GIVEN = re.compile(r"^(\s*)input (%[\w.$/-]+) :", re.MULTILINE)
_WEIGHT = re.compile(r"^(\s*)parameter (%[\w.$/-]+) :", re.MULTILINE)


@register
@dataclass(frozen=True)
class LoopBodies:
    """The constants that a body reads are its own while the passes run, so they fold and merge.

    `stages` are the passes; equal bodies over equal constants are done once each.
    """

    name: ClassVar[str] = "loop-bodies"
    exact: ClassVar[bool] = True

    stages: tuple[Pass, ...] = ()

    def run(self, graph: Graph) -> list[Remark]:
        remarks: list[Remark] = []
        for node in graph:
            if node.op == "attn.scan" and self.stages:
                remarks += self._optimise(graph, node)
        return remarks

    def _optimise(self, graph: Graph, node: Node) -> list[Remark]:
        text = attribute(node, "body")
        own = attribute(node, "carried") + attribute(node, "scanned")
        body, read = _opened(text, node.inputs, own)
        remarks = self.run(body)
        for result in run(body, self.stages):
            tally_of(graph).add(result.tally)
            remarks += [replace(r, node=f"{node.outputs[0].name}/{r.node}") for r in result.remarks]
        closed = format_graph(body)
        weights = [body.constants[name[1:]] for _, name in _WEIGHT.findall(closed)]
        closed = _WEIGHT.sub(r"\1input \2 :", closed)
        if closed == text:
            return remarks
        lifted = [_lifted(graph, node, value) for value in weights]
        made = graph.create(
            node.op,
            [*node.inputs[:own], *read, *lifted],
            {**node.attrs, "body": closed},
            types=[value.type for value in node.outputs],
            names=[value.name for value in node.outputs],
            loc=node.loc,
            before=node,
        )
        for old, new in zip(node.outputs, made.outputs, strict=True):
            graph.replace_uses(old, new)
        graph.erase(node)
        return remarks


def _opened(
    text: str, inputs: Sequence[Value | None], own: int
) -> tuple[Graph, list[Value | None]]:
    """The body with the constants it reads as its own, and the other values it reads."""
    data: dict[str, torch.Tensor] = {}
    read: list[Value | None] = []
    for (_, name), value in zip(_GIVEN.findall(text)[own:], inputs[own:], strict=True):
        if value is not None and value.data is not None:
            data[name[1:]] = value.data
        else:
            read.append(value)

    def line(match: re.Match[str]) -> str:
        return match[0].replace("input", "parameter", 1) if match[2][1:] in data else match[0]

    return parse(_GIVEN.sub(line, text), data), read


def _lifted(graph: Graph, node: Node, value: Value) -> Value:
    """A body's constant as one of the graph's; the one that already has that memory, if any."""
    for known in graph.constants.values():
        if known.data is value.data:
            return known
    return graph.add_constant(f"{node.outputs[0].name}.{value.name}", value.data)
