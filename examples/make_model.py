"""Write the model file of `make demo`: `python -m examples.make_model out/model.pt2`.

It is the nanoGPT example at four layers and 3.7 million parameters, saved by torch.export with a
dynamic batch and sequence. Its weights are random, and drawn wide enough for attention to be sharp.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from examples.nanogpt import CausalSelfAttention, Config, build

DEMO = Config(vocabulary=2048, context=256, width=256, heads=8, layers=4)


def write(path: Path, config: Config = DEMO) -> None:
    """Export the example to `path`, a `.pt2` archive, making its folder where there is none."""
    module, args, dynamic_shapes = build(config)
    for part in module.modules():
        if isinstance(part, CausalSelfAttention):
            torch.nn.init.normal_(part.c_attn.weight, std=1.5 / config.width**0.5)
    with torch.no_grad():
        program = torch.export.export(module, args, dynamic_shapes=dynamic_shapes, strict=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.export.save(program, path)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not arguments[0].endswith(".pt2"):
        print("usage: python -m examples.make_model PATH.pt2", file=sys.stderr)
        return 2
    path = Path(arguments[0])
    write(path)
    print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
