"""Codes of weights that are chosen on a layer's inputs, as GPTQ does (Frantar et al. 2022).

Rounding each element of a weight W to the nearest step makes W as exact as can be, not W x. With X
the inputs of a linear on calibration data and H = X Xᵀ, a row w of W loses (ŵ − w) H (ŵ − w)ᵀ of
its output. Columns are rounded one by one, those with the largest H_jj first, and what one loses is
made up for by the columns that are still free: with U the upper Cholesky factor of H⁻¹ and
e = (w_j − ŵ_j) / U_jj, w_k is less by e U_jk. A share of its mean diagonal is added to H, so that
it can be inverted, and no direction that the data hardly has moves a weight far: a hundredth where
the data are calibration data. Of a sample that may be nothing like what is met in use, only what
all inputs of a layer have in common is to be learnt, such as the mean of what a GELU gives. There
it is a fifth, and more by as much as there are fewer rows than features.

A row takes such codes only where they lose less on the data than the nearest ones, and are no
further from the weight than any codes may be; on a sample, than `_FARTHER` times the nearest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attngraph.dialect.quantized import BLOCK, dequantized, in_bytes
from attngraph.export.formats import Weights
from attngraph.export.precision.codes import chunks, error_bound, neighbours
from attngraph.export.precision.quantize import BITS, ROWS, Rounding, Stored, linears_of, stored
from attngraph.ir import Graph, Value, interpret
from attngraph.ir.ops import input_of

_DAMPING = 0.01
_DAMPING_ON_SAMPLES = 0.2
_FARTHER = 1.25
_COLUMNS = 128
"""Columns that are rounded before those behind them are corrected, all at once."""
_CHUNK = 4 << 20
"""Elements whose codes are chosen at once: each goes through all columns, one by one."""
_GAIN = 0.999
"""A share of what a row loses with the nearest codes; sums in float32 are more exact."""
_WIDEST = 1 << 14
"""Features of an input whose Hessian is built: a GiB of float32."""


def chosen_on(
    graph: Graph,
    inputs: Sequence[torch.Tensor],
    weights: Weights,
    rounding: Rounding | None,
    *,
    calibrates: bool = True,
) -> dict[str, Stored]:
    """By the name of each weight for which some are better than the nearest, its codes for what the
    inputs make of the graph: calibration data, or a sample if not `calibrates`.

    The graph runs once. A Hessian is held until the weights that are multiplied by its input have
    their codes, so one or two are at a time.
    """
    _, weights_of = linears_of(graph, frozenset() if rounding is None else rounding.keep)
    waiting: dict[frozenset[Value], list[Value]] = {}
    for weight, nodes in weights_of.items():
        sources = frozenset(input_of(node, "input") for node in nodes)
        waiting.setdefault(sources, []).append(weight)
    seen: dict[Value, tuple[torch.Tensor, int]] = {}
    found: dict[str, Stored] = {}

    def observe(value: Value, tensor: torch.Tensor) -> None:
        groups = [sources for sources in waiting if value in sources]
        if not groups or tensor.shape[-1] > _WIDEST:
            return
        rows = tensor.detach().reshape(-1, tensor.shape[-1]).float()
        rows = rows[rows.isfinite().all(-1)]
        seen[value] = rows.T @ rows, len(rows)
        for sources in groups:
            if sources <= seen.keys():
                hessian = torch.stack([seen[each][0] for each in sources]).sum(0)
                count = sum(seen[each][1] for each in sources)
                scarce = None if calibrates else max(1.0, len(hessian) / max(count, 1))
                for weight in waiting.pop(sources):
                    assert weight.data is not None
                    plain = stored(weight.data.detach(), BITS[weights], rounding)
                    data = weight.data.detach()
                    better = improved(plain, data, BITS[weights], hessian, rounding, scarce)
                    if torch.equal(better.codes, plain.codes):
                        continue
                    codes = better.codes if graph.keep is None else graph.keep(better.codes)
                    found[weight.name] = better._replace(codes=codes)
        wanted = set().union(*waiting)
        for each in seen.keys() - wanted:
            del seen[each]

    for value, tensor in zip(graph.inputs, inputs, strict=True):
        if tensor.dim():
            observe(value, tensor)
    interpret(graph, inputs, observe=observe)
    return found


def improved(
    plain: Stored,
    data: torch.Tensor,
    bits: int,
    hessian: torch.Tensor,
    rounding: Rounding | None = None,
    scarce: float | None = None,
) -> Stored:
    """The weight (N, K) with codes that lose less of its product with inputs of this X Xᵀ (K, K).

    The steps stay. `plain` are the nearest codes, which stay too where nothing is better. X is a
    sample where `scarce` is how many features it has for each row, at least 1.
    """
    width = data.shape[1]
    limit = error_bound(bits, width if plain.form == ROWS else BLOCK)
    factor = _factor(hessian, _DAMPING if scarce is None else _DAMPING_ON_SAMPLES * scarce)
    if factor is None or not plain.error <= limit:
        return plain
    upper, order = factor
    back = order.argsort()
    codes, lost, norm = plain.codes.clone(), 0.0, 0.0
    for part in chunks(len(data), width, _CHUNK):
        exact, steps = data[part].cpu().float(), _steps(plain, part, width)
        near = _integers(plain, part, bits, width)
        free = _rounded(exact[:, order], steps[:, order], upper, _span(plain, bits))[:, back]
        off = [found * steps - exact for found in (near, free)]
        losses = [((each @ hessian) * each).sum(-1) for each in off]
        better = losses[1] < _GAIN * losses[0]
        better &= off[1].norm(dim=-1) <= limit * exact.norm(dim=-1)
        if scarce is not None:
            better &= off[1].norm(dim=-1) <= _FARTHER * off[0].norm(dim=-1)
        if rounding is not None and rounding.narrow and plain.form == ROWS:
            better &= neighbours(free) <= 128  # so that sums stay in 16 bits (quantize.py)
        taken = torch.where(better[:, None], free, near)
        codes[part] = _packed(plain, taken, bits)
        lost += float((taken * steps - exact).double().square().sum())
        norm += float(exact.double().square().sum())
    error = (lost / norm) ** 0.5 if norm else 0.0
    # Rows that kept codes further off than `limit` may leave no room for the others.
    return plain._replace(codes=codes, error=error) if error <= limit else plain


def _factor(hessian: torch.Tensor, damping: float) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The upper Cholesky factor of H⁻¹, in the order of columns in which they are rounded."""
    diagonal = hessian.diagonal()
    mean = float(diagonal.double().mean())
    if not 0 < mean < torch.inf or not bool(hessian.isfinite().all()):
        return None
    order = diagonal.argsort(descending=True, stable=True)
    # H = R Rᵀ with R upper is the Cholesky factor of H back to front, and so U = R⁻¹.
    damped = hessian[order.flip(0)][:, order.flip(0)].double()
    damped.diagonal().add_(damping * mean)
    lower, failed = torch.linalg.cholesky_ex(damped)
    if int(failed):
        return None
    unit = torch.eye(len(lower), dtype=lower.dtype)
    upper = torch.linalg.solve_triangular(lower.flip(0, 1), unit, upper=True)
    return upper.float(), order


def _rounded(
    exact: torch.Tensor, steps: torch.Tensor, upper: torch.Tensor, span: tuple[int, int]
) -> torch.Tensor:
    """Integers for the elements (n, K) of some rows, column by column."""
    left, found = exact.clone(), torch.zeros_like(exact)
    for start in range(0, exact.shape[1], _COLUMNS):
        stop = min(start + _COLUMNS, exact.shape[1])
        lost = torch.empty(len(exact), stop - start)
        for at in range(start, stop):
            step, column = steps[:, at], left[:, at]
            found[:, at] = torch.where(step != 0, column / step, 0.0).round().clamp(*span)
            lost[:, at - start] = (column - found[:, at] * step) / upper[at, at]
            left[:, at:stop] -= lost[:, at - start, None] * upper[at, at:stop]
        left[:, stop:] -= lost @ upper[start:stop, stop:]
    return found


def _span(plain: Stored, bits: int) -> tuple[int, int]:
    most = (1 << bits - 1) - 1
    return (-most if plain.form == ROWS else -most - 1), most


def _steps(plain: Stored, part: slice, width: int) -> torch.Tensor:
    """The step of each element (n, K)."""
    scales = plain.scales[part].float()
    if plain.form == ROWS:
        return scales[:, None].expand(-1, width)
    return scales.repeat_interleave(BLOCK, -1)[:, :width]


def _integers(plain: Stored, part: slice, bits: int, width: int) -> torch.Tensor:
    """The multiples (n, K) of their steps that the codes stand for."""
    codes = plain.codes[part]
    if plain.form == ROWS:
        return codes.float()
    return dequantized(codes, torch.ones(codes.shape[:2]), bits)[:, :width]


def _packed(plain: Stored, integers: torch.Tensor, bits: int) -> torch.Tensor:
    if plain.form == ROWS:
        return integers.to(torch.int8)
    blocks = plain.codes.shape[1]
    whole = torch.nn.functional.pad(integers, (0, blocks * BLOCK - integers.shape[1]))
    codes = (whole + (1 << bits - 1)).to(torch.uint8).view(len(integers), blocks, BLOCK)
    return in_bytes(codes, bits)
