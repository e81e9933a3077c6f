"""Reads the text form of a graph back. Types of nodes may be left out: they are then inferred."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import torch

from attngraph.errors import IRError
from attngraph.ir.builder import Builder
from attngraph.ir.conditions import parse_condition
from attngraph.ir.dims import DimInfo, parse_dim
from attngraph.ir.graph import Graph, Value
from attngraph.ir.loc import UNKNOWN, Loc
from attngraph.ir.ops import op_def
from attngraph.ir.types import DTYPES, ScalarType, TensorType, Type

_NAME = r"%[\w.$/-]+"
_COMPARED = re.compile(r"[<>=]| and | or |\bnot ")
_COMPLEX = re.compile(r"[-+.\w]*(\d|inf|nan)j")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_DIM = re.compile(r"dim (\w+) = (\d+) in (-?\d+)\.\.(\d*)$")
_VALUE = re.compile(rf"(input|parameter) ({_NAME}) : (.+)$")
_CONSTANT = re.compile(rf"constant ({_NAME}) = (.+) : (\S+\[.*\])$")
_NODE = re.compile(rf"({_NAME}(?:, {_NAME})*) = ([\w.]+)\(")
_FORMATS = {
    str(f).removeprefix("torch."): f
    for f in (
        torch.contiguous_format,
        torch.preserve_format,
        torch.channels_last,
        torch.channels_last_3d,
    )
}


def split_top(text: str, separator: str = ",") -> list[str]:
    """Splits at separators outside brackets and strings; empty text gives an empty list."""
    parts, depth, start, position = [], 0, 0, 0
    while position < len(text):
        character = text[position]
        if character == '"':
            match = _STRING.match(text, position)
            if match is None:
                raise IRError(f"Unfinished string in {text!r}.")
            position = match.end()
            continue
        depth += (character in "([{") - (character in ")]}")
        if character == separator and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
        position += 1
    last = text[start:].strip()
    return [*parts, last] if last or parts else []


def parse_attr(text: str) -> Any:
    """One attribute value; the inverse of `printer.format_attr`."""
    text = text.strip()
    words = {"none": None, "true": True, "false": False, **DTYPES, **_FORMATS}
    if text in words:
        return words[text]
    if text.startswith("["):
        return [parse_attr(item) for item in split_top(text[1:-1])]
    if text.startswith('"'):
        return json.loads(text)
    numbers = (complex,) if _COMPLEX.fullmatch(text) else (int, float)
    for number in numbers:
        try:
            return number(text)
        except ValueError:
            pass
    return parse_condition(text) if _COMPARED.search(text) else parse_dim(text)


def parse_type(text: str) -> Type:
    """`f32[batch, 64]`, or a runtime scalar such as `int(u0)`."""
    text = text.strip()
    if match := re.fullmatch(r"(int|float|bool)\((\w*)\)", text):
        return ScalarType(match[1], match[2] or None)
    match = re.fullmatch(r"(\w+)\[(.*)\]", text)
    if match is None or match[1] not in DTYPES:
        raise IRError(f"{text!r} is not a type; expected for example f32[batch, 64].")
    return TensorType(DTYPES[match[1]], tuple(parse_dim(dim) for dim in split_top(match[2])))


def _parse_loc(text: str) -> Loc:
    match = re.match(r'("(?:[^"\\]|\\.)*"):(\d+) ("(?:[^"\\]|\\.)*")', text.strip())
    if match is None:
        raise IRError(f"{text!r} is not a source location.")
    rest = text.strip()[match.end() :].strip()
    fused = tuple(map(_parse_loc, split_top(rest[len("fused(") : -1]))) if rest else ()
    return Loc(json.loads(match[1]), int(match[2]), json.loads(match[3]), fused)


def _region(op: str, name: str, attr: Any) -> Any:
    """An attribute; the text of a region as the graph that it is."""
    is_text = isinstance(attr, str) and attr.startswith("graph @")
    return parse(attr) if is_text and op_def(op).arg(name).region else attr


def _balanced(text: str, start: int) -> int:
    """The position of the bracket that closes the one before `start`."""
    depth, position = 1, start
    while position < len(text):
        if text[position] == '"' and (match := _STRING.match(text, position)):
            position = match.end()
            continue
        depth += (text[position] in "([{") - (text[position] in ")]}")
        if depth == 0:
            return position
        position += 1
    raise IRError(f"A bracket is not closed in {text!r}.")


class _Parser:
    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.weights = weights
        self.values: dict[str, Value] = {}
        self.graph = Graph()
        self.builder: Builder | None = None

    def line(self, text: str) -> None:
        if match := re.fullmatch(r"graph @([\w.]+) \{", text):
            self.graph.name = match[1]
        elif match := _DIM.match(text):
            high = int(match[4]) if match[4] else None
            self.graph.dims[match[1]] = DimInfo(int(match[3]), high, int(match[2]))
        elif text.startswith("require "):
            condition = parse_condition(text.removeprefix("require "))
            self.graph.conditions = (*self.graph.conditions, condition)
        elif match := _VALUE.match(text):
            self._value(match[1], match[2][1:], parse_type(match[3]))
        elif match := _CONSTANT.match(text):
            self._constant(match[1][1:], match[2], parse_type(match[3]))
        elif text.startswith("return"):
            self._return(text.removeprefix("return"))
        elif match := _NODE.match(text):
            self._node(match, text)
        else:
            raise IRError("expected dim, input, require, parameter, constant, a node or return")

    def _value(self, kind: str, name: str, type: Type) -> None:
        if kind == "input":
            self.values[name] = self.graph.add_input(name, type)
        else:
            self.values[name] = self.graph.add_constant(name, self.weights.get(name), type)

    def _constant(self, name: str, text: str, type: Type) -> None:
        if not isinstance(type, TensorType) or not type.is_static:
            raise IRError(f"constant %{name} needs a static tensor type")
        data = torch.tensor(parse_attr(text), dtype=type.dtype).reshape(
            [int(d) for d in type.shape]
        )
        self.values[name] = self.graph.add_constant(name, data)

    def _node(self, match: re.Match[str], text: str) -> None:
        names = [name.strip()[1:] for name in match[1].split(",")]
        end = _balanced(text, match.end())
        inputs = [self._read(item) for item in split_top(text[match.end() : end])]
        rest = text[end + 1 :].strip()
        attrs: dict[str, Any] = {}
        if rest.startswith("{"):
            close = _balanced(rest, 1)
            for item in split_top(rest[1:close]):
                key, _, attr = item.partition(" = ")
                attrs[key] = _region(match[2], key, parse_attr(attr))
            rest = rest[close + 1 :].strip()
        types_text, _, loc_text = rest.partition("@")
        loc = _parse_loc(loc_text) if loc_text else UNKNOWN
        if types_text.strip():
            types = [parse_type(item) for item in split_top(types_text.strip()[1:])]
            node = self.graph.create(match[2], inputs, attrs, types=types, names=names, loc=loc)
        else:
            self.builder = self.builder or Builder(self.graph)
            node = self.builder.at(None, loc).node(match[2], *inputs, names=names, **attrs)
        for given, value in zip(names, node.outputs, strict=True):
            if given != value.name:
                raise IRError(f"%{given} is defined twice")
            self.values[given] = value

    def _return(self, text: str) -> None:
        values, names = [], []
        for item in split_top(text):
            reference, _, name = item.partition(" as ")
            value = self._read(reference)
            if value is None:
                raise IRError("a graph can't return none")
            values.append(value)
            names.append(json.loads(name) if name else value.name)
        self.graph.set_outputs(values, names)

    def _read(self, text: str) -> Value | None:
        if text == "none":
            return None
        if text[1:] not in self.values:
            raise IRError(f"{text} is not defined")
        return self.values[text[1:]]


def parse(text: str, weights: Mapping[str, torch.Tensor] | None = None) -> Graph:
    """Reads a graph. `weights` supplies data for `parameter` lines by name.

    Raises IRError with the line's number and text.
    """
    parser = _Parser(weights or {})
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#") or stripped == "}":
            continue
        try:
            parser.line(stripped)
        except IRError as error:
            raise IRError(
                f"Line {number} of the graph doesn't parse: {error} In: {stripped}"
            ) from error
    return parser.graph
