"""How far this process's resident set rises while a model is compiled and verified, as JSON.

    python peak.py FILE DTYPE

FILE is where the weights are written and mapped from; the model counts as a large one, whatever
its size. A small one is compiled first, so that modules imported on first use don't count.
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

from attngraph import mapped
from attngraph.compiling.compiler import Model, compile_model
from attngraph.export.parity import reference

LAYERS, WIDTH = 20, 2048


class Deep(nn.Module):
    """Residual layers of one square weight each, mapped from one file."""

    def __init__(self, file: Path, width: int, layers: int, dtype: torch.dtype) -> None:
        super().__init__()
        shape, random = (layers, width, width), torch.Generator().manual_seed(0)
        with file.open("wb") as stream:
            for _ in range(layers):
                weight = torch.randn(shape[1:], generator=random) / width
                stream.write(weight.to(dtype).numpy().data)
        size = layers * width * width
        weights = torch.from_file(str(file), shared=True, size=size, dtype=dtype).view(shape)
        self.weights = nn.ParameterList(
            nn.Parameter(weight, requires_grad=False) for weight in weights
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x + nn.functional.linear(x, weight).relu()
        return x


def verified(file: Path, width: int, layers: int, dtype: torch.dtype) -> None:
    module = Deep(file, width, layers, dtype)
    x, shapes = torch.randn(3, width).to(dtype), {"x": {0: torch.export.Dim("rows")}}
    compile_model(Model(module, None, (x,), {}, shapes))


def _mib(name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def main() -> None:
    warnings.simplefilter("ignore")
    file, dtype = Path(sys.argv[1]), getattr(torch, sys.argv[2])
    mapped.LARGE = reference._MOST_BYTES = 0
    verified(file, 32, LAYERS, dtype)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = _mib("VmRSS")
    verified(file, WIDTH, LAYERS, dtype)
    single = LAYERS * WIDTH * WIDTH * 4 / (1 << 20)
    print(json.dumps({"rise_mib": _mib("VmHWM") - before, "single_mib": single}))


if __name__ == "__main__":
    main()
