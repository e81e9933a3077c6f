"""Files whose weights are stored in few bits, held to two things that need no wide bound.

What rounding a weight to 4 or 8 bits does to an output has no bound worth the name: scores that are
nearly equal become unequal, and a row attends elsewhere. So the outputs are not compared with those
of the module's own weights. A file is taken apart instead:

- Each stored column is one of the model, or of a file of it without these bits, where weights are
  folded into each other; to half a step of its block, and at the last code to a step and a half on
  the far side, as codes have no room on both sides of 0.
- The file with those matrices put back is as right as any other file: within rounding of float64.
- The file itself is within rounding of one whose matrices are the numbers that its codes stand for.

The last two are bounds of float32, and together leave the few bits no other effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from torch import Tensor, nn

from tests.fuzz.oracle import Args, Forward, judged

Matrix = NDArray[np.float32]
_SEEDS = 4  # runs whose matrices are off by one rounding


@dataclass(frozen=True)
class _Stored:
    """A matrix (K, N): the numbers that its codes stand for, their steps, where the codes end."""

    numbers: Matrix
    step: Matrix
    ends: NDArray[np.bool_]


def taken_apart(file: Path, floats: Path, module: nn.Module) -> tuple[list[Path], str]:
    """The file with the matrices of the module, or of `floats`, put back, one with the numbers that
    its codes stand for and some of those off by one rounding; or what is wrong with its codes.
    """
    model = onnx.load(file)
    known = {tensor.name: tensor for tensor in model.graph.initializer}
    pairs: dict[str, dict[str, _Stored]] = {}
    for node in model.graph.node:
        if node.op_type == "MatMulNBits":
            pairs.setdefault(node.input[2], {})[node.input[1]] = _stored(node, known)
    back: dict[str, Matrix] = {}
    held: dict[str, Matrix] = {}
    own = [each.detach().numpy().T for each in module.parameters() if each.ndim == 2]
    folded = list(_matrices(onnx.load(floats)))
    norms = [each.detach().numpy() for each in module.parameters() if each.ndim == 1]
    # codes of a weight that is scaled but has no norm's weight in it, which in floats it has
    freed = [m / w[:, None] for m in folded for w in norms if len(w) == len(m) and w.all()]
    columns = [*own, *folded, *freed]
    for name, parts in pairs.items():
        *upper, (codes, lower) = parts.items()  # a product of 8 bits is 16 times one of 4 and one
        whole, ends = lower.numbers, lower.ends
        for _, part in upper:
            whole, ends = whole + 16 * part.numbers, ends & part.ends
        found = _put_back(whole, lower.step, ends, columns)
        if len(parts) > 2 or found is None:
            return [], f"{name}: no weight is within half a step of its codes"
        held |= {each: part.numbers for each, part in parts.items()}
        back |= {each: part.numbers for each, part in upper}
        back[codes] = found - (whole - lower.numbers)
    paths = [_with(model, back, file.with_name("back.onnx"))]
    for seed in range(_SEEDS):
        draw = np.random.default_rng(seed)
        moved = {
            name: _nudged(numbers, draw) if seed else numbers for name, numbers in held.items()
        }
        paths.append(_with(model, moved, file.with_name(f"held{seed}.onnx")))
    return paths, ""


def differs(run: Forward, held: list[Forward], tensors: Args, label: str) -> str:
    """How a file's outputs are not those of the numbers that its codes stand for, or nothing."""
    given = [_moved(tensors, seed) for seed in range(len(held))]
    runs = [each(*moved) for each, moved in zip(held, given, strict=True)]
    found: list[Tensor] = list(run(*tensors))
    told = [
        judged(each, own[0].double(), own)[0]
        for each, *own in zip(found, *runs, strict=True)
        if each.is_floating_point()
    ]
    return "; ".join(
        f"{label}: of its codes, output {i} {said}" for i, said in enumerate(told) if said
    )


def _moved(tensors: Args, seed: int) -> Args:
    if not seed:
        return tensors
    draw = np.random.default_rng(seed)
    return tuple(
        torch.from_numpy(_nudged(t.numpy(), draw)) if t.is_floating_point() else t for t in tensors
    )


def _nudged(numbers: Matrix, draw: np.random.Generator) -> Matrix:
    eps = np.finfo(np.float32).eps
    sign = draw.integers(0, 2, numbers.shape) * 2 - 1
    whole = (numbers == np.round(numbers)) | ~np.isfinite(numbers)
    moved = numbers * (1 + sign * eps).astype(np.float32)
    return np.where(whole, numbers, moved).astype(np.float32)


def _stored(node: onnx.NodeProto, known: dict[str, onnx.TensorProto]) -> _Stored:
    sizes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    rows, width, bits, block = (sizes[name] for name in ("N", "K", "bits", "block_size"))

    def read(name: str, count: int) -> NDArray[np.float64]:
        data = numpy_helper.to_array(known[name]).reshape(rows, -1)
        if bits == 4:
            data = np.stack([data & 15, data >> 4], -1).reshape(rows, -1)
        return data[:, :count].astype(np.float64)

    blocks = -(-width // block)
    codes = read(node.input[1], blocks * block).reshape(rows, blocks, block)
    steps = numpy_helper.to_array(known[node.input[2]]).reshape(rows, blocks, 1)
    zeros = np.full((rows, blocks), 2.0 ** (bits - 1))
    if len(node.input) > 3 and node.input[3]:
        zeros = read(node.input[3], blocks)
    numbers = (codes - zeros[..., None]) * steps
    step = np.broadcast_to(np.abs(steps), codes.shape)
    ends = (codes == 0) | (codes == 2**bits - 1)
    numbers, step, ends = (each.reshape(rows, -1)[:, :width].T for each in (numbers, step, ends))
    return _Stored(numbers.astype(np.float32), step.astype(np.float32), ends)


def _matrices(model: onnx.ModelProto) -> Iterator[Matrix]:
    """Those of its products, as (K, N)."""
    known = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type in ("MatMul", "Gemm") and node.input[1] in known:
            found = numpy_helper.to_array(known[node.input[1]])
            flipped = any(a.name == "transB" and a.i for a in node.attribute)
            yield found.T if flipped else found


def _put_back(
    stored: Matrix, step: Matrix, ends: NDArray[np.bool_], among: list[Matrix]
) -> Matrix | None:
    """The matrix whose columns are those of these that codes fit, if all are near enough: of more
    than one, such as a column that is scaled a little and the same one as it was, that of the
    matrix which codes fit in most columns.
    """
    known = [each for each in among if len(each) == len(stored)]
    if not known:
        return None
    whole = np.concatenate(known, 1)
    off = whole[:, :, None] - stored[:, None]
    room = np.where(ends[:, None] & (np.sign(stored)[:, None] * off > 0), 1.5, 0.5) * step[:, None]
    # of the quotient too
    room += 4 * np.finfo(np.float32).eps * np.maximum(np.abs(whole)[:, :, None], step[:, None])
    over = (np.abs(off) - room).max(0)
    starts = np.cumsum([0, *(each.shape[1] for each in known[:-1])])
    counts = np.add.reduceat(over <= 0, starts, 0, dtype=np.int64).astype(bool).sum(1)
    fitted = np.repeat(counts, [each.shape[1] for each in known])[:, None] * (over <= 0)
    place = np.lexsort((over, -fitted), 0)[0]
    return whole[:, place] if bool((over.min(0) <= 0).all()) else None


def _with(model: onnx.ModelProto, matrices: dict[str, Matrix], path: Path) -> Path:
    """The file with products of matrices instead of codes, by the codes' names."""
    found = onnx.ModelProto()
    found.CopyFrom(model)
    nodes = []
    for node in found.graph.node:
        if node.op_type != "MatMulNBits":
            nodes.append(node)
            continue
        name, [output] = f"{node.input[1]}.matrix", node.output
        bias = node.input[5] if len(node.input) > 5 else ""
        product = f"{output}.product" if bias else output
        nodes.append(helper.make_node("MatMul", [node.input[0], name], [product]))
        if bias:
            nodes.append(helper.make_node("Add", [product, bias], [output]))
    del found.graph.node[:]
    found.graph.node.extend(nodes)
    used = {name for node in nodes for name in node.input}
    kept = [tensor for tensor in found.graph.initializer if tensor.name in used]
    del found.graph.initializer[:]
    found.graph.initializer.extend(kept)
    for name, matrix in matrices.items():
        made = numpy_helper.from_array(np.ascontiguousarray(matrix), f"{name}.matrix")
        found.graph.initializer.append(made)
    onnx.save(found, path)
    return path
