"""Times of one attention site in several forms, on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from attngraph.export.kernels import Choice, Facts, Form
from attngraph.export.kernels.facts import (
    ATTENTION,
    BIAS,
    BOOL,
    CAUSAL,
    PACKED,
    PACKED_ATTENTION,
    SOFTCAP,
    WEIGHTS,
)
from attngraph.export.lower import lower
from attngraph.export.save import to_session
from attngraph.export.target import Target
from attngraph.ir import Builder, Graph, TensorType, Value


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
    """One attention like the site, with `length` queries; its masks are inputs."""
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
    bias = mask = None
    if BIAS in facts.features:
        bias = graph.add_input("bias", TensorType(facts.dtype, (1, facts.heads, length, keys)))
    if BOOL in facts.features:
        mask = graph.add_input("mask", TensorType(torch.bool, full))
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
    node = Builder(graph).node("attn.attention", query, key, value, bias, mask, **attrs)
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
    inputs = [
        torch.ones(_sizes(value), dtype=torch.bool, device=device)
        if value.dtype == torch.bool
        else torch.randn(_sizes(value), generator=random).to(device, value.dtype)
        for value in graph.inputs
    ]
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


def _sizes(value: Value) -> list[int]:
    return [int(dim) for dim in value.shape]
