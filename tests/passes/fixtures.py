"""Reads pass fixtures, and evaluates their graphs on inputs and weights made from names.

A fixture `tests/passes/<pass>/<case>.ir` is text in, text out:

    # claim: what this shows
    # pass: constant-fold{max_bytes = 16}     (optional: the pass's options)
    # then: dce                               (optional: passes that tidy up what it leaves)
    # range: ids = 0..7                       (optional: values of an integer input; default 0..2)
    graph @main { … }
    // ----
    graph @main { … }
    # remark: declined [some-code] reason     (what the pass says, if it says anything)

Equal halves state that the pass must not fire. The second has numbers of 12 digits.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from attngraph.ir import Graph, Remark, Value, format_graph, interpret, parse
from attngraph.ir.dims import substitute
from attngraph.ir.parser import parse_attr, split_top
from attngraph.ir.printer import INLINE_ELEMENTS
from attngraph.passes import Pass, registered
from attngraph.passes import make as make_passes

SEPARATOR = "// ----\n"
FLOATS = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
DIGITS = 12
_LOWEST = {repr(torch.finfo(dtype).min) for dtype in (*FLOATS, torch.float64)}
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+(?:e[+-]\d+)?|e[+-]\d+)")
_HEADER = re.compile(r"^# (claim|pass|then|range): (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Fixture:
    """One file: its claim, its pass with options, and the two halves as text."""

    path: Path
    claim: str
    item: Pass
    then: list[Pass]
    before: str
    expected: str
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)

    def run(self, graph: Graph) -> list[Remark]:
        """The pass, then what tidies up behind it; returns the remarks of the pass."""
        remarks = self.item.run(graph)
        for item in self.then:
            item.run(graph)
        return remarks

    @property
    def with_loc(self) -> bool:
        return ' @ "' in self.before


def read(path: Path) -> Fixture:
    """Raises ValueError where the file states no claim, KeyError where there is no such pass."""
    before, _, expected = path.read_text(encoding="utf-8").partition(SEPARATOR)
    claim, options, then, ranges = "", {}, "", {}
    for kind, text in _HEADER.findall(before):
        if kind == "claim":
            claim = text
        elif kind == "then":
            then = text
        elif kind == "range":
            name, _, bounds = text.partition(" = ")
            low, _, high = bounds.partition("..")
            ranges[name] = (int(low), int(high))
        elif "{" in text:
            for item in split_top(text[text.index("{") + 1 : text.rindex("}")]):
                key, _, value = item.partition(" = ")
                options[key] = parse_attr(value)
    if not claim:
        raise ValueError(f"{path} needs a line '# claim: …'.")
    make: Any = registered()[path.parent.name]
    return Fixture(path, claim, make(**options), make_passes(then), before, expected, ranges)


def result_text(graph: Graph, remarks: list[Remark], *, loc: bool) -> str:
    """The second half: the graph, then the remarks as comments.

    Numbers have 12 digits: the last of float64's 17 depend on the order in which a library sums.
    """
    lines = [f"# remark: {r.status} [{r.code}] {r.reason}\n" for r in remarks]
    return _NUMBER.sub(_shorter, format_graph(graph, loc=loc)) + "".join(lines)


def agree(actual: str, expected: str) -> bool:
    """The same text, where a number may be one off in its twelfth digit."""
    if _NUMBER.split(actual) != _NUMBER.split(expected):
        return False
    pairs = zip(_NUMBER.findall(actual), _NUMBER.findall(expected), strict=True)
    return all(a == b or math.isclose(float(a), float(b), rel_tol=1e-11) for a, b in pairs)


def _shorter(number: re.Match[str]) -> str:
    """The lowest number of a dtype stays: a fill is told by its last digit."""
    digits = number[0].partition("e")[0]
    if len(digits.lstrip("-0.").replace(".", "")) <= DIGITS or number[0] in _LOWEST:
        return number[0]
    return repr(float(f"{float(number[0]):.{DIGITS}g}"))


def write(fixture: Fixture, result: str) -> None:
    """Replaces the file's second half."""
    fixture.path.write_text(fixture.before + SEPARATOR + result, encoding="utf-8")


def load(text: str) -> Graph:
    """Parses the first half; `parameter` lines get their data from their names."""
    graph = parse(text)
    for value in graph.constants.values():
        if value.data is None:
            kind = value.tensor_type
            value.data = _tensor(kind.dtype, [int(d) for d in kind.shape], _seed(value.name))
    return graph


def sizes_of(graph: Graph) -> list[dict[str, int]]:
    """Each dim at its hint, and all of them near their lower bounds and unequal."""
    hints = {name: info.hint for name, info in graph.dims.items()}
    low = {
        name: min(info.low + position, info.high or info.low + position)
        for position, (name, info) in enumerate(graph.dims.items())
    }
    return [hints, low] if hints else [{}]


def inputs_for(
    graph: Graph, sizes: Mapping[str, int], fixture: Fixture, *, special: bool = False
) -> list[torch.Tensor]:
    """Seeded tensors for the graph's inputs; `special` puts −0, ∞ and NaN among the floats."""
    made = []
    for value in graph.inputs:
        kind = value.tensor_type
        shape = [substitute(dim, sizes) for dim in kind.shape]
        low, high = fixture.ranges.get(value.name, (0, 2))
        tensor = _tensor(kind.dtype, shape, _seed(value.name), low, high)
        if special and kind.dtype.is_floating_point and tensor.numel():
            odd = torch.tensor([-0.0, 0.0, torch.inf, -torch.inf, torch.nan]).to(kind.dtype)
            tensor.reshape(-1)[::3] = odd.repeat(tensor.numel())[: len(tensor.reshape(-1)[::3])]
        made.append(tensor)
    return made


def widened(graph: Graph) -> Graph:
    """The same graph with every float as float64: weights, casts and the lowest finite fills."""
    text = format_graph(graph)
    text = re.sub(r"\b(f16|bf16|f32)\b", "f64", text)
    text = re.sub(r"\bc64\b", "c128", text)
    for dtype in FLOATS:
        text = text.replace(repr(torch.finfo(dtype).min), repr(torch.finfo(torch.float64).min))
    weights = {
        name: value.data.double() if value.data.is_floating_point() else value.data
        for name, value in graph.constants.items()
        if value.data is not None and not _inline(value)
    }
    return parse(text, weights)


def _inline(value: Value) -> bool:
    return value.data is not None and value.data.numel() <= INLINE_ELEMENTS


def _seed(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def _tensor(
    dtype: torch.dtype, shape: list[int], seed: torch.Generator, low: int = 0, high: int = 2
) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=seed).to(dtype)
    return torch.randint(low, high, shape, generator=seed).to(dtype)


def assert_identical(fixture: Fixture, before: Graph, after: Graph) -> None:
    """Equal to the last bit, with the sign of every zero; NaN is equal to NaN."""
    for sizes in sizes_of(before):
        for special in (False, True):
            inputs = inputs_for(before, sizes, fixture, special=special)
            for a, b in zip(_run(before, inputs), _run(after, inputs), strict=True):
                torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True)
                if a.is_floating_point():
                    zero = a == 0
                    assert torch.equal(a[zero].signbit(), b[zero].signbit()), "sign of a zero"


def assert_close_in_float64(fixture: Fixture, before: Graph, after: Graph) -> None:
    """Within 1,000 roundings of the output's largest element: what reassociating may cost."""
    wide, wide_after = widened(before), widened(after)
    for sizes in sizes_of(before):
        inputs = inputs_for(wide, sizes, fixture)
        for a, b in zip(_run(wide, inputs), _run(wide_after, inputs), strict=True):
            finite = a[a.isfinite()].abs() if a.is_floating_point() else a.new_zeros(0)
            scale = float(finite.amax()) if finite.numel() else 0.0
            atol = 1000 * torch.finfo(torch.float64).eps * scale
            torch.testing.assert_close(b, a, rtol=0, atol=atol, equal_nan=True)


def _run(graph: Graph, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Random ops draw the same numbers before and after."""
    torch.manual_seed(0)
    return interpret(graph, inputs)
