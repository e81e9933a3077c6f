"""States that are read by another key than they are written by, in products of matrices.

    python -m bench.two_keys [--rounds 9] [--seconds 0.3]

Times `attn.generalized_delta_rule` on one thread beside the loop over tokens that it is read
from, each in a process of its own, in turns: with decays that are known to be bounded, which go in
chunks, and with others. Writes bench/results/two_keys.json, and docs/recognition.md shows it. Run
it on a quiet machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import attngraph
from attngraph.export.files.save import to_session
from attngraph.export.lowering.lower import lower
from attngraph.export.target import Target
from attngraph.export.tuning.timing import milliseconds
from bench import machine
from bench.harness import in_turns, option, options_of

SHAPES = ((8, 64), (4, 128), (12, 32))
LENGTHS = (1, 16, 512, 2048)
SLOWEST = 0.606531  # e^{−1/2}: RWKV-7's decays are above e^−0.61
_LONGEST = 8192


class Rule(nn.Module):
    """RWKV-7's rule on r, w, k, v, a, b (B, T, H, D)."""

    def __init__(self, bounded: bool) -> None:
        super().__init__()
        self.slowest = SLOWEST if bounded else None

    def forward(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        a, w = F.normalize(a, dim=-1), torch.sigmoid(w)
        decay = w if self.slowest is None else torch.exp(-self.slowest * w)
        b = -a * torch.sigmoid(b)
        state = r.new_zeros(r.shape[0], r.shape[2], r.shape[3], r.shape[3])
        given = []
        for t in range(r.shape[1]):
            read = a[:, t, :, None] @ state
            written = b[:, t, ..., None] @ read + k[:, t, ..., None] @ v[:, t, :, None]
            state = state * decay[:, t, ..., None] + written
            given.append((r[:, t, :, None] @ state)[:, :, 0])
        return torch.stack(given, 1)


def block(heads: int, size: int, bounded: bool, read: bool, seconds: float) -> Callable[[], Any]:
    """Milliseconds of a call at each of `LENGTHS`; a portable file keeps the loop."""
    torch.manual_seed(0)

    def inputs(length: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(1, length, heads, size) for _ in range(6))

    sizes = tuple({1: Dim("length", min=1, max=_LONGEST)} for _ in range(6))
    optimized = attngraph.optimize(
        Rule(bounded).eval(),
        inputs(7),
        dynamic_shapes=sizes,
        portable=not read,
    )
    if read != ("attn.scan" not in [node.op for node in optimized.graph]):
        raise RuntimeError("the loop was read, or not, against what was asked for")
    drawn = {length: [*inputs(length)] for length in LENGTHS}
    session = to_session(lower(optimized.graph), Target("cpu"), threads=1)

    def times() -> dict[str, float]:
        return {
            str(length): milliseconds(partial(session.run, given), seconds)
            for length, given in drawn.items()
        }

    return times


def measured(rounds: int, seconds: float) -> list[dict[str, Any]]:
    """A row for each shape and length: medians in ms, and the medians of the rounds' ratios."""
    rows = []
    for heads, size in SHAPES:
        shape = {"heads": heads, "size": size, "seconds": seconds}
        engines = {
            f"{kind} {form}": shape | {"bounded": kind == "bounded", "read": form == "read"}
            for kind in ("bounded", "others")
            for form in ("loop", "read")
        }
        found = in_turns(block, engines, rounds)
        for length in LENGTHS:
            row: dict[str, Any] = {"heads": heads, "size": size, "length": length}
            for kind in ("bounded", "others"):
                loop, read = (
                    [each[str(length)] for each in found[f"{kind} {form}"]]
                    for form in ("loop", "read")
                )
                ratios = sorted(x / y for x, y in zip(loop, read, strict=True))
                row[kind] = {
                    "loop": statistics.median(loop),
                    "read": statistics.median(read),
                    "ratio": statistics.median(ratios),
                    "spread": [ratios[0], ratios[-1]],
                }
            rows.append(row)
            print(row, flush=True)
    return rows


def page() -> str:
    """The table of docs/recognition.md."""
    result = machine.read("two_keys")
    lines = [
        machine.measured_on(result),
        "",
        "| heads × features, tokens | bounded decays: loop | read | ratio "
        "| others: loop | read | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in result["rows"]:
        cells = [f"{row['heads']} × {row['size']}, {row['length']}"]
        for kind in ("bounded", "others"):
            least, most = row[kind]["spread"]
            cells += [f"{row[kind][form]:.3g}" for form in ("loop", "read")]
            cells.append(f"{row[kind]['ratio']:.2f} ({least:.2f}–{most:.2f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    options = options_of(
        __doc__,
        rounds=option(9, "blocks of each"),
        seconds=option(0.3, "of each length in a block"),
    )
    rows = measured(options.rounds, options.seconds)
    print(f"wrote {machine.write('two_keys', {'rows': rows})}")


if __name__ == "__main__":
    main()
