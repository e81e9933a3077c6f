"""The text form: one line per value, with type and source location; `parse` reads it back."""

from __future__ import annotations

import json
import math
from typing import Any

import sympy
import torch

from attngraph.ir.conditions import format_condition
from attngraph.ir.dims import DimInfo, format_dim, symbols_of
from attngraph.ir.graph import Graph, Node, Value
from attngraph.ir.loc import UNKNOWN, Loc
from attngraph.ir.types import TensorType, dtype_name

INLINE_ELEMENTS = 16


def format_attr(value: Any) -> str:
    """A number, bool, none, string, dtype, dim expression, a list of these, or a region's text."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, complex):
        return repr(value).strip("()")
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, torch.memory_format):
        return str(value).removeprefix("torch.")
    if isinstance(value, Graph):
        return format_attr(format_graph(value))
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(format_attr, value))}]"
    if isinstance(value, sympy.Basic) and not isinstance(value, sympy.Expr):
        return format_condition(value)
    if isinstance(value, (int, sympy.Basic)):
        return format_dim(value)
    raise TypeError(f"An attribute can't hold {value!r}.")


def format_loc(loc: Loc) -> str:
    """`"file.py":12 "layers.0"`, and what it was fused from."""
    text = f"{json.dumps(loc.file)}:{loc.line} {json.dumps(loc.module)}"
    if loc.fused:
        text += f" fused({', '.join(map(format_loc, loc.fused))})"
    return text


def format_node(node: Node, *, loc: bool = True) -> str:
    """One line for a node, without indentation."""
    results = ", ".join(f"%{value.name}" for value in node.outputs)
    inputs = ", ".join(f"%{value.name}" if value else "none" for value in node.inputs)
    attrs = ", ".join(f"{name} = {format_attr(value)}" for name, value in node.attrs.items())
    types = ", ".join(str(value.type) for value in node.outputs)
    line = f"{results} = {node.op}({inputs})"
    line += f" {{{attrs}}}" if attrs else ""
    line += f" : {types}"
    return line + (f" @ {format_loc(node.loc)}" if loc and node.loc != UNKNOWN else "")


def is_inline(value: Value) -> bool:
    """Whether the text holds a constant's elements, and not its name alone."""
    data = value.data
    return data is not None and data.numel() <= INLINE_ELEMENTS and not data.is_complex()


def _constant(value: Value) -> str:
    data = value.data
    if data is None or not is_inline(value):
        return f"parameter %{value.name} : {value.type}"
    return f"constant %{value.name} = {format_attr(data.tolist())} : {value.type}"


def _dim(name: str, info: DimInfo) -> str:
    return f"dim {name} = {info.hint} in {info.low}..{'' if info.high is None else info.high}"


def used_dims(graph: Graph) -> set[str]:
    """The dims that a type or an attribute mentions."""
    used: set[str] = set()
    for value in graph.values():
        if isinstance(value.type, TensorType):
            used |= symbols_of(value.type.shape)
        elif value.type.name:
            used.add(value.type.name)
    for node in graph:
        used |= symbols_of(list(node.attrs.values()))
    return used


def format_graph(graph: Graph, *, loc: bool = True) -> str:
    """The whole graph. Constants of at most 16 elements are written out; weights only named."""
    lines = []
    used = used_dims(graph)
    for name, info in graph.dims.items():
        if name in used:
            lines.append(_dim(name, info))
    for condition in graph.conditions:
        if symbols_of(condition) <= used:
            lines.append(f"require {format_condition(condition)}")
    for value in graph.inputs:
        lines.append(f"input %{value.name} : {value.type}")
    for value in graph.constants.values():
        lines.append(_constant(value))
    for node in graph:
        lines.append(format_node(node, loc=loc))
    outputs = (
        f"%{value.name}" + ("" if name == value.name else f" as {json.dumps(name)}")
        for value, name in zip(graph.outputs, graph.output_names, strict=True)
    )
    lines.append(f"return {', '.join(outputs)}")
    body = "".join(f"  {line}\n" for line in lines)
    return f"graph @{graph.name} {{\n{body}}}\n"


def excerpt(graph: Graph, node: Node, around: int = 5) -> str:
    """A node with a few lines before and after it, marked; for error messages."""
    nodes = list(graph)
    position = nodes.index(node)
    shown = nodes[max(0, position - around) : position + around + 1]
    return "\n".join(f"{'>' if n is node else ' '} {format_node(n)}" for n in shown)
