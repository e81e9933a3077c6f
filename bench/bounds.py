"""What the matrix products alone cost: no engine that makes them with these kernels is faster.

    python -m bench.bounds [--workload llama_long …] [--rounds 7] [--seconds 2]

For each workload, eager PyTorch; the products of its linears, in onnxruntime and in PyTorch; and
the two products of its attentions in onnxruntime, of which a causal one needs half. Of a mixture's
experts each has as many rows as the others. Nothing else is computed: no norm, softmax, activation
or sum. `decode` is a step of bench.decode's model. Each is in a process of its own, and they take
turns. Writes bench/results/bounds-FAMILY.json, of the family of this CPU.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from onnx import helper

from attngraph.analysis.experts.products import GROUPED
from attngraph.compiling.pipeline import pipeline
from attngraph.export.families import own_family
from attngraph.export.runtime.session import Session
from attngraph.export.target import Target
from attngraph.frontend.capture import capture
from attngraph.ir.dims import substitute
from attngraph.ir.interpreter import bind_dims
from attngraph.measuring.turns import timed
from attngraph.passes import run
from bench.decode import model as decoder_model
from bench.harness import in_turns, onnx_model, option, options_of
from bench.machine import write
from bench.workloads import BY_NAME

EAGER, LINEARS, TORCH, ATTENTION = ENGINES = (
    "eager PyTorch",
    "linears' products, onnxruntime",
    "linears' products, PyTorch",
    "attentions' products, onnxruntime",
)
DECODE, PAST = "decode", 1024
DEFAULT = (
    *("gpt2_prefill", "llama_prefill", "llama_long", "vit"),
    *("mixtral", "qwen3_moe", "qwen3_next", DECODE),
)

Shape = tuple[int, int, int, int]
"""Batch, rows, inner size and columns of a product; batch 0: the right side is a weight."""


def _eager(name: str) -> Callable[[], object]:
    if name != DECODE:
        module, args, _ = _built(name)
        return lambda: module(*args)
    from transformers import DynamicCache

    module, cache = decoder_model(12), DynamicCache()
    module(torch.randint(32000, (1, PAST)), past_key_values=cache, use_cache=True)
    token = torch.ones(1, 1, dtype=torch.int64)

    def step() -> None:
        module(token, past_key_values=cache, use_cache=True)
        cache.crop(-1)

    return step


def _built(name: str) -> Any:
    return getattr(sys.modules["bench.workloads"], name)()


def products(name: str) -> tuple[list[Shape], list[Shape], float]:
    """The products of the linears and of the attentions, and the share of the latter needed."""
    if name == DECODE:
        weights = [w for n, w in decoder_model(12).named_parameters() if w.ndim == 2]
        linears = [
            (0, 1, w.shape[1], w.shape[0]) for w in weights[1:]
        ]  # the embedding is looked up
        return linears, [(4, 3, 64, PAST), (4, 3, PAST, 64)] * 12, 1.0
    module, args, dynamic = _built(name)
    graph = capture(module, args, dynamic_shapes=dynamic).graph
    run(graph, pipeline(part=True, experts=True))
    sizes: dict[str, int] = {}
    for value, given in zip(graph.inputs, args, strict=True):
        bind_dims(sizes, value.tensor_type, given.shape, value.name)
    linears, attentions, causal = list[Shape](), list[Shape](), False
    for node in graph:
        shapes: list[Any] = [v and substitute(v.shape, sizes) for v in node.inputs]
        if node.op == "aten.linear":
            *rows, inner = shapes[0]
            linears.append((0, torch.Size(rows).numel(), inner, shapes[1][0]))
        elif node.op in GROUPED:
            (rows, inner), (experts, _, columns) = shapes[:2]
            linears += [(0, rows // experts, inner, columns)] * experts
        elif node.op == "attn.attention":
            (batch, queries, width), (_, keys, _) = shapes[:2]
            heads = node.attrs["heads"]
            size = width // heads
            batches = batch * heads
            attentions += [(batches, queries, size, keys), (batches, queries, keys, size)]
            causal = causal or bool(node.attrs.get("causal"))
    return linears, attentions, 0.5 if causal else 1.0


def _onnxruntime(shapes: Sequence[Shape]) -> Callable[[], object]:
    nodes, inputs, outputs, weights = [], {}, [], {}
    for index, (batch, rows, inner, columns) in enumerate(shapes):
        left, right, result = f"x{batch}_{rows}_{inner}", f"w{index}", f"y{index}"
        inputs[left] = torch.randn(*([batch] if batch else []), rows, inner)
        if batch:
            right = f"x{batch}_{inner}_{columns}_right"
            inputs[right] = torch.randn(batch, inner, columns)
        else:
            weights[right] = torch.randn(inner, columns)
        nodes.append(helper.make_node("MatMul", [left, right], [result]))
        outputs.append(result)
    given = {name: value.shape for name, value in inputs.items()}
    built = onnx_model(nodes, given, outputs, weights)
    session = Session.open(built, Target("cpu"))
    return lambda: session.run(list(inputs.values()))


def _torch(shapes: Sequence[Shape]) -> Callable[[], object]:
    inputs = {(rows, inner): torch.randn(rows, inner) for _, rows, inner, _ in shapes}
    weights = [
        (inputs[rows, inner], torch.randn(columns, inner)) for _, rows, inner, columns in shapes
    ]
    return lambda: [torch.nn.functional.linear(x, weight) for x, weight in weights]


def block_of(engine: str, name: str, seconds: float) -> Callable[[], float]:
    """A block says the milliseconds per call."""
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    share = 1.0
    if engine == EAGER:
        call = _eager(name)
    else:
        linears, attentions, needed = products(name)
        share = needed if engine == ATTENTION else 1.0
        make = _torch if engine == TORCH else _onnxruntime
        call = make(attentions if engine == ATTENTION else linears)
    call()
    return lambda: share * timed(call, seconds)


def measure(name: str, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Milliseconds per call of each engine, one figure per round."""
    given = {"name": name, "seconds": seconds}
    return in_turns(block_of, {engine: {"engine": engine, **given} for engine in ENGINES}, rounds)


def bound(times: Mapping[str, Sequence[float]]) -> float:
    """Eager's time over that of all products in onnxruntime: the median over the rounds."""
    rounds = zip(times[EAGER], times[LINEARS], times[ATTENTION], strict=True)
    return statistics.median(eager / (linears + attention) for eager, linears, attention in rounds)


def main() -> None:
    options = options_of(
        __doc__,
        workload=option([*DEFAULT], choices=[*BY_NAME, DECODE]),
        rounds=7,
        seconds=option(2.0, "of a block"),
    )
    os.environ.setdefault("BENCH_LAYERS", "4")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    results = {}
    for name in options.workload:
        times = measure(name, options.rounds, options.seconds)
        title = BY_NAME[name].title if name in BY_NAME else f"a decoding step behind {PAST} tokens"
        results[name] = {"title": title, "ms": times, "bound": bound(times)}
        print(name, {k: round(statistics.median(v), 2) for k, v in times.items()})
        print(f"  at most {results[name]['bound']:.2f} × eager")
    write(f"bounds-{own_family()}", {"threads": torch.get_num_threads(), "workloads": results})


if __name__ == "__main__":
    main()
