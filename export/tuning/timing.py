"""Times of one attention site in several forms, on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from attngraph.export.files.save import to_session
from attngraph.export.kernels import Choice, Facts, Form
from attngraph.export.kernels.facts import (
    ATTENTION,
    BIAS,
    BOOL,
    CAUSAL,
    LENGTHS,
    PACKED,
    PACKED_ATTENTION,
    ROW_SINKS,
    SINKS,
    SOFTCAP,
    WEIGHTS,
)
from attngraph.export.lowering.lower import lower
from attngraph.export.target import Target
from attngraph.ir import Builder, Graph, Node, TensorType, Value
from attngraph.ir.ops import input_of


def measure(
    facts: Facts,
    forms: Sequence[Form],
    target: Target,
    lengths: Iterable[int],
    seconds: float,
    *,
    threads: int | None = None,
) -> dict[str, dict[int, float]]:
    """Milliseconds per call of each form at each length: medians of rounds in which forms take
    turns."""
    times: dict[str, dict[int, float]] = {form.name: {} for form in forms}
    for length in lengths:
        graph = site_graph(facts, length)
        for name, ms in time_forms(graph, forms, target, seconds, threads=threads).items():
            times[name][length] = ms
    return times


def site_graph(facts: Facts, length: int) -> Graph:
    """One attention like the site, with `length` queries; its masks are inputs, and its tables."""
    if PACKED in facts.features:
        return _packed_graph(facts, length)
    graph = Graph("site")
    batch = max(facts.batch[0], 1)
    low, high = facts.keys
    keys = length if facts.square else max(low, min(length, length if high is None else high))
    size, values = facts.head_size or 64, facts.value_size or 64
    query, key, value = (
        graph.add_input(name, TensorType(facts.dtype, (batch, rows, width)))
        for name, rows, width in (
            ("query", length, facts.heads * size),
            ("key", keys, facts.groups * size),
            ("value", keys, facts.groups * values),
        )
    )
    full = (batch, 1, length, keys)
    bias = mask = sinks = lengths = None
    if BIAS in facts.features:
        bias = graph.add_input("bias", TensorType(facts.dtype, (1, facts.heads, length, keys)))
    if BOOL in facts.features:
        mask = graph.add_input("mask", TensorType(torch.bool, full))
    if SINKS in facts.features:
        shape = (batch, facts.heads, length, 1) if ROW_SINKS in facts.features else (facts.heads,)
        sinks = graph.add_input("sinks", TensorType(facts.dtype, shape))
    if LENGTHS in facts.features:
        lengths = graph.add_input("lengths", TensorType(torch.int64, (batch,)))
    build = Builder(graph)
    if facts.rotary_features is not None:
        query, key = _turned(build, facts, query, key)
    attrs: dict[str, Any] = {
        "heads": facts.heads,
        "kv_heads": facts.groups,
        "scale": size**-0.5 if facts.positive_scale else -(size**-0.5),
    }
    if CAUSAL in facts.features:
        attrs["causal"] = True
    if SOFTCAP in facts.features:
        attrs["softcap"] = 30.0
    if WEIGHTS in facts.features:
        attrs["weights"] = True
    if facts.window:
        attrs["window"] = facts.window
    operands = query, key, value, bias, mask, sinks, None, None, lengths
    node = build.node("attn.attention", *operands, **attrs)
    graph.set_outputs([*node.outputs], [output.name for output in node.outputs])
    return graph


def _packed_graph(facts: Facts, length: int) -> Graph:
    """Attention over all B·length rows of a batch in which nothing is padding."""
    graph = Graph("site")
    batch = max(facts.batch[0], 1)
    size, values = facts.head_size or 64, facts.value_size or 64
    rows = [
        graph.add_input(name, TensorType(facts.dtype, (1, batch * length, width)))
        for name, width in (
            ("query", facts.heads * size),
            ("key", facts.groups * size),
            ("value", facts.groups * values),
        )
    ]
    kept = graph.add_input("kept", TensorType(torch.bool, (batch, length)))
    attrs = {"heads": facts.heads, "kv_heads": facts.groups, "scale": size**-0.5}
    node = Builder(graph).node(PACKED_ATTENTION, *rows, kept, **attrs)
    graph.set_outputs([node.output], [node.output.name])
    return graph


def _turned(build: Builder, facts: Facts, query: Value, key: Value) -> tuple[Value, Value]:
    """Both after a rotary embedding, and after norms of each head where the site has them."""
    length, half = query.shape[1], (facts.rotary_features or 0) // 2
    kind = TensorType(facts.dtype, (1, length, half))
    tables = [build.graph.add_input(name, kind) for name in ("cos", "sin")]
    tables = [build("aten.expand", table, size=[query.shape[0], length, half]) for table in tables]
    found = []
    for operand, heads in ((query, facts.heads), (key, facts.groups)):
        if facts.normed:
            split = [*operand.shape[:2], heads, facts.head_size]
            split_up = build("aten.reshape", operand, shape=split)
            normal = build("attn.rms_norm", split_up, eps=1e-6)
            operand = build("aten.reshape", normal, shape=list(operand.shape))
        found.append(build("attn.rotary", operand, *tables, heads=heads))
    return found[0], found[1]


def time_forms(
    graph: Graph,
    forms: Sequence[Form],
    target: Target,
    seconds: float,
    *,
    threads: int | None = None,
    rounds: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Milliseconds per call of the one attention of a graph of static sizes, by form."""
    (node,) = (node for node in graph if node.op in (ATTENTION, PACKED_ATTENTION))
    random = torch.Generator().manual_seed(0)
    device = "cuda" if target.provider == "cuda" else "cpu"
    inputs = [_sample(value, node, random).to(device) for value in graph.inputs]
    taken: dict[str, list[float]] = {form.name: [] for form in forms}
    with ExitStack() as stack:
        calls: dict[str, Callable[[], object]] = {}
        for form in forms:
            model = lower(graph, target=target, kernels={node: Choice(form, "")})
            session = stack.enter_context(to_session(model, target, threads=threads))
            calls[form.name] = partial(session.run, inputs)
        for call in calls.values():
            call()
        for _ in range(rounds):
            for name, call in calls.items():
                taken[name].append(milliseconds(call, seconds / rounds, clock))
    return {name: statistics.median(figures) for name, figures in taken.items()}


def _sample(value: Value, site: Node, random: torch.Generator) -> torch.Tensor:
    """Masks that hide nothing, and lengths of half of the keys."""
    sizes = [int(dim) for dim in value.shape]
    if value.dtype == torch.bool:
        return torch.ones(sizes, dtype=torch.bool)
    if value.dtype == torch.int64:
        return torch.full(sizes, -(-int(input_of(site, "key").shape[1]) // 2))
    return torch.randn(sizes, generator=random).to(value.dtype)


def milliseconds(
    call: Callable[[], object], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> float:
    """The mean time of calls that go on for so many seconds, at least one."""
    calls, start = 0, clock()
    while True:
        call()
        calls += 1
        passed = clock() - start
        if passed >= seconds:
            return passed / calls * 1e3
