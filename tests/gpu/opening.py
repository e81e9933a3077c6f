"""Whether a session works here at all: `python -m tests.gpu.opening TARGET OUT.json`.

A small attention in each precision: tensors on the host and on the device, work of torch that is
still under way when onnxruntime is called, buffers of torch's that are free to be used again, and a
CUDA graph. What goes wrong here goes wrong everywhere; it takes seconds.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import onnxruntime
import torch

import attngraph
from attngraph.export.formats import Precision
from attngraph.export.parity.samples import DTYPE
from attngraph.export.runtime.providers import preload_cuda
from attngraph.export.target import parse_target
from attngraph.optimized import Optimized
from tests.gpu.checks import PRECISIONS

OPENS = "a session opens"
_HEADS, _SIZE, _LENGTH = 4, 16, 8


class Small(torch.nn.Module):
    """(B, S, 64) and a bool mask (B, S), which is given back too."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = torch.nn.Linear(_HEADS * _SIZE, 3 * _HEADS * _SIZE)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = self.projection(x).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (_HEADS, _SIZE)).transpose(1, 2) for part in parts)
        attend = torch.nn.functional.scaled_dot_product_attention
        context = attend(query, key, value, attn_mask=mask[:, None, None, :])
        return context.transpose(1, 2).flatten(2), mask.logical_not()


@torch.no_grad()
def opened(precision: Precision, target: str) -> dict[str, str]:
    """What was tried, and what is wrong with it: "" if nothing."""
    torch.manual_seed(0)
    module = Small().eval()
    x, mask = torch.randn(2, _LENGTH, _HEADS * _SIZE), torch.ones(2, _LENGTH, dtype=torch.bool)
    mask[1, _LENGTH // 2 :] = False
    found: dict[str, str] = {}
    made: list[Optimized] = []

    def compiled() -> None:
        settings: dict[str, Any] = {"target": target, "precision": precision}
        made.append(attngraph.optimize(module, (x, mask), verify="off", **settings))
        placed = set(made[0].session.placement)
        assert placed == {parse_target(target).execution_provider}, f"nodes are on {placed}"

    _try(found, OPENS, compiled)
    if not made:
        return found
    optimized, device = made[0], "cuda" if target.startswith("cuda") else "cpu"
    expected: list[torch.Tensor] = []
    # Eight roundings of a mean of values below 4.
    near = 8 * 4 * torch.finfo(DTYPE[precision]).eps

    def same(outputs: Any, wanted: Any, place: str) -> None:
        for output, other in zip(outputs, wanted, strict=True):
            assert output.device.type == place, f"an output is on {output.device}"
            apart = float((output.cpu().float() - other.float()).abs().max())
            assert apart <= near, f"it is off by {apart:.2g}"

    def on_the_host() -> None:
        expected.extend(optimized.run([x, mask]))
        same(expected, module(x, mask), "cpu")

    def on_the_device() -> None:
        same(optimized.run([x.to(device), mask.to(device)]), expected, device)

    def under_way() -> None:
        rows = 2048 if device == "cuda" else 8
        for _ in range(20):
            late = torch.randn(rows, rows, device=device)
            for _ in range(20):
                late = (late @ late).clamp(-1, 1)
            same(optimized.run([x.to(device) + 0 * late[0, 0], mask.to(device)]), expected, device)

    def used_again() -> None:
        for _ in range(50):
            first = optimized.run([x.to(device), mask.to(device)])[0].clone()
            optimized.run([-x.to(device), mask.to(device)])
            same([first], expected[:1], device)

    def replayed() -> None:
        graph = optimized.open(cuda_graph=True)
        for _ in range(3):
            graph.run([-x.to(device), mask.to(device)])
            same(graph.run([x.to(device), mask.to(device)]), expected, device)
        same(graph.run([x, mask]), expected, "cpu")

    _try(found, "tensors on the host", on_the_host)
    _try(found, "tensors on the device", on_the_device)
    _try(found, "torch's work under way", under_way)
    _try(found, "memory used again", used_again)
    if device == "cuda":
        _try(found, "a CUDA graph", replayed)
    return found


def _try(found: dict[str, str], what: str, work: Any) -> None:
    try:
        work()
        found[what] = ""
    except Exception as error:  # whatever fails: the rest is tried too
        found[what] = f"{type(error).__name__}: {' '.join(str(error).split())}"


def main(target: str, out: Path) -> None:
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "onnxruntime": f"{onnxruntime.__version__}, {onnxruntime.get_available_providers()}",
        "not_loaded": preload_cuda() if target.startswith("cuda") else [],
    }
    for precision in PRECISIONS:
        if (target, precision) != ("cpu", "bf16"):
            found[precision] = opened(precision, target)
            out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
