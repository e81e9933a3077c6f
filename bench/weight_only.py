"""A linear with a quantized weight, in the forms that onnxruntime's CPU provider has for it.

    python -m bench.weight_only [--rounds 5] [--seconds 0.3] [--keep]

One row, as in a decoding step, and 128, as in a prompt. `MatMulNBits` at accuracy levels 0 (its
own), 1 (float32) and 4 (activations rounded to int8), in blocks of 32 and 128; 8 bits also as two
products of 4 bits each; `DequantizeLinear` before a `MatMul`, in blocks and with one scale for each
row of the weight, with what would fold or fuse the two switched off. Times are ratios to the
product in float32 of the same round. One session is open at a time, and takes part in each round.
Errors are against the weight that the codes stand for, in float64, over those of the product in
float32. Writes bench/results/weight_only.json; with --keep export/kernels/weight_only.json too,
from which reports say what quantized weights cost on the CPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import onnxruntime
import torch
from onnx import NodeProto, TensorProto, helper, numpy_helper

from attngraph.export.tuning.timing import milliseconds
from bench.harness import keep, onnx_model, option, options_of
from bench.machine import write

ROWS = (1, 128)
WIDTH = 2048
BLOCKS = (32, 128)
LEVELS = (0, 1, 4)
KEPT = Path(__file__).parents[1] / "export" / "kernels" / "weight_only.json"
APART = ["ConstantFolding", "QDQSelectorActionTransformer"]
PLAIN = "MatMul in float32"

Constants = Mapping[str, numpy.ndarray[Any, Any] | TensorProto]


@dataclass(frozen=True)
class Form:
    """A model of x (S, K), and the weight (N, K) that it multiplies by, in float64."""

    model: bytes
    weight: torch.Tensor
    off: tuple[str, ...] = ()


def quantised(weight: torch.Tensor, bits: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Unsigned codes (N, K/block, block), of which the middle is zero, and scales (N, K/block)."""
    split = weight.view(len(weight), -1, block)
    scales = split.abs().amax(-1) / (2 ** (bits - 1) - 1)
    codes = (split / scales.unsqueeze(-1)).round() + 2 ** (bits - 1)
    return codes.to(torch.uint8), scales


def forms(weight: torch.Tensor) -> Iterator[tuple[str, Form]]:
    yield PLAIN, Form(_model([_matmul("w")], {"w": weight.t().numpy()}), weight.double())
    for bits in (8, 4):
        for block in (*BLOCKS, weight.shape[1]):
            codes, scales = quantised(weight, bits, block)
            middle = 2 ** (bits - 1)
            exact = ((codes.double() - middle) * scales.double().unsqueeze(-1)).flatten(1)
            name = f"int{bits}, block {block}" if block in BLOCKS else f"int{bits}, one per row"
            blocked = block in BLOCKS
            if blocked:
                for level in LEVELS:
                    node = _nbits("w", "s", bits, block, level)
                    constants = {"w": _stored(codes, bits), "s": scales.numpy()}
                    yield (
                        f"{name}: MatMulNBits, accuracy {level}",
                        Form(_model([node], constants), exact),
                    )
            if blocked and bits == 8:
                yield f"{name}: two of 4 bits", Form(_halves(codes, scales, block), exact)
            if bits == 8 or blocked:
                yield (
                    f"{name}: DequantizeLinear",
                    Form(
                        _dequantised(codes, scales, bits, block if blocked else 0), exact, (*APART,)
                    ),
                )


def _halves(codes: torch.Tensor, scales: torch.Tensor, block: int) -> bytes:
    """c − 128 = 16 (h − 8) + l, with h and l of four bits each."""
    constants = {
        "h": _stored(codes >> 4, 4),
        "l": _stored(codes & 15, 4),
        "sixteen": numpy.array(16, numpy.float32),
        "s": scales.numpy(),
        "z": numpy.zeros((len(scales), -(-scales.shape[1] // 2)), numpy.uint8),
    }
    nodes = [
        helper.make_node("Mul", ["x", "sixteen"], ["scaled"]),
        _nbits("h", "s", 4, block, 1, x="scaled", output="upper"),
        _nbits("l", "s", 4, block, 1, zero="z", output="lower"),
        helper.make_node("Add", ["upper", "lower"], ["y"]),
    ]
    return _model(nodes, constants)


def _dequantised(codes: torch.Tensor, scales: torch.Tensor, bits: int, block: int) -> bytes:
    signed = (codes.to(torch.int16) - 2 ** (bits - 1)).flatten(1).t().contiguous().numpy()
    if bits == 8:
        stored = numpy_helper.from_array(signed.astype(numpy.int8), "w")
    else:
        pairs = signed.reshape(-1, 2).astype(numpy.uint8) & 15
        raw = (pairs[:, 0] | pairs[:, 1] << 4).tobytes()
        stored = helper.make_tensor("w", TensorProto.INT4, signed.shape, raw, raw=True)
    scale = scales.t().contiguous().numpy()
    extra: dict[str, Any] = {"axis": 0, "block_size": block} if block else {"axis": 1}
    nodes = [helper.make_node("DequantizeLinear", ["w", "s"], ["wide"], **extra), _matmul("wide")]
    return _model(nodes, {"w": stored, "s": scale if block else scale[0]})


def _nbits(
    weight: str,
    scales: str,
    bits: int,
    block: int,
    level: int,
    *,
    x: str = "x",
    zero: str = "",
    output: str = "y",
) -> NodeProto:
    return helper.make_node(
        "MatMulNBits",
        [x, weight, scales, *([zero] if zero else [])],
        [output],
        domain="com.microsoft",
        K=WIDTH,
        N=WIDTH,
        bits=bits,
        block_size=block,
        accuracy_level=level,
    )


def _stored(codes: torch.Tensor, bits: int) -> numpy.ndarray[Any, Any]:
    found = codes if bits == 8 else codes[..., ::2] | codes[..., 1::2] << 4
    return found.contiguous().numpy()


def _matmul(weight: str) -> NodeProto:
    return helper.make_node("MatMul", ["x", weight], ["y"])


def _model(nodes: list[NodeProto], constants: Constants) -> bytes:
    return onnx_model(nodes, {"x": ["rows", WIDTH]}, weights=constants)


def _session(form: Form, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(
        form.model, options, ["CPUExecutionProvider"], disabled_optimizers=[*form.off]
    )


def measure(rounds: int, seconds: float, threads: int) -> dict[str, dict[str, Any]]:
    """Of each form, by the number of rows: the ratio of each round, milliseconds, and the error."""
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(WIDTH, WIDTH, generator=random) / WIDTH**0.5
    inputs = {rows: torch.randn(rows, WIDTH, generator=random) for rows in ROWS}
    taken: dict[str, dict[int, list[float]]] = {}
    errors: dict[str, dict[int, float]] = {}
    for _ in range(rounds):
        for name, form in forms(weight):
            session = _session(form, threads)
            for rows, x in inputs.items():
                feeds = {"x": x.numpy()}
                (found,) = session.run(None, feeds)
                off = torch.from_numpy(found).double() - x.double() @ form.weight.t()
                errors.setdefault(name, {})[rows] = float(off.square().mean().sqrt())
                ms = milliseconds(partial(session.run, None, feeds), seconds)
                taken.setdefault(name, {}).setdefault(rows, []).append(ms)
            del session  # its threads would take part in the next one's time
    return {
        name: {
            str(rows): {
                "ms": statistics.median(ms),
                "ratios": [a / b for a, b in zip(ms, taken[PLAIN][rows], strict=True)],
                "error": errors[name][rows] / errors[PLAIN][rows],
            }
            for rows, ms in by_rows.items()
        }
        for name, by_rows in taken.items()
    }


def kept(results: dict[str, Any]) -> dict[str, Any]:
    """What reports say: median ratios, two digits."""
    return {
        "measured_by": "bench.weight_only",
        "onnxruntime": results["onnxruntime"],
        "times_of_float32": {
            name: {
                rows: float(f"{statistics.median(found['ratios']):.2g}")
                for rows, found in by_rows.items()
            }
            for name, by_rows in results["forms"].items()
        },
    }


def main() -> None:
    options = options_of(
        __doc__,
        rounds=5,
        seconds=option(0.3, "for each form in each round"),
        keep=option(False, "also write what reports say"),
    )
    threads = torch.get_num_threads()
    results = {
        "onnxruntime": onnxruntime.__version__,
        "threads": threads,
        "width": WIDTH,
        "rounds": options.rounds,
        "forms": measure(options.rounds, options.seconds, threads),
    }
    print(f"wrote {write('weight_only', results)}")
    if options.keep:
        keep(KEPT, kept(results))
    for name, by_rows in results["forms"].items():
        for rows, found in by_rows.items():
            ratio = statistics.median(found["ratios"])
            print(f"{name:45} {rows:>4} rows {ratio:7.2f} ×, error {found['error']:9.2f} ×")


if __name__ == "__main__":
    main()
