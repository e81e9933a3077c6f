"""Three choices made for onnxruntime's CPU kernels, each against what it was chosen over.

    python -m bench.kernels [--seconds 1.0]

A residual norm as SkipLayerNormalization, or as sums and LayerNormalization; the projections of Q,
K and V as one product that is split, or as three; and attention under a mask with denormal floats
kept, or counted as zero. Writes bench/results/kernels.json.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from onnx import helper

from attngraph.export.runtime.session import Session
from attngraph.export.target import Target
from attngraph.export.tuning.timing import milliseconds
from bench.harness import onnx_model, option, options_of
from bench.machine import write

CPU = Target("cpu")
ROWS, WIDTH = 1024, 768
HEADS, LENGTH = 12, 1024
ROUNDS = 5


def _norms() -> dict[str, bytes]:
    rows, width = [ROWS, WIDTH], [WIDTH]
    operands = {"x": rows, "skip": rows, "scale": width, "shift": width, "bias": width}
    fused = helper.make_node(
        "SkipLayerNormalization", list(operands), ["y"], domain="com.microsoft", epsilon=1e-5
    )
    norm = helper.make_node("LayerNormalization", ["total", "scale", "shift"], ["y"], epsilon=1e-5)
    one = [helper.make_node("Sum", ["x", "skip", "bias"], ["total"])]
    two = [
        helper.make_node("Add", ["x", "skip"], ["sum"]),
        helper.make_node("Add", ["sum", "bias"], ["total"]),
    ]
    return {
        "SkipLayerNormalization": onnx_model([fused], operands),
        "Sum and LayerNormalization": onnx_model([*one, norm], operands),
        "two Add and LayerNormalization": onnx_model([*two, norm], operands),
    }


def _projections(rows: int) -> dict[str, bytes]:
    """Three products of `rows` with constant weights, each as wide as the rows."""
    parts = ["q", "k", "v"]
    weights = {name: torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for name in parts}
    merged = {"w": torch.cat([*weights.values()], 1)}
    whole = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("Split", ["y"], parts, axis=-1, num_outputs=3),
    ]
    apart = [helper.make_node("MatMul", ["x", f"w{name}"], [name]) for name in parts]
    inputs = {"x": [rows, WIDTH]}
    return {
        f"{rows} rows, one product and Split": onnx_model(whole, inputs, parts, merged),
        f"{rows} rows, three products": onnx_model(
            apart, inputs, parts, {f"w{name}": weight for name, weight in weights.items()}
        ),
    }


def _attention() -> bytes:
    packed, mask = [1, LENGTH, HEADS * 64], [1, 1, LENGTH, LENGTH]
    node = helper.make_node(
        "Attention", ["q", "k", "v", "mask"], ["y"], q_num_heads=HEADS, kv_num_heads=HEADS
    )
    inputs = {"q": packed, "k": packed, "v": packed, "mask": mask}
    return onnx_model([node], inputs, booleans=["mask"])


def _times(calls: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median milliseconds of rounds in which the calls take turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            found[name].append(milliseconds(call, seconds / ROUNDS))
    return {name: statistics.median(times) for name, times in found.items()}


def _measured(
    models: Mapping[str, bytes], inputs: Sequence[torch.Tensor], seconds: float
) -> dict[str, float]:
    with ExitStack() as stack:
        sessions = {
            name: stack.enter_context(Session.open(model, CPU)) for name, model in models.items()
        }
        return _times({name: partial(s.run, inputs) for name, s in sessions.items()}, seconds)


def main() -> None:
    seconds = options_of(__doc__, seconds=option(1.0, "for each variant")).seconds
    torch.manual_seed(0)
    row, vector = torch.randn(ROWS, WIDTH), torch.randn(WIDTH)
    norm = _measured(_norms(), [row, row, vector, vector, vector], seconds)
    projections = {
        name: ms
        for rows in (1, 32, 128, ROWS)
        for name, ms in _measured(_projections(rows), [row[:rows]], seconds).items()
    }
    q, mask = torch.randn(1, LENGTH, HEADS * 64), torch.ones(1, 1, LENGTH, LENGTH).tril().bool()
    model = _attention()
    variants: dict[str, tuple[bool, torch.Tensor]] = {
        "all keys seen": (False, torch.ones_like(mask)),
        "causal, denormals kept": (False, mask),
        "causal, denormals zero": (True, mask),
    }
    with ExitStack() as stack:
        calls = {
            name: partial(
                stack.enter_context(Session.open(model, CPU, flush_denormals=flush)).run,
                [q, q, q, seen],
            )
            for name, (flush, seen) in variants.items()
        }
        attention = _times(calls, seconds)
    write(
        "kernels",
        {
            "threads": torch.get_num_threads(),
            "norm": {"rows": ROWS, "width": WIDTH, "ms": norm},
            "projections": {"width": WIDTH, "ms": projections},
            "attention": {"heads": HEADS, "length": LENGTH, "ms": attention},
        },
    )
    for name, ms in {**norm, **projections, **attention}.items():
        print(f"{name:40} {ms:8.3f} ms")


if __name__ == "__main__":
    main()
